"""Faults on purpose are spelt out, and never happen by accident."""

import pytest

from arguments.errors import FlagErrors
from megatron_moe.config.faults import ALLOWED, KINDS, parse_fault
from tests.helpers.command_lines import plan_of, texts_of


def test_a_fault_has_a_kind_a_rank_an_iteration_and_a_phase() -> None:
    fault = parse_fault("kill@1:7:backward")
    assert (fault.kind, fault.rank, fault.iteration, fault.phase) == ("kill", 1, 7, "backward")
    assert parse_fault("hang@0:3").phase == "step" and parse_fault("disk-full@0:3").phase == "save"


@pytest.mark.parametrize("text", ["kill", "kill@1", "kill@x:1", "sneeze@1:2", "kill@1:2:sleep", "disk-full@1:2:step"])
def test_what_is_no_fault_is_refused_with_what_it_should_be(text: str) -> None:
    with pytest.raises(ValueError, match="kind@rank|unknown|during a save"):
        parse_fault(text)
    assert any("--inject" in said for said in texts_of(f"--inject {text}", environ={ALLOWED: "1"}))


def test_a_rank_that_is_not_there_is_refused() -> None:
    assert texts_of("--inject kill@1:7", environ={ALLOWED: "1"}) == ["--inject kill@1:7 is for rank 1 of 1"]


def test_without_the_variable_nothing_is_injected() -> None:
    with pytest.raises(FlagErrors, match="allowed in tests only"):
        plan_of("--inject kill@0:7")
    assert plan_of().resilience.faults == ()
    assert [fault.kind for fault in plan_of("--inject kill@0:7", environ={ALLOWED: "1"}).resilience.faults] == ["kill"]


def test_every_kind_can_be_asked_for_and_is_described() -> None:
    for kind, what in KINDS.items():
        assert parse_fault(f"{kind}@0:1").kind == kind and what
