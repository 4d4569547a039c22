"""From the words of a command line to a checked RunPlan. The door of this package."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from pathlib import Path

from arguments import derive, environment, explain
from arguments.checks import data as data_checks
from arguments.checks.kernels import slow_sizes
from arguments.checks.run import (
    MODEL_PARALLEL,
    RULES,
    Rule,
    broken_rules,
    flags_without_effect,
    given_hints,
    ignored_flags,
    missing_flags,
    unavailable_flags,
    unknown_layers,
)
from arguments.data_lists import read_data_lists
from arguments.dry_run import request as dry_run
from arguments.dry_run.inputs import missing_inputs
from arguments.emulation import emulation, planned
from arguments.errors import Finished, FlagErrors, Problem
from arguments.export import export, yaml_text
from arguments.files import read_files
from arguments.flags import Flags, Registry, normal
from arguments.huggingface import compared_with, published_flags
from arguments.launch import LaunchProblem, allocation_note, launch_of, other_ranks
from arguments.parser import Given, Settings, near, settle, split, start_settings
from arguments.proxy.fold import FoldRequest
from arguments.proxy.rewrite import UNUSED_BY_PROXY, fold_request, proxied
from arguments.recipes import find_recipe, recipe_names
from arguments.resolve import run_plan, tokenizer_config
from megatron_moe.config.data import TokenizerConfig
from megatron_moe.config.faults import ALLOWED
from megatron_moe.config.parallel import Launch
from megatron_moe.config.run import RunPlan

VocabSizeOf = Callable[[TokenizerConfig], int]


def read_plan(
    argv: Sequence[str],
    environ: Mapping[str, str],
    vocab_size_of: VocabSizeOf | None = None,
    *,
    waiting: bool = False,
) -> RunPlan:
    """The plan that a command line asks for.

    Args:
        argv: the words behind the program's name.
        environ: the environment: who started this process, and the variables that files name.
        vocab_size_of: how to ask a tokenizer for its vocabulary size. Without it `--vocab-size` is not checked.
        waiting: also plans that cannot be trained yet, for lack of a feature or of data, with their `blockers`.

    Raises:
        FlagErrors: everything that is wrong with it, at once.
        Finished: it asked for a text (`--help`, `--find`, `--print-config`, `--dry-run`), which the exception carries.
        AnotherModel: `--check-against-hf` found another model.
    """
    registry = Registry.declared()
    answer = explain.answer(argv, registry)
    if answer is not None:
        raise Finished(answer)
    start = start_settings(argv, registry)
    asked, played = dry_run.question(start, environ), emulation(start, environ)
    untrained = asked or played
    environ = untrained.environ if untrained else environ
    told = _told(argv, environ, registry)
    _answer(told)
    rules = [rule for rule in RULES if not (played and rule in data_checks.RULES)]
    only_dry = waiting or asked is not None
    flags, launch, waits = _checked(told, environ, rules, only_dry=only_dry)
    unavailable: list[str] = []
    if untrained or waiting:
        flags = dry_run.with_tokenizer(flags)
        vocab_size_of = dry_run.or_known_size(vocab_size_of, flags, unavailable)
    plan = _plan(flags, launch, _vocab_size(flags, vocab_size_of, told.settings), told, environ, argv)
    if only_dry:
        plan = replace(
            plan,
            missing_inputs=(*_reasons(waits, "for an input"), *unavailable, *missing_inputs(plan)),
            blockers=_reasons(waits, "for a feature"),
        )
    if asked:
        raise dry_run.answer(plan, asked, told.settings)
    return planned(plan, played) if played else plan


def _reasons(problems: Sequence[Problem], waits: str) -> tuple[str, ...]:
    """Problems of one kind, those with an input with their remedy."""
    found = [problem for problem in problems if problem.waits == waits]
    if waits == "for a feature":
        return tuple(problem.what for problem in found)
    return tuple(f"{problem.what}; {problem.remedy}" for problem in found)


def _answer(told: "_Told") -> None:
    """Raises Finished when the command line asks for a text about its settings."""
    form = told.settings.setting("print_config").value
    if form:
        _refuse(told.settings.problems)
        raise Finished(export(told.settings, told.environment, form))
    folder = told.settings.setting("check_against_hf").value
    if folder:
        raise Finished(compared_with(folder, told.settings))


@dataclass
class _Told:
    """What command line and files say together."""

    settings: Settings
    environment: dict[str, str] = field(default_factory=dict)
    wish: FoldRequest | None = None
    """With `--proxy`: the layout that it folded."""


def _told(argv: Sequence[str], environ: Mapping[str, str], registry: Registry) -> _Told:
    words, problems = split(argv)
    asked = start_settings(argv, registry)
    paths, missing = files_asked_for(asked)
    needless = UNUSED_BY_PROXY if asked.setting("proxy").value else frozenset()
    files = [file for path in paths for file in read_files(path, registry, environ, needless=needless)]
    _refuse([*missing, *(problem for file in files if not file.readable for problem in file.problems)])
    folder = asked.setting("from_hf_config").value
    published, notes = published_flags(folder, registry) if folder else ([], [])
    layers = [published, *(file.flags for file in files)]
    layers += _around_proxy(words)
    settings = settle(registry, layers)
    settings.notes += notes
    read_data_lists(settings)
    for file in files:
        problems += file.problems
    settings.problems[:0] = problems
    environment = {name: value for file in files for name, value in file.environment.items()}
    if asked.setting("proxy").value:
        return _small(settings, environment, layers, environ)
    return _Told(settings, environment)


def layout_to_fold(argv: Sequence[str], environ: Mapping[str, str]) -> FoldRequest:
    """The layout that a command line with `--proxy` folds, for who chooses the ranks to fold it to.

    Raises FlagErrors.
    """
    wish = _told(argv, environ, Registry.declared()).wish
    assert wish is not None, f"no --proxy in {argv}"
    return wish


def fewest_ranks(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """The fewest ranks that the layout of a command line is possible on, for who computes on one, whatever the run did.

    Raises FlagErrors.
    """
    told = _told(argv, environ, Registry.declared()).settings.setting
    tp, cp, pp = (told(name).value for name in MODEL_PARALLEL)
    ep, etp = told("expert_model_parallel_size").value, told("expert_tensor_parallel_size").value
    return lcm(tp * cp, derive.expert_ranks(ep, etp, tp)) * int(pp)


def _around_proxy(words: list[Given]) -> list[list[Given]]:
    """The command line as one layer, or what stands before `--proxy` and what stands behind it."""
    behind = 1 + max((place for place, given in enumerate(words) if normal(given.option) == "--proxy"), default=-1)
    return [words[:behind], words[behind:]] if behind else [words]


def _small(
    settings: Settings,
    environment: dict[str, str],
    layers: Sequence[Sequence[Given]],
    environ: Mapping[str, str],
) -> _Told:
    """What `--proxy` makes of these settings, whose last layer stands behind it and stays as it is."""
    _refuse([*settings.problems, *missing_flags(settings)])
    *before, behind = layers
    full, pinned = settle(settings.registry, before), settle(settings.registry, [behind]).values
    full.values |= {name: setting for name, setting in pinned.items() if not full.known(name)}
    try:
        num_ranks = launch_of(environ).world_size
    except LaunchProblem as trouble:
        raise FlagErrors([trouble.problem]) from None
    small, rewrites = proxied(full, pinned, num_ranks)
    small.notes = [*settings.notes, *rewrites]
    return _Told(small, environment, fold_request(full, pinned))


def files_asked_for(start: Settings) -> tuple[list[Path], list[Problem]]:
    """The files to read, the recipe first, or that it does not exist."""
    paths: list[Path] = []
    problems: list[Problem] = []
    name = start.setting("recipe").value
    if name is not None:
        recipe = find_recipe(str(name))
        if recipe:
            paths.append(recipe)
        else:
            close = " or ".join(near(str(name), recipe_names()))
            remedy = f"did you mean {close}?" if close else "docs/recipes.md lists them"
            problems.append(Problem(what=f"there is no recipe {name!r}", remedy=remedy))
    config = start.setting("config").value
    assert isinstance(config, tuple)
    return [*paths, *map(Path, config)], problems


def _checked(
    told: _Told, environ: Mapping[str, str], rules: Sequence[Rule], *, only_dry: bool
) -> tuple[Flags, Launch, list[Problem]]:
    """Flags, launch and, of a dry run, the problems that prevent a start but not a plan.

    Raises:
        FlagErrors: all other problems.
    """
    settings = told.settings
    ignore = bool(settings.setting("allow_ignored_flags").value)
    problems = list(settings.problems)
    launch = Launch()
    try:
        launch = launch_of(environ)
        if not (only_dry or told.wish):
            value = settings.setting
            planned_for = value("world_size").value, value("nodes").value, value("gpus_per_node").value
            problems += other_ranks(*planned_for, launch)
    except LaunchProblem as trouble:
        problems.append(trouble.problem)
    if only_dry:
        launch = replace(launch, launcher="dry run")
    if settings.setting("inject").value and environ.get(ALLOWED) != "1":
        what = "--inject asks for faults, which happen in tests alone"
        problems.append(Problem(what=what, remedy=f"leave it out, or set {ALLOWED}=1"))
    problems += missing_flags(settings)
    problems += broken_rules(settings, launch, rules)
    problems += unavailable_flags(settings, ignore)
    waits = [problem for problem in problems if only_dry and problem.waits]
    _refuse([problem for problem in problems if not (only_dry and problem.waits)])
    note = allocation_note(environ)
    settings.notes += [note] if note else []
    settings.notes += flags_without_effect(settings)
    settings.notes += given_hints(settings)
    values = {name: settings.setting(name).value for name in settings.registry.flags}
    if ignore:
        ignored = ignored_flags(settings)
        settings.notes += ignored.values()
        values |= {name: settings.registry.flags[name].default for name in ignored}
    return Flags.of(values), launch, waits


def _refuse(problems: Sequence[Problem]) -> None:
    if problems:
        raise FlagErrors(problems)


def _vocab_size(flags: Flags, vocab_size_of: VocabSizeOf | None, settings: Settings) -> int:
    """The size given, which must hold the tokenizer's vocabulary, or else the tokenizer's."""
    given = flags.data.vocab_size
    if vocab_size_of is None:
        if given is None:
            raise FlagErrors([Problem(what="the vocabulary size is not known", remedy="give --vocab-size")])
        return given
    spoken = vocab_size_of(tokenizer_config(flags))
    rows = flags.model.padded_vocab_size
    if rows is not None and rows < spoken:
        raise _too_few("padded_vocab_size", rows, spoken, f"--padded-vocab-size {spoken} or more", settings)
    if given is None or given == spoken:
        return spoken
    if given < spoken:
        raise _too_few("vocab_size", given, spoken, "leave out --vocab-size", settings)
    settings.notes.append(f"--vocab-size {given} is larger than the tokenizer's vocabulary of {spoken} tokens")
    return given


def _too_few(name: str, given: int, spoken: int, remedy: str, settings: Settings) -> FlagErrors:
    option = settings.registry.flags[name].option
    what = f"{option} {given} is smaller than the tokenizer's vocabulary of {spoken} tokens"
    reason = "Every token that the tokenizer can make needs a row of the embedding."
    row = (option, str(given), settings.setting(name).origin)
    return FlagErrors([Problem(what=what, remedy=remedy, reason=reason, given=(row,))])


def _plan(
    flags: Flags, launch: Launch, vocab_size: int, told: _Told, environ: Mapping[str, str], argv: Sequence[str]
) -> RunPlan:
    wanted = environment.variables(flags, told.environment)
    to_set = environment.missing(wanted, environ)
    plan = run_plan(
        flags,
        launch,
        vocab_size,
        environment=tuple((variable.name, variable.value) for variable in to_set),
        environment_reasons=tuple(variable.reason for variable in to_set),
        command_line=shlex.join(argv),
        notes=(*told.settings.notes, *environment.notes(wanted, environ)),
    )
    plan = replace(plan, unknown_layers=unknown_layers(told.settings))
    text = yaml_text(told.settings, told.environment, explain.derived(plan))
    return replace(plan, resolved_yaml=text, notes=(*plan.notes, *slow_sizes(flags, plan)))
