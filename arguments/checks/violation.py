"""Small words that several rules share."""

from collections.abc import Callable, Sequence
from math import isqrt

from arguments.values import LayerPattern
from megatron_moe.config.exit_codes import counted

_LARGEST_TRIED = 10_000
"""Numbers beyond its square are typing errors, whose divisors nobody waits for."""
_MOST_SHOWN = 12
Violation = tuple[str, str] | None
"""What is wrong, with the numbers, and what would mend it; None: nothing."""


def divisors(number: int) -> str:
    """The divisors of a number for people, the largest ones if there are many."""
    small = [divisor for divisor in range(1, min(isqrt(number), _LARGEST_TRIED) + 1) if number % divisor == 0]
    found = sorted({*small, *(number // divisor for divisor in small)})
    shown = found[-_MOST_SHOWN:]
    return ("..., " if len(found) > len(shown) else "") + ", ".join(map(str, shown))


def unfit_pattern(option: str, pattern: LayerPattern, num_layers: int) -> Violation:
    """A layer pattern that does not fit the number of layers."""
    if isinstance(pattern, int):
        return (f"{option} {pattern} is not a distance between layers", "use 1 or more") if pattern < 1 else None
    if len(pattern) != num_layers:
        return (
            f"{option} describes {counted(len(pattern), 'layer')}, but the model has {num_layers}",
            "make the list as long as --num-layers",
        )
    strange = sorted(set(pattern) - {0, 1})
    if strange:
        return f"{option} holds {', '.join(map(str, strange))}, but a layer is 0 or 1", "use only 0 and 1"
    return None


def asks_for(flags: Sequence[str]) -> Callable[[Callable[..., Violation]], Callable[..., Violation]]:
    """A rule over `**flags` says so which ones it asks for."""

    def mark(rule: Callable[..., Violation]) -> Callable[..., Violation]:
        rule.asks_for = tuple(flags)  # type: ignore[attr-defined]
        return rule

    return mark
