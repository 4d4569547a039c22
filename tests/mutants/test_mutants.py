"""Every mutant can still be applied: its target and its tests exist."""

from pathlib import Path

import pytest

from tests.mutants.__main__ import Result, report
from tests.mutants.catalogue import MUTANTS

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_applies(mutant):
    owner, name = mutant.owner()
    original = getattr(owner, name)
    assert callable(original) and mutant.replacement(original) is not original
    assert mutant.reason
    for test in mutant.tests:
        path, _, rest = test.partition("::")
        assert not rest or f"def {rest.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8"), test


def test_the_table_counts_killed_mutants():
    first, second = list(MUTANTS.values())[:2]
    table = report([Result(first, "killed", 1.0, "tests/a.py::b"), Result(second, "survived", 2.0)], 3.0)
    assert "1 of 2 killed" in table and "| survived |" in table
