"""Profiler traces of selected steps and ranks, and module ranges."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.logging import ProfileConfig
from megatron_moe.logs.profiler import StepProfile, annotate_modules, snapshot_path
from megatron_moe.parallel.context import ParallelContext
from tests.helpers import tiny_models


def run(tmp_path, config, num_steps=5):
    """Step function whose kernel shapes identify the step in a trace."""
    profile = StepProfile(config, ParallelContext.single(), tmp_path, log_interval=2)
    for number in range(1, num_steps + 1):
        profile.enter("step", number)
        with torch.profiler.record_function(f"iteration {number}"):
            torch.ones(number).square()
    profile.enter("exit", num_steps)
    profile.close()


def names(path):
    events = json.loads(gzip.open(path).read())["traceEvents"]
    return {event["name"] for event in events}


def test_trace_has_the_selected_iterations_only(tmp_path):
    run(tmp_path, ProfileConfig(tool="torch", profile_step_start=1, profile_step_end=3))
    found = names(tmp_path / "profile" / "rank-0.json.gz")
    assert {name for name in found if name.startswith("iteration")} == {"iteration 2", "iteration 3"}


def test_trace_is_written_when_the_run_ends_early(tmp_path):
    run(tmp_path, ProfileConfig(tool="torch", profile_step_start=4, profile_step_end=30))
    assert "iteration 5" in names(tmp_path / "profile" / "rank-0.json.gz")


def test_a_failed_write_does_not_end_the_run(tmp_path, capsys):
    (tmp_path / "profile").touch()
    run(tmp_path, ProfileConfig(tool="torch", profile_step_start=1, profile_step_end=3))
    assert "profile failed (FileExistsError" in capsys.readouterr().err


@pytest.mark.parametrize(
    "config",
    [
        ProfileConfig(profile_step_start=1, profile_step_end=3),
        ProfileConfig(tool="torch", profile_step_start=1, profile_step_end=3, profile_ranks=(1,)),
    ],
)
def test_unselected_ranks_and_runs_write_no_trace(tmp_path, config):
    run(tmp_path, config)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("config", [ProfileConfig(tool="cuda"), ProfileConfig(memory_snapshot="snapshot.pickle")])
def test_gpu_features_are_rejected_on_a_cpu(tmp_path, config):
    with pytest.raises(EnvironmentProblem, match="this run is on a CPU"):
        StepProfile(config, ParallelContext.single(), tmp_path, log_interval=1)


def test_module_ranges_are_named(tmp_path):
    model = tiny_models.build(tiny_models.model_config())
    annotate_modules(model, torch.device("cpu"))
    with torch.profiler.profile() as profiler:
        model(tiny_models.microbatch())
    found = {event.name for event in profiler.events()}
    assert {"embedding", "decoder.layers.1.self_attention", "decoder.layers.1.mlp", "output_layer"} <= found


def test_snapshot_path_per_rank():
    assert snapshot_path(Path("/a/profile"), "memory.pickle", 3) == Path("/a/profile/memory_3.pickle")
    assert snapshot_path(Path("/a/profile"), "/b/memory.pickle", 0) == Path("/b/memory_0.pickle")
