"""A run without memory says what was there, who expected it, and what would help."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from arguments.flags import Registry
from arguments.parser import settle, split
from megatron_moe.config.exit_codes import ExitCode, MemoryProblem
from megatron_moe.config.moe import SharedExpertsConfig
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.cost_model.hardware import GIB
from megatron_moe.cost_model.memory import RankMemory
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.planner.memory_options import more_switches, saved
from megatron_moe.train.oom_report import _NO_HOST_MEMORY, REPORT, DeviceMemory, helpful, out_of_memory, room_asked_for
from tests.helpers import tiny
from tests.helpers.tiny_models import mlp_config

PLAN = tiny.plan(precision=PrecisionConfig(params="bf16"))
FOUND = DeviceMemory(
    allocated=70 * GIB,
    peak=71 * GIB,
    reserved=79 * GIB,
    total=80 * GIB,
    blocks=((5 * GIB, " from experts.py:10"), (2 * GIB, "")),
)


def told(plan=PLAN, found=FOUND) -> str:
    return str(out_of_memory(plan, 0, 3, RuntimeError("tried to allocate 20.00 GiB\nmore"), found))


def test_the_allocator_and_the_closed_form_are_side_by_side():
    text = told()
    assert "iteration 3: tried to allocate 20.00 GiB" in text and "more" not in text.splitlines()[0]
    assert "allocated 70.00 GiB (at most 71.00 GiB), reserved 79.00 GiB of 80.00 GiB" in text
    assert "9.00 GiB reserved and not allocated, which expandable segments would join" in text
    assert "5.00 GiB from experts.py:10; 2.00 GiB" in text
    expected = RankMemory(PLAN).of_rank(0, 4)
    assert f"expected on pipeline rank 0: {expected.total / 2**20:.2f} MiB" in text
    assert "moments" in text and "activations of experts" in text


def test_without_an_allocator_the_closed_form_still_speaks():
    assert "reserved" not in told(found=None) and "expected on pipeline rank 0" in told(found=None)


def test_the_three_switches_save_more_than_all_others():
    best = helpful(PLAN, 0, 4)
    assert len(best) == 3
    gains = sorted((saved(PLAN, switch, 0, 4) for switch in more_switches(PLAN)), reverse=True)
    assert [gain for _, gain, _ in best] == gains[:3]
    for switch, _, price in best:
        assert switch.flags in told() and price > -1


def test_a_switch_that_is_on_is_not_offered_again():
    for switch in more_switches(PLAN):
        assert switch.flags not in [again.flags for again in more_switches(switch.apply(PLAN))], switch.flags


def test_the_report_lies_in_the_run_folder(tmp_path: Path):
    plan = replace(PLAN, logging=replace(PLAN.logging, run_dir=tmp_path))
    problem = out_of_memory(plan, 0, 3, RuntimeError("no room"), FOUND)
    path = tmp_path / REPORT.format(rank=0)
    assert problem.code == ExitCode.MEMORY and str(path) in str(problem)
    assert path.read_text().splitlines() == str(problem).splitlines()[:-1]


def test_a_folder_that_cannot_be_written_does_not_hide_the_report(tmp_path: Path):
    (tmp_path / "crash").write_text("in the way")
    plan = replace(PLAN, logging=replace(PLAN.logging, run_dir=tmp_path))
    assert "expected on pipeline rank 0" in str(out_of_memory(plan, 0, 3, RuntimeError("no room"), FOUND))


def test_the_flags_that_are_offered_are_flags_that_are_available():
    registry = Registry.declared()
    latent = replace(PLAN, model=tiny.model(moe_config=tiny.moe(shared=SharedExpertsConfig(mlp=mlp_config()))))
    offered = {switch.flags for plan in (PLAN, latent) for switch in more_switches(plan)}
    assert len(offered) > 8
    for flags in offered:
        given, problems = split(flags.split())
        settings = settle(registry, [given])
        assert not problems and not settings.problems, flags
        for name in settings.values:
            assert registry.flags[name].available(settings.setting(name).value), flags


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError(f"enforce: {_NO_HOST_MEMORY}")])
def test_a_model_that_has_no_room_ends_the_run_before_the_first_iteration(error: Exception):
    with pytest.raises(
        MemoryProblem, match="out of memory before the first iteration: .*\n  expected on pipeline rank"
    ):
        with room_asked_for(PLAN, ParallelContext.single(), 0):
            raise error


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="shapes differ"):
        with room_asked_for(PLAN, ParallelContext.single(), 0):
            raise RuntimeError("shapes differ")
