"""Result type and helpers of the rules."""

from collections.abc import Callable, Mapping
from math import isqrt
from types import FunctionType
from typing import Any

from arguments.flags import Flags
from arguments.values import LayerPattern
from megatron_moe.config.exit_codes import counted

_LARGEST_TRIED = 10_000
"""Bounds the search: numbers above its square are typing errors."""
_MOST_SHOWN = 12
Violation = tuple[str, str] | None
"""(problem with the numbers, remedy), or None if the rule holds."""


def divisors(number: int) -> str:
    """Formats the divisors of a number, only the largest ones if there are many."""
    small = [divisor for divisor in range(1, min(isqrt(number), _LARGEST_TRIED) + 1) if number % divisor == 0]
    found = sorted({*small, *(number // divisor for divisor in small)})
    shown = found[-_MOST_SHOWN:]
    return ("..., " if len(found) > len(shown) else "") + ", ".join(map(str, shown))


def unfit_pattern(option: str, pattern: LayerPattern, num_layers: int) -> Violation:
    """Checks a layer pattern against the number of layers."""
    if isinstance(pattern, int):
        return (f"{option} {pattern} is not a distance between layers", "use 1 or more") if pattern < 1 else None
    if len(pattern) != num_layers:
        return (
            f"{option} describes {counted(len(pattern), 'layer')}, but the model has {num_layers}",
            "make the list as long as --num-layers",
        )
    invalid = sorted(set(pattern) - {0, 1})
    if invalid:
        return f"{option} holds {', '.join(map(str, invalid))}, but a layer is 0 or 1", "use only 0 and 1"
    return None


class RuleFlags(Flags):
    """Flags and facts of the launch, as read by rules."""

    num_ranks: int
    data_parallel_size: int
    """Unknown if the sizes do not divide the world."""
    virtual_stages: int
    """Virtual stages per pipeline rank; unknown if the layers do not fit the stages."""


def lists_given_flags(rule: Callable[..., Violation]) -> Callable[..., Violation]:
    """Marks a rule whose problems list only the flags that were given."""
    rule.lists_given_flags = True  # type: ignore[attr-defined]
    return rule


def missing_feature(rule: Callable[..., Violation]) -> Callable[..., Violation]:
    """Marks a rule about a missing feature: --dry-run still reports a plan that violates it."""
    rule.missing_feature = True  # type: ignore[attr-defined]
    return rule


def functions_returning(annotation: object, module_globals: Mapping[str, Any]) -> tuple[Callable[..., Any], ...]:
    """Returns the public functions of a module with this return annotation, in source order."""
    return tuple(
        function
        for name, function in module_globals.items()
        if isinstance(function, FunctionType)
        and function.__module__ == module_globals["__name__"]
        and not name.startswith("_")
        and function.__annotations__["return"] == annotation
    )
