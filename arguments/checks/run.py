"""Tries every rule on the settings and collects what is wrong.

A rule is a function whose parameters are flags by name, or facts of the launch. It returns None, or what is wrong with
the numbers and what would mend it; its docstring is the reason. A rule is not tried when one of its flags has no usable
value, because that is reported already.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from arguments import derive
from arguments.checks import (
    attention,
    batch,
    context_parallel,
    cuda_graphs,
    data,
    hints,
    memory,
    model,
    moe,
    moe_router,
    optimizer,
    output,
    pipeline,
    tensor_parallel,
)
from arguments.errors import Problem, Waits
from arguments.flag import Flag
from arguments.parser import Settings
from arguments.values import words_of
from megatron_moe.config.parallel import Launch
from megatron_moe.pipeline.layout import LayoutError

Rule = Callable[..., tuple[str, str] | None]

RULES: tuple[Rule, ...] = (
    *model.RULES,
    *attention.RULES,
    *moe.RULES,
    *moe_router.RULES,
    *tensor_parallel.RULES,
    *batch.RULES,
    *context_parallel.RULES,
    *pipeline.RULES,
    *memory.RULES,
    *cuda_graphs.RULES,
    *optimizer.RULES,
    *memory.WAITING,
    *cuda_graphs.WAITING,
    *data.RULES,
    *output.RULES,
)
FULL_SIZE_RULES: tuple[Rule, ...] = (
    *model.RULES,
    *attention.RULES,
    *moe.RULES,
    *moe_router.RULES,
    *tensor_parallel.RULES,
    batch.ranks_share_the_experts,
    *context_parallel.RULES,
    *pipeline.RULES,
)
"""Rules that `--proxy` must not hide: what they are about does not depend on the machine."""

_LEAVE_OUT = "it changes no number: --allow-ignored-flags leaves it out"
WAITING: tuple[Rule, ...] = (moe.flex_stays_on_one_rank, *memory.WAITING, *cuda_graphs.WAITING)
"""Rules about missing features: a plan that breaks them or the rules about data can be reported, not trained."""

_LAYER_GROUPS = ("attention", "model")
_LAYER_FLAGS = ("moe_n_hash_layers",)
_SAME_LAYERS = ("qk_clip", "qk_clip_alpha", "qk_clip_threshold")
"""Flags of these groups that add no parameter and no product."""

MODEL_PARALLEL = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
FACTS = ("world_size", "data_parallel_size", "virtual_stages")
"""What rules may ask for besides flags. The second is unknown when the sizes do not divide the world, the third when
layers do not fit the stages."""


@dataclass(frozen=True)
class Fact:
    """Something rules may ask for that is not a flag."""

    value: Any
    label: str
    origin: str


def broken_rules(settings: Settings, launch: Launch, rules: Sequence[Rule] = RULES) -> Iterator[Problem]:
    """Every rule that does not hold."""
    facts = _facts(settings, launch)
    for rule in rules:
        names = parameters(rule)
        if all(name in facts or (name in settings.registry.flags and settings.known(name)) for name in names):
            complaint = rule(**{name: _value(name, settings, facts) for name in names})
            if complaint:
                what, remedy = complaint
                only_given = hasattr(rule, "asks_for")
                listed = [name for name in names if name in facts or _is_listed(name, settings, only_given)]
                given = tuple(_row(name, settings, facts) for name in listed)
                yield Problem(what=what, remedy=remedy, reason=_reason(rule), given=given, waits=_waits(rule))


def _waits(rule: Rule) -> Waits:
    if rule in data.RULES:
        return "for an input"
    return "for a feature" if rule in WAITING else ""


def _facts(settings: Settings, launch: Launch) -> dict[str, Fact]:
    told_by = "no launcher" if launch.launcher == "none" else launch.launcher
    facts = {"world_size": Fact(launch.world_size, "ranks", told_by)}
    if all(settings.known(name) for name in MODEL_PARALLEL):
        size = prod(settings.setting(name).value for name in MODEL_PARALLEL)
        if launch.world_size % size == 0:
            facts["data_parallel_size"] = Fact(launch.world_size // size, "data-parallel ranks", "derived")
    vpp = _virtual_stages(settings)
    if vpp is not None:
        facts["virtual_stages"] = Fact(vpp, "virtual stages per pipeline rank", "derived")
    return facts


def _virtual_stages(settings: Settings) -> int | None:
    if not all(settings.known(name) for name in derive.PLACEMENT):
        return None
    try:
        return derive.pipeline_layout(**{name: settings.setting(name).value for name in derive.PLACEMENT}).vpp
    except LayoutError:
        return None


def given_hints(settings: Settings) -> Iterator[str]:
    """What may not be meant, of settings that break no rule."""
    for hint in hints.HINTS:
        text = hint(**{name: settings.setting(name).value for name in parameters(hint)})
        if text:
            yield text


def missing_flags(settings: Settings, groups: Sequence[str] | None = None) -> Iterator[Problem]:
    """Flags that must be given and are not, of all groups or of some."""
    for name, flag in settings.registry.flags.items():
        asked_for = flag.required and (groups is None or flag.group in groups)
        if asked_for and name not in settings.values and name not in settings.failed:
            yield Problem(what=f"{flag.option} is required", remedy=f"--help {flag.option} explains it")


def unavailable_flags(settings: Settings, ignore_harmless: bool) -> Iterator[Problem]:
    """Values that this program does not have, apart from those it may ignore."""
    for flag in _unavailable(settings):
        if not (ignore_harmless and flag.declaration.harmless):
            yield _not_available(settings, flag)
    for given, reason in settings.refused:
        yield Problem(what=f"{given.option} {reason} ({given.origin})")


def unknown_layers(settings: Settings) -> tuple[str, ...]:
    """Flags whose layers this program cannot build yet, so that parameters, memory and time are not known."""
    return tuple(
        flag.option
        for flag in _unavailable(settings)
        if (flag.group in _LAYER_GROUPS or flag.name in _LAYER_FLAGS)
        and flag.name not in _SAME_LAYERS
        and not flag.declaration.harmless
    )


def ignored_flags(settings: Settings) -> dict[str, str]:
    """Flags that are ignored on request, with a line about each."""
    return {
        flag.name: f"ignored: {option_and_value(settings, flag)} is not available"
        for flag in _unavailable(settings)
        if flag.declaration.harmless
    }


def flags_without_effect(settings: Settings) -> Iterator[str]:
    """One line per reason: the given flags that change nothing."""
    by_reason: dict[str, list[str]] = {}
    for given, reason in settings.without_effect.values():
        by_reason.setdefault(reason, []).append(" ".join((given.option, *(given.words or ()))))
    for reason, flags in by_reason.items():
        yield f"without effect: {', '.join(flags)} ({reason})"


def option_and_value(settings: Settings, flag: Flag) -> str:
    """`--lr 0.001`, `--no-load-optim`."""
    value = settings.setting(flag.name).value
    if flag.is_switch:
        return flag.option if value else flag.off_options[0]
    return f"{flag.option} {shown(flag, value)}"


def shown(flag: Flag, value: object) -> str:
    """A value for people."""
    if flag.is_switch:
        return "on" if value else "off"
    return "not set" if value is None else " ".join(words_of(flag.type, value))


def _unavailable(settings: Settings) -> Iterator[Flag]:
    for name, flag in settings.registry.flags.items():
        if settings.known(name) and not flag.available(settings.setting(name).value):
            yield flag


def _not_available(settings: Settings, flag: Flag) -> Problem:
    asked = option_and_value(settings, flag)
    origin = settings.setting(flag.name).origin
    ever = "not available yet" if flag.declaration.status == "not yet" else "not available"
    hints = [flag.declaration.note] if flag.declaration.note else []
    if flag.declaration.harmless:
        hints.append(_LEAVE_OUT)
    waits: Waits = "for a feature" if flag.declaration.status == "not yet" else ""
    return Problem(what=f"{asked} is {ever} ({origin})", remedy="; ".join(hints), waits=waits)


def _value(name: str, settings: Settings, facts: Mapping[str, Fact]) -> Any:
    return facts[name].value if name in facts else settings.setting(name).value


def _row(name: str, settings: Settings, facts: Mapping[str, Fact]) -> tuple[str, str, str]:
    if name in facts:
        return facts[name].label, str(facts[name].value), facts[name].origin
    flag, setting = settings.registry.flags[name], settings.setting(name)
    return flag.option, shown(flag, setting.value), setting.origin


def parameters(function: Callable[..., object]) -> list[str]:
    """What a rule or a hint asks for. (Asking its code is twenty times as fast as `inspect.signature`.)"""
    asked = getattr(function, "asks_for", None)
    if asked is not None:
        return list(asked)
    code = function.__code__
    return list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def _is_listed(name: str, settings: Settings, only_given: bool) -> bool:
    """Whether a problem lists a flag: one that was given, or whose default is more than off or not set."""
    default = settings.registry.flags[name].default
    return name in settings.values or not (only_given or default is None or default is False)


def _reason(rule: Rule) -> str:
    return " ".join((rule.__doc__ or "").split())
