"""Planted bugs still fit the tree, and the machine that plants them tells red from green."""

from pathlib import Path

import pytest

from tests.mutants.__main__ import (
    Verdict,
    report,
    run,
)
from tests.mutants.bug import Bug, DoesNotApply
from tests.mutants.bugs import BUGS

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_applies_exactly_once_and_the_file_still_compiles(bug):
    text = (ROOT / bug.file).read_text()
    planted = bug.planted(text)
    assert planted != text
    compile(planted, bug.file, "exec")
    missing = [name for name in bug.select if not (ROOT / name.split("::")[0]).exists()]
    assert not missing, f"tests that are not there: {missing}"


def test_bugs_are_many_and_have_names_of_their_own():
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 40


def test_a_text_that_stands_twice_or_never_is_refused():
    bug = BUGS[0]
    for text in ("", bug.old * 2):
        with pytest.raises(DoesNotApply, match=bug.file):
            bug.planted(text)


def test_a_bug_that_is_noticed_is_red_one_that_is_not_is_green_and_both_leave_the_tree_as_it_was(tmp_path):
    (tmp_path / "sum.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "test_sum.py").write_text(
        "from sum import add\n\n\ndef test_two_and_two():\n    assert add(2, 2) == 4\n"
        "\n\ndef test_nothing():\n    assert add(0, 0) == 0\n"
    )

    def verdict(test: str) -> Verdict:
        changes = {"file": "sum.py", "old": "a + b", "new": "a + b + (a > 0)", "reason": ""}
        return run(Bug(name="one too many", select=(f"test_sum.py{test}",), **changes), tmp_path)

    assert (verdict("::test_two_and_two").outcome, verdict("::test_nothing").outcome) == ("red", "green")
    assert verdict("").first == "test_sum.py::test_two_and_two"
    assert "ended with 4" in verdict("::test_of_another_name").outcome
    assert "a + b\n" in (tmp_path / "sum.py").read_text()


def test_the_table_counts_what_was_noticed():
    table = report([Verdict(BUGS[0], "red", 1.0, "tests/a.py::b"), Verdict(BUGS[1], "green", 2.0)], 3.0)
    assert "1 of 2 noticed" in table
    assert f"| {BUGS[1].name} |" in table and "| green |" in table
