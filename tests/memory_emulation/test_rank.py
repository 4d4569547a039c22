"""Emulation of one rank: meta tensors take the same memory as real tensors."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_moe.config.emulation import EmulationConfig, RoutedLoad
from megatron_moe.config.memory import ActivationOffloadConfig, MemoryConfig
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig
from megatron_moe.config.pipeline import PipelineConfig
from megatron_moe.config.pipeline_layout import even_layout
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.config.run import KernelConfig, RunPlan
from megatron_moe.config.training import BatchConfig
from megatron_moe.kernels.kernel_set import OPS, KernelSet
from megatron_moe.kernels.ops import Kernels
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.memory_emulation import kernels as emulated
from megatron_moe.memory_emulation.rank import (
    EmulatedRun,
    assumed_ids,
    assumed_load,
    emulate_rank,
    enough_microbatches,
    measure_step_memory,
    with_assumed_choices,
)
from megatron_moe.memory_emulation.tracker import CATEGORIES, HOST
from megatron_moe.parallel.context import ParallelContext, torch_dtype
from tests.helpers import tiny
from tests.helpers.thinned import thinned

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

META = torch.device("meta")
MODEL = tiny.model(num_layers=4, moe_config=tiny.moe(dispatcher="alltoall"))


def plan(*, pp: int = 1, vpp: int = 1, ep: int = 1, imbalance: float = 1.0, **changes) -> RunPlan:
    """Builds a bf16 plan with ZeRO-1 on pp * ep ranks and 16 microbatches of 2 sequences."""
    layout = even_layout(4, pp=pp, vpp=vpp)
    config = tiny.plan(
        model=MODEL,
        parallel=ParallelConfig(world_size=pp * ep, pp=pp, ep=ep, virtual_stages=vpp),
        pipeline=PipelineConfig(layout=layout),
        precision=PrecisionConfig(params="bf16"),
        kernels=KernelConfig(),
        data_parallel=DataParallelConfig(use_distributed_optimizer=True),
        batch=BatchConfig(micro_batch_size=2, global_batch_size=32 * ep),
        emulation=EmulationConfig(emulate_imbalance=imbalance),
    )
    return replace(config, **changes)


OVERLAPPED = replace(plan(pp=2, vpp=2, ep=2).pipeline, overlap=True)
PLANS = {
    "one rank": plan(),
    "expert parallel": plan(ep=2),
    "stages": plan(pp=2),
    "interleaved stages with experts": plan(pp=2, vpp=2, ep=2),
    "overlapped": plan(pp=2, vpp=2, ep=2, pipeline=OVERLAPPED),
    "overlapped with split backward": plan(pp=2, vpp=2, ep=2, pipeline=replace(OVERLAPPED, delay_wgrad_compute=True)),
    "weight gradients of experts together": plan(pp=2, vpp=2, ep=2, memory=MemoryConfig(moe_expert_wgrad_interval=3)),
    "overlapped reduction and gather": plan(
        pp=2,
        ep=2,
        data_parallel=DataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
        ),
    ),
    "tensor parallel": plan(parallel=ParallelConfig(world_size=4, tp=2, ep=2, sequence_parallel=True)),
    "context parallel": plan(parallel=ParallelConfig(world_size=4, cp=2, ep=2)),
}


def without_host_reads() -> KernelSet:
    """Returns torch kernels for meta and real tensors; fakes replace the ops that read sizes on the host."""
    return emulated.emulated_kernels(KernelConfig(kernel_backend=reference.NAME), torch.float32)


def on(
    device: torch.device, config: RunPlan, rank: int, kernels: Kernels | None = None, number: int = 0
) -> EmulatedRun:
    """Runs a rank with the assumed routing on tensors of the device, which may be meta."""
    context = ParallelContext.fake(config.parallel, rank, dtype=torch_dtype(config.precision.params), device=device)
    try:
        load = assumed_load(context)
        bundle = with_assumed_choices(without_host_reads() if kernels is None else kernels, load)
        return measure_step_memory(config, context, bundle, number or enough_microbatches(config), load)
    finally:
        context.stop()


@pytest.mark.parametrize("name", thinned(PLANS))
def test_meta_tensors_take_the_memory_of_real_ones(name: str) -> None:
    config = PLANS[name]
    rank = config.parallel.world_size - 1
    free, real = (
        on(torch.device(kind), config, rank, number=2 * config.parallel.pp).timeline for kind in ("meta", "cpu")
    )
    assert free.live_bytes()[free.begin :] == real.live_bytes()[real.begin :]
    assert free.peak().categories == real.peak().categories


def test_single_rank_run_takes_the_emulated_memory() -> None:
    config = plan()
    context = ParallelContext.single(dtype=torch.bfloat16)
    real = measure_step_memory(config, context, without_host_reads(), 4).timeline.peak()
    free = on(META, config, 0, number=4).timeline.peak()
    assert (real.total, real.categories) == (free.total, free.categories)


def test_categories_add_up_to_the_total_on_every_rank() -> None:
    config = PLANS["interleaved stages with experts"]
    for rank in range(config.parallel.world_size):
        timeline = emulate_rank(config, rank, META).timeline
        peak = timeline.peak()
        assert tuple(peak.categories) == CATEGORIES
        assert sum(peak.categories.values()) == sum(peak.modules.values()) == peak.total
        assert peak.total == max(timeline.live_bytes()[timeline.begin :])
        _, curves = timeline.curves(100)
        assert max(map(sum, zip(*curves.values(), strict=True))) == peak.total


def test_state_categories_have_the_sizes_of_their_dtypes() -> None:
    config = plan(ep=2)
    categories = emulate_rank(config, 0, META).timeline.peak().categories
    # Weights are bf16; gradients, master weights and two moments are fp32. Experts have no data-parallel replicas.
    assert categories["gradients"] == 2 * categories["weights"]
    assert categories["moments"] == 2 * categories["master weights"]
    assert categories["weights"] < categories["master weights"] < categories["gradients"]


@pytest.mark.parametrize("name", ["stages", "interleaved stages with experts", "weight gradients of experts together"])
def test_peak_is_reached_with_enough_microbatches(name: str) -> None:
    config = PLANS[name]
    number = enough_microbatches(config)
    assert number < 12
    short, long = (emulate_rank(config, 0, META, num_microbatches=each).timeline.peak() for each in (number, 12))
    # Only the inputs of the additional microbatches remain on the device: ids, labels, loss weights and positions.
    batches = 3 * (12 - number) * 4 * 512
    assert 0 < long.total - short.total <= batches
    assert long.categories["activations"] == short.categories["activations"]


def test_the_first_stage_keeps_more_than_the_last() -> None:
    first, last = (emulate_rank(PLANS["stages"], rank, META).timeline.peak() for rank in (0, 1))
    assert first.categories["activations"] > last.categories["activations"] > 0


def test_activations_follow_the_assumed_load() -> None:
    even, heavy, light = (
        emulate_rank(plan(ep=2, imbalance=factor), 1, META).timeline.peak().categories for factor in (1.0, 1.5, 0.5)
    )
    assert light["activations"] < even["activations"] < heavy["activations"]
    assert even["weights"] == heavy["weights"]


def test_offloaded_activations_are_not_on_the_device() -> None:
    plain = emulate_rank(plan(), 0, META, num_microbatches=2).timeline.peak()
    away = ActivationOffloadConfig(offload_modules=("expert_fc1", "moe_act"), min_offloaded_tensor_size=1)
    moved = emulate_rank(plan(memory=MemoryConfig(offload=away)), 0, META, num_microbatches=2).timeline
    assert moved.peak().categories["activations"] < plain.categories["activations"]
    assert moved.peak().total < plain.total
    assert sum(storage.bytes for storage in moved.storages if storage.state == HOST) > 0


@pytest.mark.parametrize(("num_ranks", "busiest", "imbalance"), [(1, 0, 1.0), (4, 2, 1.0), (4, 3, 2.5), (4, 0, 0.0)])
def test_the_assumed_load_counts_every_choice_once(num_ranks: int, busiest: int, imbalance: float) -> None:
    load = RoutedLoad(num_ranks, busiest, imbalance)
    router = tiny.router()
    counts = load.counts(8, 70)
    assert sum(counts) == 70 and len(counts) == 8
    mine = counts[busiest * 8 // num_ranks : (busiest + 1) * 8 // num_ranks]
    assert sum(mine) == round(70 * imbalance / num_ranks)
    ids_TK = assumed_ids(load, router, 35, torch.device("cpu"))
    assert ids_TK.flatten().bincount(minlength=8).tolist() == list(counts)
    assert all(len(set(row)) == len(row) for row in ids_TK.tolist())


def test_duplicate_saved_activation_is_detected() -> None:
    """Injected fault: a norm that additionally saves a copy of its input."""
    config, sound = plan(), emulated.emulated_kernels(KernelConfig(), torch.bfloat16)

    def wasteful(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        return sound.rms_norm(_SaveCopy.apply(x), weight, eps, zero_centered)

    functions = {op: getattr(sound, op) for op in OPS} | {"rms_norm": wasteful}
    before, after = (
        on(META, config, 0, each).timeline.peak() for each in (sound, KernelSet.of(functions, sound.choices))
    )
    tokens = 2 * tiny.SEQ * tiny.HIDDEN * 2
    # Only the final norm uses the op rms_norm; norms with a residual use other ops.
    assert after.categories["activations"] - before.categories["activations"] == tokens


class _SaveCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.clone())
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad
