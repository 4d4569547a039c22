"""Entry point of the package: converts a command line to a checked `RunPlan`."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from math import lcm
from pathlib import Path
from typing import Any

from arguments import derive, environment, explain
from arguments.checks.kernels import slow_sizes
from arguments.checks.run import (
    INPUT_RULES,
    RULES,
    Rule,
    broken_rules,
    flags_without_effect,
    hints_for,
    ignored_flags,
    missing_flags,
    unavailable_flags,
    unknown_layers,
)
from arguments.data_lists import read_data_lists
from arguments.dry_run import request as dry_run
from arguments.dry_run.inputs import missing_inputs, missing_packages
from arguments.emulation import parse_emulation, with_emulation
from arguments.errors import Finished, FlagErrors, Problem
from arguments.export import export, yaml_text
from arguments.files import FlagFile, read_files
from arguments.flags import Flags, Registry, with_dashes
from arguments.hf_source import hf_source
from arguments.huggingface import compared_with, differences_from_export, exported_config, published_flags
from arguments.launch import allocation_note, launch_of, other_ranks
from arguments.parser import Given, Settings, merge_settings, similar_names, split, start_settings
from arguments.proxy.fold import FoldRequest
from arguments.proxy.rewrite import UNUSED_BY_PROXY, fold_request, proxy_settings
from arguments.recipes import find_recipe, recipe_names
from arguments.resolve import run_plan, tokenizer_config
from arguments.tp_overlap import load_overlap_file, overlap_notes
from megatron_moe.config.data import TokenizerConfig
from megatron_moe.config.exit_codes import RunError
from megatron_moe.config.faults import ALLOWED
from megatron_moe.config.imports import file_digests, import_file
from megatron_moe.config.parallel import ProcessInfo
from megatron_moe.config.run import RunPlan
from megatron_moe.config.transport import fallback_transport_note, libraries

VocabSizeOf = Callable[[TokenizerConfig], int]
_MOST_SHOWN = 3
"""Most differences from a Hugging Face model that one message lists."""


def read_plan(
    argv: Sequence[str], environ: Mapping[str, str], vocab_size_of: VocabSizeOf | None = None, *, waiting: bool = False
) -> RunPlan:
    """Builds the plan of a command line.

    Args:
        argv: the arguments after the program's name.
        environ: environment variables. They give the rank and world size and are substituted into files.
        vocab_size_of: returns the vocabulary size of a tokenizer. Without it `--vocab-size` is not checked.
        waiting: also returns a plan that cannot start yet; its `blockers` and `missing_inputs` contain the reasons.

    Raises:
        FlagErrors: all problems of the command line.
        Finished: the command line requests a text instead of a run (`--help`, `--find`, `--print-config`, `--dry-run`).
        AnotherModel: `--check-against-hf` found a different model.
    """
    start = _start(argv, environ)
    answer = explain.requested_help(argv, start.registry)
    if answer is not None:
        raise Finished(answer)
    request, emulated = dry_run.dry_run_request(start, environ), parse_emulation(start, environ)
    simulated = request or emulated
    environ = simulated.environ if simulated else environ
    parsed = _parsed(argv, environ, start)
    _answer(parsed)
    rules = [rule for rule in RULES if not (emulated and rule in INPUT_RULES)]
    plan_only = waiting or request is not None
    checks_packages = not (simulated or waiting) or bool(start.setting("check_packages").value)
    flags, launch, blocking = _checked(parsed, environ, rules, plan_only=plan_only, checks_packages=checks_packages)
    unavailable: list[str] = []
    if simulated or waiting:
        flags = dry_run.with_tokenizer(flags)
        unavailable += missing_packages(parsed.settings) if checks_packages else []
        vocab_size_of = dry_run.or_size_from_flags(vocab_size_of, flags, unavailable, checks_packages=checks_packages)
    vocab_size = _vocab_size(flags, vocab_size_of, parsed.settings)
    plan = _plan(flags, launch, vocab_size, parsed, environ, argv, checks_packages=checks_packages)
    plan = replace(plan, notes=(*plan.notes, *_changed_model(plan)))
    if plan_only:
        plan = replace(
            plan,
            missing_inputs=(*_reasons(blocking, "for an input"), *unavailable, *missing_inputs(plan)),
            blockers=_reasons(blocking, "for a feature"),
        )
    if request:
        raise dry_run.finished_report(plan, request, parsed.settings)
    return with_emulation(plan, emulated) if emulated else plan


def flag_registry(argv: Sequence[str], environ: Mapping[str, str]) -> Registry:
    """All flags, after the files of `--import` on the command line and in its files were imported. Raises FlagErrors if
    one of them cannot be imported."""
    return _start(argv, environ).registry


def _start(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Flags of group `start`, with the registry of `flag_registry`."""
    registry = Registry.declared()
    start = start_settings(argv, registry)
    paths, _ = config_files(start)
    given = [flag for path in paths for file in read_files(path, registry, environ) for flag in file.flags]
    found = [
        words for each in (*given, *split(argv)[0]) if with_dashes(each.option) == "--import" and (words := each.words)
    ]
    names = dict.fromkeys(name for words in found for name in words)
    if not names:
        return start
    try:
        for name in names:
            import_file(name)
    except RunError as problem:
        raise FlagErrors.of(str(problem)) from problem
    return start_settings(argv, Registry.declared())


