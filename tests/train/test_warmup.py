"""Kernel warm-up."""

import gc
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.memory import MemoryConfig
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig
from megatron_moe.parallel.parameter import Parameter
from megatron_moe.resilience.watchdog import Watchdog
from megatron_moe.train.warmup import attempt, cache_folder, take_step, taking_turns, warm_up_kernels, warmed_up
from tests.helpers import tiny

PATIENCE = 120.0

SEVERAL = ParallelConfig(world_size=8, pp=2, tp=2, sequence_parallel=True, ep=4)


def test_reduced_plan_has_every_kind_of_layer_at_unchanged_sizes():
    plan = replace(tiny.plan(model=tiny.model(num_layers=6)), parallel=SEVERAL)
    small = warmed_up(plan)
    assert set(small.model.layers) == set(plan.model.layers) and len(small.model.layers) == 2
    assert (small.parallel.world_size, small.parallel.pp) == (4, 1)
    assert (small.parallel.tp, small.parallel.ep, small.parallel.dp) == (2, 4, 2)
    assert small.batch.micro_batch_size == plan.batch.micro_batch_size and small.data == plan.data
    assert small.batch.global_batch_size == 2 * plan.batch.micro_batch_size * small.parallel.dp


def test_reduced_plan_covers_incomplete_weight_gradient_groups():
    """Steps of 4 microbatches with interval 3 leave an incomplete group of 1."""
    plan = replace(tiny.plan(), memory=MemoryConfig(moe_expert_wgrad_interval=3))
    assert warmed_up(plan).batch.global_batch_size == (3 + 3 + 1) * plan.batch.micro_batch_size


@pytest.mark.parametrize("dispatcher", ["alltoall", "flex"])
@pytest.mark.parametrize("parallel", [ParallelConfig(), SEVERAL, replace(SEVERAL, ranks_per_host=2)])
def test_warm_up_step_needs_no_peers_and_leaves_no_process_group(parallel, dispatcher):
    model = tiny.model(moe_config=tiny.moe(dispatcher=dispatcher))
    take_step(tiny.plan(model=model, parallel=parallel), torch.device("cpu"))
    assert not dist.is_initialized()


def test_warm_up_frees_its_memory(tmp_path):
    plan = replace(tiny.plan(), data_parallel=DataParallelConfig(overlap_grad_reduce=True))
    gc.collect()
    before = parameters_alive()  # kept alive, so that ids stay unique
    assert not attempt(plan, torch.device("cpu"), tmp_path)
    known = set(map(id, before))
    assert [each.shape for each in parameters_alive() if id(each) not in known] == []


def parameters_alive() -> list[Parameter]:
    return [each for each in gc.get_objects() if type(each) is Parameter]


def test_no_warm_up_on_a_cpu():
    assert warm_up_kernels(tiny.plan(), Watchdog({}, None)) == "kernels are compiled when they are first needed"


class CompilationError(Exception):
    """Like Triton's, not a RuntimeError."""


@pytest.mark.parametrize("kind", [RuntimeError, CompilationError])
def test_failed_warm_up_is_reported_and_can_be_repeated(tmp_path, monkeypatch, kind):
    def fail(*_: object) -> None:
        raise kind("no room\nfor details")

    monkeypatch.setattr("megatron_moe.train.warmup.take_step", fail)
    assert attempt(tiny.plan(), torch.device("cpu"), tmp_path) == f"{kind.__name__}: no room"
    monkeypatch.undo()
    assert attempt(tiny.plan(), torch.device("cpu"), tmp_path) == "", "the lock is free again"


def test_each_node_has_its_own_cache_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: "node17")
    plan = tiny.plan()
    plan = replace(plan, kernels=replace(plan.kernels, kernel_cache_dir=tmp_path / "kernels"))
    assert cache_folder(plan) == tmp_path / "kernels" / "node17"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "kernels" / "node17")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
    assert cache_folder(plan) == tmp_path / "mine", "the environment variable wins"


def test_unwritable_cache_folder_is_rejected(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    with pytest.raises(EnvironmentProblem, match="use --kernel-cache-dir with another folder"):
        cache_folder(tiny.plan())


def enter_in_a_thread(folder: Path, inside: threading.Event, leave: threading.Event) -> threading.Thread:
    def run() -> None:
        with taking_turns(folder, tiny.plan()):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_first_rank_of_a_node_compiles_alone(tmp_path):
    inside = [threading.Event() for _ in range(3)]
    leave = [threading.Event() for _ in range(3)]
    threads = [enter_in_a_thread(tmp_path, inside[0], leave[0])]
    assert inside[0].wait(PATIENCE)
    threads += [enter_in_a_thread(tmp_path, inside[i], leave[i]) for i in (1, 2)]
    assert not inside[1].wait(0.2) and not inside[2].is_set(), "two ranks compile at once"
    leave[0].set()
    assert inside[1].wait(PATIENCE) and inside[2].wait(PATIENCE), "the others wait for one another"
    for event, thread in zip(leave, threads, strict=True):
        event.set()
        thread.join(PATIENCE)
