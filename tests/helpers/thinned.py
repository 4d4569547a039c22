"""Splits the cases of a test between CI and the nightly run."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], step: int = 2) -> list[Any]:
    """Marks all cases except every `step`-th one as slow. A tuple has one value per parameter name."""
    return [case if place % step == 0 else _slow(case) for place, case in enumerate(cases)]


def nightly_only(cases: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    """Marks the cases in `slow` as slow. A tuple has one value per parameter name."""
    return [_slow(case) if case in slow else case for case in cases]


def _slow(case: Any) -> Any:
    if hasattr(case, "marks"):  # a pytest.param
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