def _reasons(problems: Sequence[Problem], kind: str) -> tuple[str, ...]:
    """Texts of the problems whose `waits` equals `kind`. If `kind` is "for an input", they include the remedy."""
    found = [problem for problem in problems if problem.waits == kind]
    if kind == "for a feature":
        return tuple(problem.what for problem in found)
    return tuple(f"{problem.what}; {problem.remedy}" for problem in found)


def _answer(parsed: "_Parsed") -> None:
    """Raises Finished if the command line requests a report on its settings, such as `--print-config`."""
    fmt = parsed.settings.setting("print_config").value
    if fmt:
        _refuse(parsed.settings.problems)
        raise Finished(export(parsed.settings, parsed.environment, fmt))
    folder = parsed.settings.setting("check_against_hf").value
    if folder:
        raise Finished(compared_with(folder, parsed.settings))


@dataclass
class _Parsed:
    """Merged settings of the command line and its files."""

    settings: Settings
    environment: dict[str, str] = field(default_factory=dict)
    files: list[FlagFile] = field(default_factory=list)
    unfolded: FoldRequest | None = None
    """Full-size layout before folding; None without `--proxy`."""


def _parsed(argv: Sequence[str], environ: Mapping[str, str], start: Settings) -> _Parsed:
    """Settings of the command line. `start`: those of `_start`."""
    (words, problems), registry = split(argv), start.registry
    paths, missing = config_files(start)
    needless = UNUSED_BY_PROXY if start.setting("proxy").value else frozenset()
    allowed = start.setting("allow_environment").value
    files = [file for path in paths for file in read_files(path, registry, environ, (), needless, allowed)]
    _refuse([*missing, *(problem for file in files if not file.readable for problem in file.problems)])
    folder = start.setting("from_hf_config").value
    published, notes = published_flags(folder, registry) if folder else ([], [])
    own = [*(file.flags for file in files), *_around_proxy(words)]
    source = None if folder else hf_source(own, registry)
    layers = [published if source is None else source.layer, *own]
    settings = merge_settings(registry, layers)
    settings.notes += notes
    if source is not None:
        settings.notes += [*source.notes, source.note(settings)]
        problems += source.contradictions(words, registry)
    read_data_lists(settings)
    for file in files:
        problems += file.problems
    settings.problems[:0] = problems
    environment = {name: value for file in files for name, value in file.environment.items()}
    parsed = _Parsed(settings, environment, files)
    if start.setting("proxy").value:
        parsed = replace(_proxied(settings, environment, layers, environ), files=files)
    load_overlap_file(parsed.settings)
    return parsed


def layout_to_fold(argv: Sequence[str], environ: Mapping[str, str]) -> FoldRequest:
    """Parallel sizes that a command line with `--proxy` requests before they are reduced to the number of ranks that
    the caller chooses. Raises FlagErrors if the command line is invalid."""
    unfolded = _parsed(argv, environ, _start(argv, environ)).unfolded
    assert unfolded is not None, f"no --proxy in {argv}"
    return unfolded


def settings_of(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Settings, list[FlagFile]]:
    """Settings of a command line, and the files from which they come. Raises FlagErrors."""
    parsed = _parsed(argv, environ, _start(argv, environ))
    _refuse(parsed.settings.problems)
    return parsed.settings, parsed.files


