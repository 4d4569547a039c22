"""Runs all rules on the settings and collects the problems.

A rule is a function that reads flags and launch properties, and yields (problem, remedy) if their values violate the
rule. The report to the user also contains the rule's docstring, as the reason, and the flags that the rule has read. A
rule is skipped if it reads a flag without a valid value, because the invalid value is already reported.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from types import FunctionType, ModuleType
from typing import Any, cast

from arguments import derive
from arguments.checks import (
    attention,
    batch,
    compressed_attention,
    context_parallel,
    cuda_graphs,
    data,
    fsdp,
    hints,
    memory,
    model,
    moe,
    moe_router,
    optimizer,
    output,
    packing,
    pipeline,
    precision,
    tensor_parallel,
)
from arguments.checks.violation import Violations
from arguments.errors import Problem, Waits
from arguments.flag import Flag
from arguments.flags import GROUPS, Flags
from arguments.parser import COMMAND_LINE, Settings
from megatron_moe.config.parallel import ProcessInfo
from megatron_moe.config.pipeline_layout import LayoutError

Rule = Callable[..., Violations]


def _functions_of(annotation: object, *modules: ModuleType) -> tuple[Callable[..., Any], ...]:
    """Returns the public functions of `modules` whose return annotation is `annotation`, in source order."""
    return tuple(
        function
        for module in modules
        for name, function in vars(module).items()
        if isinstance(function, FunctionType)
        and function.__module__ == module.__name__
        and not name.startswith("_")
        and function.__annotations__["return"] == annotation
    )


MODEL_RULES: tuple[Rule, ...] = _functions_of(Violations, model, attention, compressed_attention, moe, moe_router)
INPUT_RULES: tuple[Rule, ...] = _functions_of(Violations, data)
RULES: tuple[Rule, ...] = (
    *MODEL_RULES,
    *_functions_of(
        Violations, tensor_parallel, batch, context_parallel, pipeline, memory, cuda_graphs, optimizer, precision, fsdp
    ),
    *INPUT_RULES,
    *_functions_of(Violations, packing, output),
)
FULL_SIZE_RULES: tuple[Rule, ...] = (
    *MODEL_RULES,
    batch.expert_parallelism_needs_experts,
    *_functions_of(Violations, tensor_parallel, context_parallel, pipeline),
)
"""Rules that `--proxy` checks on the settings of the full-size model before it reduces the sizes."""

HINTS: tuple[Callable[[Flags], Iterator[str]], ...] = _functions_of(Iterator[str], hints)

_LEAVE_OUT = "it does not affect numerics: --allow-ignored-flags ignores it"

_LAYER_GROUPS = ("attention", "model")
FORCED_ROUTING = ("moe_router_force_load_balancing", "moe_router_force_biased", "moe_router_force_skew")
"""Flags of benchmarks, which replace the router by random logits."""
MODEL_PARALLEL = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")


@dataclass(frozen=True)
class Property:
    """Property of the launch, or value derived from flags. Rules can read it like a flag."""

    value: Any
    label: str
    origin: str


class _UnknownFlag(Exception):
    """Raised when a rule reads a flag or property that has no valid value."""


class _ReadFlags:
    """Provides flags and launch properties as attributes and records the names that a rule reads."""

    def __init__(self, settings: Settings, properties: Mapping[str, Property], groups: Sequence[str]) -> None:
        self._settings, self._properties, self._groups = settings, properties, groups
        self.names: dict[str, None] = {}

    def __getattr__(self, name: str) -> Any:
        self.names[name] = None
        if name in self._properties:
            return self._properties[name].value
        flag = self._settings.registry.flags.get(name)
        if flag is None or flag.group not in self._groups or not self._settings.known(name):
            raise _UnknownFlag(name)
        return self._settings.setting(name).value


def broken_rules(
    settings: Settings, launch: ProcessInfo, rules: Sequence[Rule] = RULES, groups: Sequence[str] = tuple(GROUPS)
) -> Iterator[Problem]:
    """Yields a problem for every violated rule. Rules that read a flag outside `groups` are skipped."""
    properties = _properties(settings, launch)
    for rule in rules:
        flags = _ReadFlags(settings, properties, groups)
        try:
            violation = next(rule(flags), None)
        except _UnknownFlag:
            continue
        if violation:
            what, remedy = violation
            only_given = hasattr(rule, "lists_given_flags")
            listed = [name for name in flags.names if name in properties or _is_listed(name, settings, only_given)]
            given = tuple(_row(name, settings, properties) for name in listed)
            reason = " ".join((rule.__doc__ or "").split())
            yield Problem(what=what, remedy=remedy, rule=rule.__name__, reason=reason, given=given, waits=_waits(rule))


def _waits(rule: Rule) -> Waits:
    if rule in INPUT_RULES:
        return "for an input"
    return "for a feature" if hasattr(rule, "missing_feature") else ""


def _properties(settings: Settings, launch: ProcessInfo) -> dict[str, Property]:
    named = {"none": "no launcher", "dry run": "--world-size, or the recipe"}
    launcher = named.get(launch.launcher, launch.launcher)
    properties = {
        "num_ranks": Property(launch.world_size, "ranks", launcher),
        "ranks_per_host": Property(launch.local_world_size, "ranks per host", launcher),
        "missing_libraries": Property(launch.missing_libraries, "libraries that are not installed", "this machine"),
    }
    forced = (settings.registry.flags[name] for name in FORCED_ROUTING if settings.setting(name).value)
    in_files = [flag.option for flag in forced if settings.setting(flag.name).origin != COMMAND_LINE]
    properties["forced_routing_of_files"] = Property(in_files[0] if in_files else "", "forced routing", "files")
    if all(settings.known(name) for name in MODEL_PARALLEL):
        size = prod(settings.setting(name).value for name in MODEL_PARALLEL)
        if launch.world_size % size == 0:
            properties["data_parallel_size"] = Property(launch.world_size // size, "data-parallel ranks", "derived")
    with suppress(_UnknownFlag, LayoutError):
        layout = derive.pipeline_layout(cast(Flags, _ReadFlags(settings, {}, tuple(GROUPS))))
        properties["virtual_stages"] = Property(layout.vpp, "virtual stages per pipeline rank", "derived")
    return properties


def hints_for(flags: Flags) -> Iterator[str]:
    """Yields a note on every legal setting that is likely unintended."""
    for hint in HINTS:
        yield from hint(flags)


def missing_flags(settings: Settings, groups: Sequence[str] | None = None) -> Iterator[Problem]:
    """Yields a problem for every missing required flag; with `groups`, only for flags in these groups."""
    for name, flag in settings.registry.flags.items():
        requested = flag.required and (groups is None or flag.group in groups)
        if requested and name not in settings.values and name not in settings.failed:
            yield Problem(what=f"{flag.option} is required", remedy=f"--help {flag.option} explains it")


def unavailable_flags(settings: Settings, ignore_harmless: bool) -> Iterator[Problem]:
    """Yields a problem for every unsupported flag value; `ignore_harmless` omits flags that do not affect numerics."""
    for flag in _unavailable(settings):
        if not (ignore_harmless and flag.declaration.harmless):
            yield _not_available(settings, flag)
    for given, reason in settings.refused:
        yield Problem(what=f"{given.option} {reason} ({given.origin})")


def unknown_layers(settings: Settings) -> tuple[str, ...]:
    """Returns the options that request unsupported layers, whose parameters, memory and time cannot be estimated."""
    return tuple(
        flag.option for flag in _unavailable(settings) if flag.group in _LAYER_GROUPS and not flag.declaration.harmless
    )


def ignored_flags(settings: Settings) -> dict[str, str]:
    """Returns the unsupported flags that --allow-ignored-flags permits, as a map from flag name to a note for users."""
    return {
        flag.name: f"ignored: {option_and_value(settings, flag)} is not available"
        for flag in _unavailable(settings)
        if flag.declaration.harmless
    }


def flags_without_effect(settings: Settings) -> Iterator[str]:
    """Yields notes about given flags that have no effect; flags with the same reason share a note."""
    by_reason: dict[str, list[str]] = {}
    for given, reason in settings.without_effect.values():
        by_reason.setdefault(reason, []).append(" ".join((given.option, *(given.words or ()))))
    for reason, flags in by_reason.items():
        yield f"without effect: {', '.join(flags)} ({reason})"


def option_and_value(settings: Settings, flag: Flag) -> str:
    """Formats the value of a flag as on the command line: `--lr 0.001`, `--no-load-optim`."""
    value = settings.setting(flag.name).value
    if flag.is_switch:
        return flag.option if value else flag.off_options[0]
    return f"{flag.option} {flag.text(value)}"


def _unavailable(settings: Settings) -> Iterator[Flag]:
    for flag in settings.registry.flags.values():
        if flag.may_be_unavailable and settings.known(flag.name):
            if not flag.available(settings.setting(flag.name).value):
                yield flag


def _not_available(settings: Settings, flag: Flag) -> Problem:
    text = option_and_value(settings, flag)
    origin = settings.setting(flag.name).origin
    status = "not available yet" if flag.declaration.status == "unsupported" else "not available"
    hints = [flag.declaration.note] if flag.declaration.note else []
    if flag.declaration.harmless:
        hints.append(_LEAVE_OUT)
    waits: Waits = "for a feature" if flag.declaration.status == "unsupported" else ""
    return Problem(what=f"{text} is {status} ({origin})", remedy="; ".join(hints), waits=waits)


def _row(name: str, settings: Settings, properties: Mapping[str, Property]) -> tuple[str, str, str]:
    if name in properties:
        value = properties[name].value
        text = ", ".join(value) or "none" if isinstance(value, tuple) else str(value)
        return properties[name].label, text, properties[name].origin
    flag, setting = settings.registry.flags[name], settings.setting(name)
    return flag.option, flag.text(setting.value), setting.origin


def _is_listed(name: str, settings: Settings, only_given: bool) -> bool:
    """True for a flag set by the user and, unless `only_given`, for a flag whose default is not `off` or `not set`."""
    flag = settings.registry.flags[name]
    return name in settings.values or not (only_given or flag.text(flag.default) in ("not set", "off"))
