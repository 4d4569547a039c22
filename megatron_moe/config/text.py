"""Formats counts, lists, divisors and tables in messages to the user."""

from collections.abc import Collection, Sequence
from math import isqrt, log

_LARGEST_DIVISOR_TRIED = 10_000
"""Largest divisor that `divisors` tries, which suffices for numbers up to 10^8. Larger flag values are likely typos."""
_MAX_DIVISORS_SHOWN = 12
_MAX_LISTED = 20
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB"), (1.0, "bytes"))


def listed(lines: Sequence[str]) -> str:
    """Joins lines into an indented list for the end of a message. Lines after the first 20 are counted, not listed."""
    more = [f"and {len(lines) - _MAX_LISTED} more"] if len(lines) > _MAX_LISTED else []
    return "\n  ".join([*lines[:_MAX_LISTED], *more])


def counted(number: int, noun: str) -> str:
    """Formats a number and a noun, for example `1 rank` or `1,024 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def with_unit(number: float, units: Sequence[tuple[float, str]]) -> str:
    """Formats a number with three significant digits in the largest unit of which it is at least 1. `units`: pairs
    (size, name), largest first; the last one is used for all smaller numbers."""
    size, name = next((each for each in units if number >= 0.9995 * each[0]), units[-1])
    return f"{significant(number / size)} {name}".rstrip()


def num_bytes_text(number: float) -> str:
    """Formats a number of bytes, for example `1.01 GB` or `640 KB`."""
    return with_unit(number, _BYTES)


def significant(value: float) -> str:
    """Formats numbers below 100 with three significant digits, and larger numbers without decimals."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def divisors(number: int, near: int) -> str:
    """Formats the divisors of a number as a comma-separated list; shows at most 12, those whose ratio to `near` is the
    closest to 1."""
    small = [divisor for divisor in range(1, min(isqrt(number), _LARGEST_DIVISOR_TRIED) + 1) if number % divisor == 0]
    found = sorted({*small, *(number // divisor for divisor in small)})
    closest = sorted(found, key=lambda divisor: abs(log(divisor / near)))
    shown = sorted(closest[:_MAX_DIVISORS_SHOWN])
    before, after = ["..."] * (shown[0] > found[0]), ["..."] * (shown[-1] < found[-1])
    return ", ".join([*before, *map(str, shown), *after])


def aligned_columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Formats rows of cells as lines with aligned columns. Columns with indices in `right` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