def fewest_ranks(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Minimum number of ranks that the layout of a command line needs. Raises FlagErrors if it is invalid."""
    flags = _parsed(argv, environ, _start(argv, environ)).settings.flags
    dense = flags.tensor_model_parallel_size * flags.context_parallel_size
    return lcm(dense, derive.expert_ranks(flags)) * flags.pipeline_model_parallel_size


def _around_proxy(words: list[Given]) -> list[list[Given]]:
    """Splits flags into two layers after the last `--proxy`. If `--proxy` is not given, returns a single layer."""
    end = 1 + max((place for place, given in enumerate(words) if with_dashes(given.option) == "--proxy"), default=-1)
    return [words[:end], words[end:]] if end else [words]


def _proxied(
    settings: Settings, environment: dict[str, str], layers: Sequence[Sequence[Given]], environ: Mapping[str, str]
) -> _Parsed:
    """Applies `--proxy` to the settings; flags of the last layer, given after `--proxy`, are not changed."""
    _refuse([*settings.problems, *missing_flags(settings)])
    *before, after = layers
    full, pinned = merge_settings(settings.registry, before), merge_settings(settings.registry, [after]).values
    full.values |= {name: setting for name, setting in pinned.items() if not full.known(name)}
    small, rewrites = proxy_settings(full, pinned, launch_of(environ).world_size)
    small.notes = [*settings.notes, *rewrites]
    return _Parsed(small, environment, unfolded=fold_request(full, pinned))


def config_files(start: Settings) -> tuple[list[Path], list[Problem]]:
    """Paths of the recipe and the `--config` files, in order, and a problem if the recipe does not exist."""
    paths: list[Path] = []
    problems: list[Problem] = []
    name = start.setting("recipe").value
    if name is not None:
        recipe = find_recipe(str(name))
        if recipe:
            paths.append(recipe)
        else:
            close = " or ".join(similar_names(str(name), recipe_names()))
            remedy = f"did you mean {close}?" if close else "docs/recipes.md lists them"
            problems.append(Problem(what=f"there is no recipe {name!r}", remedy=remedy))
    config = start.setting("config").value
    assert isinstance(config, tuple)
    return [*paths, *map(Path, config)], problems


def _checked(
    parsed: _Parsed, environ: Mapping[str, str], rules: Sequence[Rule], *, plan_only: bool, checks_packages: bool
) -> tuple[Flags, ProcessInfo, list[Problem]]:
    """Returns (flags, launch, problems that prevent a start but not a plan, empty unless `plan_only`).

    Raises:
        FlagErrors: all other problems.
    """
    settings = parsed.settings
    ignore = bool(settings.setting("allow_ignored_flags").value)
    problems = list(settings.problems)
    launch = ProcessInfo()
    try:
        launch = launch_of(environ)
        if not (plan_only or parsed.unfolded):
            value = settings.setting
            planned_for = value("world_size").value, value("nodes").value, value("gpus_per_node").value
            problems += other_ranks(*planned_for, launch)
    except FlagErrors as errors:
        problems += errors.problems
    if plan_only:
        launch = replace(launch, launcher="dry run")
    if checks_packages:
        launch = replace(launch, missing_libraries=tuple(each for each in libraries() if find_spec(each) is None))
    if settings.setting("inject").value and environ.get(ALLOWED) != "1":
        what = "--inject and --error-injection-rate inject faults, which is allowed in tests only"
        problems.append(Problem(what=what, remedy=f"leave them out, or set {ALLOWED}=1"))
    if settings.setting("fp8_format").value or settings.setting("fp4_format").value:
        problems += environment.changed_recipes({**parsed.environment, **environ})
    problems += missing_flags(settings)
    problems += broken_rules(settings, launch, rules)
    problems += unavailable_flags(settings, ignore)
    blocking = [problem for problem in problems if plan_only and problem.waits]
    _refuse([problem for problem in problems if not (plan_only and problem.waits)])
    note = allocation_note(environ)
    settings.notes += [note] if note else []
    settings.notes += flags_without_effect(settings)
    flags = settings.flags
    settings.notes += hints_for(flags)
    if ignore:
        ignored = ignored_flags(settings)
        settings.notes += ignored.values()
        defaults: dict[str, Any] = {name: settings.registry.flags[name].default for name in ignored}
        flags = replace(flags, **defaults)
    return flags, launch, blocking


def _refuse(problems: Sequence[Problem]) -> None:
    if problems:
        raise FlagErrors(problems)


def _vocab_size(flags: Flags, vocab_size_of: VocabSizeOf | None, settings: Settings) -> int:
    """Returns `--vocab-size` after a check against the tokenizer; if not set, the tokenizer's vocabulary size."""
    given = flags.vocab_size
    if vocab_size_of is None:
        if given is None:
            raise FlagErrors.of("the vocabulary size is not known", "give --vocab-size")
        return given
    needed = vocab_size_of(tokenizer_config(flags))
    rows = flags.padded_vocab_size
    if rows is not None and rows < needed:
        raise _too_few("padded_vocab_size", rows, needed, f"--padded-vocab-size {needed} or more", settings)
    if given is None or given == needed:
        return needed
    if given < needed:
        raise _too_few("vocab_size", given, needed, "leave out --vocab-size", settings)
    settings.notes.append(f"--vocab-size {given} is larger than the tokenizer's vocabulary of {needed} tokens")
    return given


def _too_few(name: str, given: int, needed: int, remedy: str, settings: Settings) -> FlagErrors:
    option = settings.registry.flags[name].option
    what = f"{option} {given} is smaller than the tokenizer's vocabulary of {needed} tokens"
    reason = "Every token of the tokenizer needs a row of the embedding."
    row = (option, str(given), settings.setting(name).origin)
    return FlagErrors([Problem(what=what, remedy=remedy, reason=reason, given=(row,))])


def _plan(
    flags: Flags,
    launch: ProcessInfo,
    vocab_size: int,
    parsed: _Parsed,
    environ: Mapping[str, str],
    argv: Sequence[str],
    *,
    checks_packages: bool,
) -> RunPlan:
    wanted = environment.required_variables(flags, parsed.environment, launch.local_world_size)
    to_set = environment.missing_variables(wanted, environ)
    plan = run_plan(
        flags,
        launch,
        vocab_size,
        environment=tuple((variable.name, variable.value) for variable in to_set),
        environment_reasons=tuple(variable.reason for variable in to_set),
        command_line=shlex.join(argv),
        notes=(*parsed.settings.notes, *environment.variable_notes(wanted, environ)),
    )
    plan = replace(plan, unknown_layers=unknown_layers(parsed.settings), imports=flags.import_)
    generated = plan.checkpoint.hf_description if plan.checkpoint.save_hf_interval else None
    if generated:
        exported_config(plan.model, generated.vocab_size, parsed.settings.registry)
    replaced = _replaced_transport(plan, checks_packages=checks_packages)
    imported = (f"imported {name}: sha256 {digest}" for name, digest in file_digests(flags.import_).items())
    heading = [*explain.derived_value_comments(plan), *replaced, *imported]
    text = yaml_text(parsed.settings, parsed.environment, heading)
    of_speed = (*slow_sizes(flags, plan), *overlap_notes(flags, plan))
    notes = (*filter(None, [plan.warning]), *plan.notes, *replaced, *of_speed)
    return replace(plan, resolved_yaml=text, notes=notes)


def _changed_model(plan: RunPlan) -> Iterator[str]:
    """Yields a note if the model differs from the Hugging Face folder from which the run starts. Raises FlagErrors if
    exports need its config.json."""
    folder = plan.checkpoint.save_hf_config
    found = differences_from_export(plan.model, folder) if folder and (folder / "config.json").is_file() else []
    if not found:
        return
    more = len(found) - _MOST_SHOWN
    found[_MOST_SHOWN:] = [f"{more} more"] if more > 0 else []
    what = f"the model differs from {folder}/config.json: {'; '.join(found)}"
    if plan.checkpoint.save_hf_interval is not None:
        remedy = "leave --save-hf-interval or the change out, or give the config.json of this model: --save-hf-config"
        raise FlagErrors.of(f"{what}; exports would have that config.json", remedy)
    yield f"{what}; an export needs another config.json"


def _replaced_transport(plan: RunPlan, *, checks_packages: bool) -> list[str]:
    """Note on the transport that replaces that of `--moe-flex-dispatcher-backend`, or would replace it if a package
    were missing."""
    choices = (layer.feed_forward.choose_transport(plan.parallel) for layer in plan.model.layers)
    choice = next(filter(None, choices), None)
    if choice is None:
        return []
    if choice.replaces_request and choice.note:
        return [choice.note]
    note = None if checks_packages else fallback_transport_note(choice, spans_hosts=plan.parallel.experts_span_hosts)
    return [note] if note else []
