"""Helpers of texts for the user: counts, lists, divisors and tables."""

from collections.abc import Collection, Sequence
from math import isqrt

_LARGEST_DIVISOR_TRIED = 10_000
"""Enough to find all divisors of numbers up to 10^8. Larger flag values are likely typos."""
_MAX_DIVISORS_SHOWN = 12
_MAX_LISTED = 20


def listed(lines: Sequence[str]) -> str:
    """Joins lines into an indented list for the end of a message. Lines after the first 20 are counted, not listed."""
    more = [f"and {len(lines) - _MAX_LISTED} more"] if len(lines) > _MAX_LISTED else []
    return "\n  ".join([*lines[:_MAX_LISTED], *more])


def counted(number: int, noun: str) -> str:
    """Formats a number and a noun, for example `1 rank` or `8 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def divisors(number: int) -> str:
    """Formats the divisors of a number as a comma-separated list; shows at most the 12 largest."""
    small = [divisor for divisor in range(1, min(isqrt(number), _LARGEST_DIVISOR_TRIED) + 1) if number % divisor == 0]
    found = sorted({*small, *(number // divisor for divisor in small)})
    shown = found[-_MAX_DIVISORS_SHOWN:]
    return ("..., " if len(found) > len(shown) else "") + ", ".join(map(str, shown))


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Formats rows of cells as lines with aligned columns. Columns with indices in `right` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
