"""Kernel warm-up."""

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_moe.config.memory import MemoryConfig, RecomputeConfig
from megatron_moe.config.optimizer import OptimizerConfig
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig, ProcessInfo
from megatron_moe.config.run import RunPlan
from megatron_moe.parallel.parameter import Parameter
from megatron_moe.resilience.watchdog import Watchdog
from megatron_moe.warmup import kernel_warmup as warmup
from megatron_moe.warmup.kernel_warmup import compile_kernels, take_step, try_warm_up, warm_up_kernels, warmup_plan
from tests.helpers import tiny
from tests.kernels.compiled import compiled

SEVERAL = ParallelConfig(world_size=8, pp=2, tp=2, sequence_parallel=True, ep=4)


def test_reduced_plan_has_every_kind_of_layer_at_unchanged_sizes():
    plan = replace(tiny.plan(model=tiny.model(num_layers=6)), parallel=SEVERAL)
    small = warmup_plan(plan)
    assert set(small.model.layers) == set(plan.model.layers) and len(small.model.layers) == 2
    assert (small.parallel.world_size, small.parallel.pp) == (4, 1)
    assert (small.parallel.tp, small.parallel.ep, small.parallel.dp) == (2, 4, 2)
    assert small.batch.micro_batch_size == plan.batch.micro_batch_size and small.data == plan.data
    assert small.batch.global_batch_size == 2 * plan.batch.micro_batch_size * small.parallel.dp


def test_reduced_plan_covers_incomplete_weight_gradient_groups():
    """Steps of 4 microbatches with interval 3 leave an incomplete group of 1."""
    plan = replace(tiny.plan(), memory=MemoryConfig(moe_expert_wgrad_interval=3))
    assert warmup_plan(plan).batch.global_batch_size == (3 + 3 + 1) * plan.batch.micro_batch_size


@pytest.mark.parametrize("dispatcher", ["alltoall", "flex"])
@pytest.mark.parametrize("parallel", [ParallelConfig(), SEVERAL, replace(SEVERAL, ranks_per_host=2)])
def test_warm_up_step_needs_no_peers_and_leaves_no_process_group(parallel, dispatcher):
    model = tiny.model(moe_config=tiny.moe(dispatcher=dispatcher))
    take_step(tiny.plan(model=model, parallel=parallel), torch.device("cpu"))
    assert not dist.is_initialized()


@pytest.mark.parametrize("rank", [0, 3])
def test_warm_up_step_of_muon_gathers_unequal_shards(rank):
    """A rank owns whole matrices, so that shards of a bucket have different sizes."""
    sharded = DataParallelConfig(use_distributed_optimizer=True)
    optimizer = OptimizerConfig(optimizer="muon", clip_grad=0.5)
    launch = ProcessInfo(rank=rank, world_size=4)
    plan = tiny.plan(parallel=ParallelConfig(world_size=4), data_parallel=sharded, optimizer=optimizer, process=launch)
    take_step(plan, torch.device("cpu"))


def test_warm_up_frees_its_memory(tmp_path):
    plan = replace(tiny.plan(), data_parallel=DataParallelConfig(overlap_grad_reduce=True))
    gc.collect()
    before = parameters_alive()  # kept alive, so that ids stay unique
    assert try_warm_up(plan, torch.device("cpu"), tmp_path)[0] == ""
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
    def fail(*_: object, **given: object) -> None:
        raise kind("no room\nfor details")

    monkeypatch.setattr(warmup, "take_step", fail)
    failure, _ = try_warm_up(tiny.plan(), torch.device("cpu"), tmp_path)
    assert failure == f"parallel compilation: {kind.__name__}: no room"
    monkeypatch.undo()
    assert try_warm_up(tiny.plan(), torch.device("cpu"), tmp_path)[0] == ""


def test_kernels_are_recorded_and_compiled_only_if_no_earlier_warm_up_succeeded(tmp_path, monkeypatch):
    steps: list[str] = []
    monkeypatch.setattr(warmup, "take_step", lambda plan, device, **given: steps.append(device.type))
    for plan in (tiny.plan(), tiny.plan(), tiny.plan(process=ProcessInfo(rank=1, world_size=2))):
        try_warm_up(plan, torch.device("cpu"), tmp_path)
    assert steps == ["meta", "cpu", "cpu", "meta", "cpu"], "kernels can depend on the rank"
    (tmp_path / "entry").mkdir()
    (tmp_path / "entry" / "kernel.json").write_text("{")  # cut
    try_warm_up(tiny.plan(), torch.device("cpu"), tmp_path)
    assert steps[5:] == ["meta", "cpu"]
    monkeypatch.setattr(warmup, "BACKENDS", tmp_path)  # other sources
    try_warm_up(tiny.plan(), torch.device("cpu"), tmp_path)
    assert steps[7:] == ["meta", "cpu"]


