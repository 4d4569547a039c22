"""`--dry-run`: for how many ranks of which kind, and what is told about the plan."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from arguments import derive
from arguments.checks.run import shown
from arguments.dry_run.text import report
from arguments.errors import FlagErrors, Problem
from arguments.files import read_files
from arguments.flags import Flags, Registry
from arguments.launch import LaunchProblem, launch_of
from arguments.parser import Settings, settle
from arguments.recipes.find import About, about, find_recipe
from megatron_moe.specs.costs.facts import Facts, facts_of
from megatron_moe.specs.costs.hardware import GPUS, Gpu
from megatron_moe.specs.exitcodes import RunError
from megatron_moe.specs.run import RunPlan
from megatron_moe.specs.train import TokenizerSpec

_DEFAULT_GPU = "h100"
_GPT2_VOCABULARY = 50_257


@dataclass(frozen=True)
class Question:
    """What a dry run is asked."""

    form: Literal["text", "json"]
    gpu: Gpu
    environ: Mapping[str, str]
    """Environment of the first of the ranks it is for."""


def question(asked: Settings, environ: Mapping[str, str]) -> Question | None:
    """What the command line asks of a dry run; None when it asks for none.

    The number of ranks is that of the flag, of the launcher, of the recipe, or one.
    """
    form = asked.setting("dry_run").value
    if form is None:
        return None
    return Question(form, *machine(asked, environ))


def machine(asked: Settings, environ: Mapping[str, str]) -> tuple[Gpu, dict[str, str]]:
    """The kind of GPU that is meant, and the environment of the first of the ranks."""
    said = _said(asked)
    gpu = GPUS[asked.setting("gpu").value or said.gpu or _DEFAULT_GPU]
    num_ranks = asked.setting("world_size").value or _launched(environ)
    if num_ranks == 1 and not asked.setting("world_size").value and not asked.setting("proxy").value:
        num_ranks = said.gpus
    return gpu, _first_rank(environ, num_ranks, gpu)


def _said(asked: Settings) -> About:
    """What the recipe says of itself."""
    name = asked.setting("recipe").value
    return about(str(name), asked.registry) if name is not None and find_recipe(str(name)) else About()


def _launched(environ: Mapping[str, str]) -> int:
    try:
        return launch_of(environ).world_size
    except LaunchProblem as trouble:
        raise FlagErrors([trouble.problem]) from None


def _first_rank(environ: Mapping[str, str], num_ranks: int, gpu: Gpu) -> dict[str, str]:
    """The environment as torchrun would leave it there."""
    ranks = {"RANK": 0, "WORLD_SIZE": num_ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": min(num_ranks, gpu.per_node)}
    return {**environ, "TORCHELASTIC_RUN_ID": "dry run", **{name: str(value) for name, value in ranks.items()}}


def or_known_size(
    vocab_size_of: Callable[[TokenizerSpec], int] | None, flags: Flags, unavailable: list[str]
) -> Callable[[TokenizerSpec], int] | None:
    """Wraps `vocab_size_of` for dry runs, which need only the size of the vocabulary.

    If the tokenizer cannot be read, the reason is added to `unavailable` and the size comes from the flags, or is that
    of GPT-2's published vocabulary.
    """
    if vocab_size_of is None:
        return None
    ask, given = vocab_size_of, flags.data.vocab_size or flags.model.padded_vocab_size

    def size(spec: TokenizerSpec) -> int:
        try:
            return ask(spec)
        except RunError as trouble:
            known = given or (_GPT2_VOCABULARY if spec.kind == "GPT2BPETokenizer" else None)
            if known is None:
                remedy = "give --vocab-size: a dry run needs nothing else of the tokenizer"
                raise FlagErrors([Problem(what=str(trouble), remedy=remedy)]) from None
            unavailable.append(
                str(trouble) if given else f"{trouble}; the figures assume {known:,} tokens, as in GPT-2"
            )
            return known

    return size


def with_tokenizer(flags: Flags) -> Flags:
    """Where no tokenizer is named, one that has nothing but the size of its vocabulary: all that a dry run asks for.

    Raises:
        FlagErrors: the size is not given either.
    """
    data = flags.data
    kind, size = derive.tokenizer_type(data.tokenizer_type, data.vocab_file, data.merge_file), data.vocab_size
    if size is None and kind in (None, "NullTokenizer"):
        remedy = "give --vocab-size: a dry run needs nothing else of the tokenizer"
        raise FlagErrors([Problem(what="the vocabulary size is not known", remedy=remedy)])
    return flags if kind else replace(flags, data=replace(data, tokenizer_type="NullTokenizer"))


def answer(plan: RunPlan, asked: Question, settings: Settings) -> str:
    """What is told about a plan."""
    facts = facts_with_words(plan, asked.gpu, settings)
    return json.dumps(facts, indent=2) if asked.form == "json" else report(facts)


def facts_with_words(plan: RunPlan, gpu: Gpu, settings: Settings) -> Facts:
    """The plan's numbers, and what is to be said of its flags."""
    recipe = settings.setting("recipe").value
    return {
        "recipe": recipe,
        **facts_of(plan, gpu),
        "environment": dict(plan.environment),
        "cannot_train_yet": list(plan.blockers),
        "notes": list(plan.notes),
        "differences": _differences(settings) if recipe is not None else [],
    }


def _differences(settings: Settings) -> list[str]:
    """Flags whose value is not the recipe's."""
    path = find_recipe(str(settings.setting("recipe").value))
    assert path is not None, "a recipe that was read is there"
    registry: Registry = settings.registry
    own = settle(registry, [file.flags for file in read_files(path, registry, {})])
    return list(_changes(own, settings, [name for name, flag in registry.flags.items() if flag.group != "start"]))


def _changes(own: Settings, settings: Settings, names: Sequence[str]) -> list[str]:
    lines = []
    for name in names:
        if not (own.known(name) and settings.known(name)):
            continue
        before, after = own.setting(name), settings.setting(name)
        if before.value != after.value:
            flag = settings.registry.flags[name]
            lines.append(
                f"{flag.option} {shown(flag, after.value)} ({after.origin}); recipe: {shown(flag, before.value)}"
            )
    return lines


def without_words(facts: Facts) -> Facts:
    """The numbers alone: what depends on the plan, and not on which features are available today."""
    return {**facts, "environment": {}, "cannot_train_yet": [], "notes": [], "differences": []}
