"""Parsing of `--inject`, a flag that only tests may use."""

import pytest

from arguments.errors import FlagErrors
from megatron_moe.config.faults import ALLOWED, KINDS, parse_fault
from tests.helpers.command_lines import plan_of, texts_of


def test_parse_fault() -> None:
    fault = parse_fault("kill@1:7:backward")
    assert (fault.kind, fault.rank, fault.iteration, fault.phase) == ("kill", 1, 7, "backward")
    assert all(parse_fault(f"{kind}@0:1").kind == kind for kind in KINDS)
    assert parse_fault("hang@0:3").phase == "step" and parse_fault("disk-full@0:3").phase == "save"


@pytest.mark.parametrize("text", ["kill", "kill@1", "kill@x:1", "sneeze@1:2", "kill@1:2:sleep", "disk-full@1:2:step"])
def test_invalid_fault_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="kind@rank|unknown|during a save"):
        parse_fault(text)
    assert any("--inject" in reported for reported in texts_of(f"--inject {text}", environ={ALLOWED: "1"}))


def test_fault_of_a_missing_rank_is_rejected() -> None:
    assert texts_of("--inject kill@1:7", environ={ALLOWED: "1"}) == ["--inject kill@1:7 is for rank 1 of 1"]


def test_faults_need_the_environment_variable() -> None:
    with pytest.raises(FlagErrors, match="allowed in tests only"):
        plan_of("--inject kill@0:7")
    assert plan_of().resilience.faults == ()
    assert [fault.kind for fault in plan_of("--inject kill@0:7", environ={ALLOWED: "1"}).resilience.faults] == ["kill"]