def test_kernels_of_other_optimizers_and_memory_options_are_compiled_too(tmp_path, monkeypatch):
    steps: list[str] = []
    monkeypatch.setattr(warmup, "take_step", lambda plan, device, **given: steps.append(device.type))
    masked = replace(tiny.plan().data, reset_attention_mask=True)
    recompute = RecomputeConfig(recompute_modules=("moe_act",))
    plans = (
        tiny.plan(),
        tiny.plan(optimizer=OptimizerConfig(optimizer="lion")),
        tiny.plan(memory=MemoryConfig(recompute=recompute)),
        tiny.plan(data_parallel=DataParallelConfig(use_distributed_optimizer=True)),
        tiny.plan(data=masked),
    )
    for plan in plans:
        try_warm_up(plan, torch.device("cpu"), tmp_path)
    assert steps == ["meta", "cpu"] * len(plans)


@pytest.mark.parametrize("parallel", [True, False])
def test_ranks_run_the_warm_up_step_one_after_the_other_if_it_compiles_the_kernels(tmp_path, monkeypatch, parallel):
    together = threading.Barrier(2)
    met: list[bool] = []

    def step(plan: RunPlan, device: torch.device) -> None:
        try:
            together.wait(60.0 if parallel else 0.5)
        except threading.BrokenBarrierError:
            together.reset()
            met.append(False)
        else:
            met.append(True)

    monkeypatch.setattr(warmup, "compile_kernels", lambda *_: "" if parallel else "no memory")
    monkeypatch.setattr(warmup, "take_step", step)
    with ThreadPoolExecutor(2) as ranks:
        ended = list(ranks.map(lambda _: try_warm_up(tiny.plan(), torch.device("cpu"), tmp_path)[0], range(2)))
    assert met == [parallel] * 2 and ended == ["" if parallel else "no memory"] * 2


def test_processor_cores_are_divided_among_the_ranks_of_a_node(tmp_path, monkeypatch):
    num_threads: list[int] = []
    monkeypatch.setattr(warmup, "take_step", lambda *_, **given: None)
    monkeypatch.setattr(warmup, "compile_recorded", lambda recorded, folder, number: num_threads.append(number))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(24))
    for ranks in (1, 2, 4, 64):
        compile_kernels(tiny.plan(process=ProcessInfo(local_world_size=ranks)), torch.device("cpu"), tmp_path)
    assert num_threads == [16, 12, 6, 1]


RECORDING = """
import inspect
from dataclasses import replace
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda device: (9, 0)
torch.cuda.set_device = lambda device: None
from megatron_moe.config.parallel import ProcessInfo, ParallelConfig
from megatron_moe.config.run import KernelConfig
from megatron_moe.warmup import kernel_warmup as warmup
from tests.helpers import tiny
from tests.kernels.compiled import compiled

model = tiny.model(moe_config=tiny.moe(dispatcher="flex"))
plan = tiny.plan(model=model, parallel=ParallelConfig(world_size=2, ep=2), kernels=KernelConfig())
plan = replace(plan, precision=replace(plan.precision, params="bf16", grads="fp32", main_params_dtype="fp32"))
recorded = []
warmup.compile_recorded = lambda kernels, folder, number: recorded.append(kernels)
for rank in (0, 1):
    launch = ProcessInfo(rank=rank, world_size=2, local_rank=rank, local_world_size=2)
    error = warmup.compile_kernels(replace(plan, process=launch), torch.device("cuda", rank), warmup.Path("unused"))
    assert not error, error
first, second = (
    {key: inspect.getclosurevars(compile).nonlocals["src"].name for key, (compile, _) in kernels.items()}
    for kernels in recorded
)
found.append([first[key] for key in first.keys() & second.keys()])
found.append([second[key] for key in second.keys() - first.keys()])
"""


def test_kernels_of_every_rank_are_recorded_without_a_gpu():
    """Triton and Gluon kernels of forward, backward, token exchange and optimizer; some depend on the rank."""
    both, second = map(set, compiled(RECORDING))
    assert {"_grouped_gemm", "_expert_grads", "_count_experts", "route_backward", "_adamw"} <= both
    assert second == {"_push_tokens", "_push_sums", "_acknowledge"}
