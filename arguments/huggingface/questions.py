"""`--from-hf-config DIR` and `--check-against-hf DIR`: the flags of a published model, and how far a run is from it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from arguments.checks import attention, model, moe, moe_router
from arguments.checks.run import broken_rules, missing_flags, parameters, shown
from arguments.errors import FlagErrors, Problem
from arguments.flag import REQUIRED
from arguments.flags import Flags, Registry
from arguments.huggingface.model_flags import described, model_flags
from arguments.parser import Given, Settings
from arguments.resolve_model import model_spec
from arguments.values import words_of
from megatron_moe.specs.exitcodes import CheckpointProblem, ExitCode, RunError
from megatron_moe.specs.families.derive import model_spec_from_hf, with_latent_norms_of
from megatron_moe.specs.families.differences import differences
from megatron_moe.specs.model import ModelSpec
from megatron_moe.specs.parallel import Launch

_MODEL_GROUPS = ("model", "attention", "moe")
_TRAINING_FLAGS = (
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "max_position_embeddings",
    "mtp_num_layers",
    "vocab_size",
)
"""May differ without changing what the weights of the layers mean; prediction layers are often not published."""
_HEADINGS = ("flag", "this run", "published")


class AnotherModel(RunError):
    """The flags describe another model than the folder. `str()` is the table."""

    code = ExitCode.CONFIG


def published_flags(folder: str, registry: Registry) -> tuple[list[Given], list[str]]:
    """The flags of the model in a Hugging Face folder, as one layer of settings, and notes on what no flag says.

    Raises FlagErrors when the folder has no config.json that can be read, or describes a model that cannot be built or
    that flags cannot describe. The epsilon of latent norms is noted alone: published weights go with either.
    """
    path = _config_path(folder)
    published = _published(path)
    layer = []
    for name, value in model_flags(published).items():
        flag = registry.flags[name]
        if value != flag.default:
            words = None if value is None else tuple(words_of(flag.type, value))
            layer.append(Given(flag.option, words, str(path)))
    said = described(published)
    refused = differences(said, with_latent_norms_of(said, published))
    if refused:
        remedy = "correct config.json, or give the model's flags without --from-hf-config to build what they describe"
        what = [f"{path}: no flag describes its {line}" for line in refused]
        raise FlagErrors([Problem(what=each, remedy=remedy) for each in what])
    return layer, [f"{path}: no flag says that {line}" for line in differences(said, published)]


def compared_with(folder: str, settings: Settings) -> str:
    """A sentence that says that the flags describe the model of a Hugging Face folder.

    Raises AnotherModel with a table of what differs; FlagErrors when there is no model on one of the sides.
    """
    path = _config_path(folder)
    published = _published(path)
    ours = _model_of(settings, published.vocab_size)
    lines = differences(ours, published)
    rows = _differing_flags(settings.registry, ours, published)
    if not lines:
        others = _table([row for row in rows if row[0] in _training_options(settings.registry)])
        return f"The flags describe the model of {path}." + (f" Choices of this run:\n{others}" if others else "")
    count = f"1 difference from {path}:" if len(lines) == 1 else f"{len(lines)} differences from {path}:"
    parts = [count, *(f"  {line}" for line in lines)]
    if rows:
        parts += ["", "In flags:", _table(rows)]
    raise AnotherModel("\n".join(parts))


def _config_path(folder: str) -> Path:
    path = Path(folder)
    return path if path.suffix == ".json" else path / "config.json"


def _published(path: Path) -> ModelSpec:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as trouble:
        what = f"{path} cannot be read: {trouble.strerror}"
        raise FlagErrors([Problem(what=what, remedy="give the folder that holds config.json")]) from None
    except (ValueError, RecursionError) as trouble:
        raise FlagErrors([Problem(what=f"{path} is not JSON: {trouble}", remedy="download the file again")]) from None
    if not isinstance(values, dict):
        raise FlagErrors([Problem(what=f"{path} holds no names with values", remedy="download the file again")])
    try:
        return model_spec_from_hf(values, mtp=True)
    except CheckpointProblem as trouble:
        raise FlagErrors([Problem(what=f"{path}: {trouble}")]) from None


def _model_of(settings: Settings, vocab_size: int) -> ModelSpec:
    """The model that the settings describe, whatever the rest of them says; with a vocabulary if they name none."""
    flags = settings.registry.flags
    missing = [problem for problem in missing_flags(settings, _MODEL_GROUPS) if "--seq-length" not in problem.what]
    rules = _rules_of_the_model(settings.registry)
    problems = [*settings.problems, *missing, *broken_rules(settings, Launch(), rules)]
    if problems:
        raise FlagErrors(problems)
    values = {name: settings.setting(name).value for name in flags}
    whole = Flags.of({name: 1 if value is REQUIRED else value for name, value in values.items()})
    return model_spec(whole, whole.data.vocab_size or vocab_size)


def _rules_of_the_model(registry: Registry) -> list[Callable[..., tuple[str, str] | None]]:
    """Those that ask for flags of the model alone."""
    rules = (*model.RULES, *attention.RULES, *moe.RULES, *moe_router.RULES)
    own = {flag.name for flag in registry.flags.values() if flag.group in _MODEL_GROUPS}
    return [rule for rule in rules if own.issuperset(parameters(rule))]


def _differing_flags(registry: Registry, ours: ModelSpec, published: ModelSpec) -> list[tuple[str, str, str]]:
    mine, theirs = model_flags(ours), model_flags(published)
    rows = []
    for name in (*theirs, *(name for name in mine if name not in theirs)):
        flag = registry.flags[name]
        values = [shown(flag, side.get(name, flag.default)) for side in (mine, theirs)]
        if values[0] != values[1]:
            rows.append((flag.option, values[0], values[1]))
    return rows


def _training_options(registry: Registry) -> list[str]:
    return [registry.flags[name].option for name in _TRAINING_FLAGS]


def _table(rows: Sequence[tuple[str, str, str]]) -> str:
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in (_HEADINGS, *rows)) for column in range(3)]
    return "\n".join(
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (_HEADINGS, *rows)
    )
