"""Report of an out-of-memory error."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from arguments.flags import Registry
from arguments.parser import merge_settings, split
from megatron_moe.build import build_memory_guard
from megatron_moe.config.exit_codes import ExitCode, MemoryProblem
from megatron_moe.config.moe import SharedExpertsConfig
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.cost_model.hardware import GIB
from megatron_moe.cost_model.memory import RankMemory
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.planner.memory_advice import best_options, memory_advice
from megatron_moe.planner.memory_options import bytes_saved, disabled_options
from megatron_moe.train.oom_report import _NO_HOST_MEMORY, REPORT, DeviceMemory, out_of_memory
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


ADVICE = tuple(memory_advice(PLAN, 0, ""))


def test_report_has_allocated_and_expected_memory():
    error = RuntimeError("tried to allocate 20.00 GiB\nmore")
    text = str(out_of_memory(error, 3, [*FOUND.lines(), *ADVICE], None))
    assert "iteration 3: tried to allocate 20.00 GiB" in text and "more" not in text.splitlines()[0]
    assert "allocated 70.00 GiB (at most 71.00 GiB), reserved 79.00 GiB of 80.00 GiB" in text
    assert "9.00 GiB reserved and not allocated, use PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in text
    assert "5.00 GiB from experts.py:10; 2.00 GiB" in text
    expected = RankMemory(PLAN).of_rank(0)
    assert f"expected on pipeline rank 0: {expected.total / 2**20:.2f} MiB" in text
    assert "moments" in text and "activations of experts" in text


def test_suggested_options_save_most():
    best = best_options(PLAN, 0)
    assert len(best) == 3
    gains = sorted((bytes_saved(PLAN, option, 0) for option in disabled_options(PLAN)), reverse=True)
    assert [gain for _, gain, _ in best] == gains[:3]
    for option, _, slowdown in best:
        assert option.flags in "\n".join(ADVICE) and slowdown > -1


def test_enabled_option_is_not_suggested():
    for option in disabled_options(PLAN):
        assert option.flags not in [other.flags for other in disabled_options(option.apply(PLAN))], option.flags


@pytest.mark.parametrize("writable", [True, False])
def test_report_is_written_to_the_run_folder_if_possible(tmp_path: Path, writable: bool):
    if not writable:
        (tmp_path / "crash").write_text("in the way")
    path = tmp_path / REPORT.format(rank=0)
    problem = out_of_memory(RuntimeError("no room"), 3, ADVICE, path)
    assert problem.code == ExitCode.MEMORY and "expected on pipeline rank 0" in str(problem)
    assert (str(path) in str(problem)) == writable
    if writable:
        assert path.read_text().splitlines() == str(problem).splitlines()[:-1]


def test_suggested_flags_are_available():
    registry = Registry.declared()
    latent = replace(PLAN, model=tiny.model(moe_config=tiny.moe(shared=SharedExpertsConfig(mlp=mlp_config()))))
    offered = {switch.flags for plan in (PLAN, latent) for switch in disabled_options(plan)}
    assert len(offered) > 8
    for flags in offered:
        given, problems = split(flags.split())
        settings = merge_settings(registry, [given])
        assert not problems and not settings.problems, flags
        for name in settings.values:
            assert registry.flags[name].available(settings.setting(name).value), flags


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError(f"enforce: {_NO_HOST_MEMORY}")])
def test_out_of_memory_errors_of_device_and_host_are_reported(error: Exception):
    with pytest.raises(
        MemoryProblem, match="out of memory before the first iteration: .*\n  expected on pipeline rank"
    ):
        with build_memory_guard(PLAN, ParallelContext.single())():
            raise error


def test_other_errors_propagate():
    with pytest.raises(RuntimeError, match="shapes differ"):
        with build_memory_guard(PLAN, ParallelContext.single())():
            raise RuntimeError("shapes differ")
