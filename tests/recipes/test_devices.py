"""Comparison of two devices on the same proxy."""

from tests.recipes.devices import Comparison, compare, difference, distinct, table
from tests.recipes.test_answers import BAD, GOOD, SAME, WIDER

STEP = {"iteration": 1, "lm loss": 6.0, "mtp_1 loss": 5.0, "grad-norm": 2.0, "grad-norm experts": 0.5, "time": 1.0}


def test_proxies_that_run_the_same_are_compared_once() -> None:
    assert distinct([GOOD, SAME, BAD, WIDER]) == [GOOD, WIDER]


def test_equal_devices_agree_and_rejected_flags_are_reported() -> None:
    assert compare(GOOD, ("cpu", "cpu")) == Comparison(name="good")
    rejected = compare(BAD, ("cpu", "cpu"))
    assert rejected.failure == "cpu: at full size: 4 heads do not divide the hidden size 33" and not rejected.agrees


def test_largest_relative_differences_of_losses_and_norms_are_reported() -> None:
    other = {**STEP, "lm loss": 6.006, "grad-norm experts": 0.51, "time": 9.0}
    found = difference("one", [STEP, other], [STEP, STEP])
    assert abs(found.loss - 0.001) < 1e-9 and abs(found.grad_norm - 0.02) < 1e-9 and found.agrees
    assert not difference("one", [{**STEP, "mtp_1 loss": 5.1}], [STEP]).agrees
    assert not difference("one", [{**STEP, "grad-norm": 2.2}], [STEP]).agrees
    assert not difference("one", [{**STEP, "lm loss": float("nan")}], [STEP]).agrees


def test_table_counts_the_proxies_that_agree() -> None:
    text = table([Comparison(name="a|b", loss=1e-3), Comparison(name="c", failure="cuda: no kernel")], "H200")
    assert "2 different proxies on one rank" in text and " 1 agree:" in text
    assert "| a/b | 1.0e-03 | 0.0e+00 |" in text and "| c | cuda: no kernel |" in text
