"""CUDA graphs combined with features of published recipes: replays of the stand-in equal eager steps bit for bit."""

from dataclasses import replace

import pytest
import torch

from megatron_moe.build import build_model, build_trainer, record_steps
from megatron_moe.config.component import NoFeedForward, NoMixer
from megatron_moe.config.memory import (
    ActivationOffloadConfig,
    CudaGraphConfig,
    MemoryConfig,
    PagedStashConfig,
    RecomputeConfig,
)
from megatron_moe.config.model import MTPConfig
from megatron_moe.config.moe import SharedExpertsConfig
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig
from megatron_moe.config.pipeline import PipelineConfig
from megatron_moe.config.precision import low_precision_config
from megatron_moe.config.run import RunPlan
from megatron_moe.config.training import BatchConfig
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.train_state import TrainState
from tests.helpers import tiny, tiny_models
from tests.helpers.eager_graphs import EagerRecorder, TapeRecorder
from tests.helpers.graph_counts import check_number_of_graphs
from tests.helpers.pipelines import laid_out, run_steps
from tests.helpers.ranks import on_threads
from tests.helpers.thinned import thinned
from tests.helpers.tolerances import EXACT

WHOLE = CudaGraphConfig(full_iteration=True, cuda_graph_warmup_steps=1)
ROUTER = {"score_function": "sigmoid", "expert_bias": True, "balancing": ("seq_aux_loss",), "aux_loss_coeffs": (0.02,)}
ON_HOST = ActivationOffloadConfig(
    offload_modules=("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"),
    min_offloaded_tensor_size=1,
    fine_grained_offloading_max_inflight_offloads=2,
)
OVERLAP = DataParallelConfig(
    use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=500
)
PAIRS = PipelineConfig(overlap=True, delay_wgrad_compute=True)
STASH = PagedStashConfig(moe_paged_stash_page_size=4, moe_paged_stash_buffer_size_factor_cuda=4.0)
MOVED = ActivationOffloadConfig(offload_modules=("expert_fc1", "moe_act"), min_offloaded_tensor_size=1)
EP2 = ParallelConfig(world_size=2, ep=2)
TP2 = ParallelConfig(world_size=2, tp=2, ep=2, sequence_parallel=True)
CP2 = ParallelConfig(world_size=2, cp=2, ep=2)
DP2 = ParallelConfig(world_size=2)
FLEX = tiny.moe(
    tiny.router(**ROUTER),
    dispatcher="flex",
    shared=SharedExpertsConfig(mlp=tiny_models.mlp_config(ffn_hidden_size=16)),
    expert_rank_capacity_factor=1.9,
)
DENSE_FIRST = tiny.model(num_layers=2, moe_config=FLEX)
LATENT = tiny.model(
    layers=(
        tiny_models.layer_config(tiny_models.mla_config()),
        tiny_models.layer_config(tiny_models.mla_config(), feed_forward=FLEX),
    )
)


def modules(*names: str) -> CudaGraphConfig:
    return CudaGraphConfig(cuda_graph_modules=names, cuda_graph_warmup_steps=1)  # type: ignore[arg-type]


def selective(*names: str) -> RecomputeConfig:
    return RecomputeConfig(recompute_modules=names)


def plan(parallel: ParallelConfig = EP2, **changes) -> RunPlan:
    """Builds a plan with two or four microbatches per step on each rank."""
    settings = {"model": DENSE_FIRST, "batch": BatchConfig(micro_batch_size=1, global_batch_size=4), **changes}
    return tiny.plan(parallel=parallel, **settings)


def staged(layout: str, **changes) -> RunPlan:
    """Builds a plan with pipeline stages on two ranks, without expert parallelism."""
    config = replace(tiny.model(num_layers=4, moe_config=tiny.moe(tiny.router(**ROUTER))), **changes)
    base = tiny.plan(model=config, batch=BatchConfig(micro_batch_size=1, global_batch_size=6))
    return laid_out(base, layout, 2)


def later(each: RunPlan) -> RunPlan:
    """Returns the plan with a schedule that overlaps pairs of microbatches and defers weight gradients."""
    return replace(each, pipeline=replace(PAIRS, layout=each.pipeline.layout))


FULL = RecomputeConfig(recompute_method="uniform")
CASES = {
    "tensor and sequence parallel": plan(TP2),
    "context parallel": plan(CP2),
    "1F1B": staged("Ett|ttL"),
    "interleaved": staged("Et|t|t|tL"),
    "interleaved, prediction, pairs": later(staged("Et|t|t|tmL", mtp=MTPConfig(num_layers=1))),
    "reductions and gathers": plan(DP2, data_parallel=OVERLAP),
    "pairs": plan(data_parallel=OVERLAP, pipeline=PAIRS),
    "pairs, tensor parallel": plan(TP2, pipeline=PAIRS),
    "recompute": plan(memory=MemoryConfig(recompute=selective("core_attn", "layernorm", "moe_act", "shared_experts"))),
    "recompute of latent attention": plan(
        model=LATENT, memory=MemoryConfig(recompute=selective("mla_up_proj", "layernorm")), data_parallel=OVERLAP
    ),
    "recompute, pairs": plan(memory=MemoryConfig(recompute=selective("core_attn", "moe_act")), pipeline=PAIRS),
    "stash": plan(memory=MemoryConfig(paged_stash=STASH), data_parallel=OVERLAP),
    "stash, pairs, prediction, recompute": plan(
        model=replace(DENSE_FIRST, mtp=MTPConfig(num_layers=1)),
        memory=MemoryConfig(paged_stash=STASH, recompute=selective("layernorm", "moe_act")),
        data_parallel=OVERLAP,
        pipeline=PAIRS,
    ),
}
ONE_RANK = tiny.plan(
    model=tiny.model(num_layers=2, moe_config=tiny.moe(tiny.router(**ROUTER)), mtp=MTPConfig(num_layers=1)),
    precision=replace(tiny.plan().precision, low_precision=low_precision_config("blockwise", blocks=8)),
    batch=BatchConfig(micro_batch_size=1, global_batch_size=2),
)
TAPED = {
    "prediction": ONE_RANK,
    "recompute": replace(ONE_RANK, memory=MemoryConfig(recompute=selective("core_attn", "layernorm", "moe_act"))),
    "whole layers again": replace(ONE_RANK, memory=MemoryConfig(recompute=FULL)),
    "stash": replace(ONE_RANK, memory=MemoryConfig(paged_stash=STASH)),
    "stash, recompute, pairs": replace(
        ONE_RANK, memory=MemoryConfig(paged_stash=STASH, recompute=selective("layernorm", "moe_act")), pipeline=PAIRS
    ),
    "all modules on the host": replace(ONE_RANK, memory=MemoryConfig(offload=ON_HOST)),
    "attention on the host, stash, recompute, pairs": replace(
        ONE_RANK,
        memory=MemoryConfig(
            offload=replace(ON_HOST, offload_modules=("core_attn",)), paged_stash=STASH, recompute=selective("moe_act")
        ),
        pipeline=PAIRS,
    ),
    "later weight gradients": replace(ONE_RANK, pipeline=PipelineConfig(delay_wgrad_compute=True)),
}
"""Cases with FP8 experts, which read row counts on the device, so `TapeRecorder` can capture whole steps and layers."""
MODULES = {"experts captured": modules("attn", "mlp", "moe"), "experts computed": modules("attn", "mlp", "moe_router")}
SINGLE = [
    (replace(layer, feed_forward=NoFeedForward()), replace(layer, mixer=NoMixer(hidden_size=layer.hidden_size)))
    for layer in DENSE_FIRST.layers
]
"""The layers of `DENSE_FIRST`, each split into its mixer and its feed-forward module."""
ONE_KIND = {
    "one module per layer": (
        plan(model=replace(DENSE_FIRST, layers=(*SINGLE[0], *SINGLE[1]))),
        modules("attn", "mlp", "moe_router"),
    ),
    "whole layers again": (plan(memory=MemoryConfig(recompute=FULL)), WHOLE),
    "all modules on the host, interleaved": (replace(staged("Et|t|t|tL"), memory=MemoryConfig(offload=ON_HOST)), WHOLE),
    "experts on the host": (plan(memory=MemoryConfig(offload=MOVED)), modules("attn", "moe_router")),
    "experts on the host after the next replay": (
        plan(memory=MemoryConfig(offload=replace(MOVED, delay_offload_until_cuda_graph=True))),
        modules("attn", "moe_router"),
    ),
    "experts on the host, pairs": (
        plan(memory=MemoryConfig(offload=MOVED), pipeline=PAIRS),
        modules("attn", "moe_router"),
    ),
}


def is_captured(case: str, config: CudaGraphConfig) -> bool:
    """Returns False for whole MoE layers in overlapped pairs or with a paged stash, which cannot be captured."""
    each = CASES[case]
    return "moe" not in config.cuda_graph_modules or not (each.pipeline.overlap or each.memory.paged_stash)


def recorder_for(each: RunPlan, config: CudaGraphConfig) -> EagerRecorder:
    """Selects `TapeRecorder`, or `EagerRecorder` if captured work reads row counts on the host or communicates."""
    experts = config.full_iteration or "moe" in config.cuda_graph_modules
    communicates = each.parallel.tp > 1 or each.parallel.cp > 1 or (experts and each.parallel.world_size > 1)
    return EagerRecorder() if communicates or (experts and each.precision.low_precision is None) else TapeRecorder()


def trained(each: RunPlan, config: CudaGraphConfig | None = None) -> list[dict[str, torch.Tensor]]:
    """Trains and evaluates between steps; returns losses, norms, gradients and weights of every rank."""

    def run(context: ParallelContext) -> dict[str, torch.Tensor]:
        kernels = reference.bundle()
        trainer = build_trainer(each, context, build_model(each, context, kernels), kernels)
        if config is not None:
            record_steps(trainer, recorder_for(each, config), config)
        state = TrainState()
        first = run_steps(each, trainer, state, 2)
        with torch.no_grad():
            batches = [step.batches[0] for step in trainer.recent]
            trainer.pipeline.run(batches, lambda output, *_: output.loss_BS.sum())
        if config is not None:
            check_number_of_graphs(trainer, replace(each, cuda_graphs=config))
        return first | {f"later {name}": value for name, value in run_steps(each, trainer, state, 1).items()}

    return on_threads(each.parallel, run)


def check(each: RunPlan, configs: dict[str, CudaGraphConfig]) -> None:
    expected = trained(each)
    for name, config in configs.items():
        for rank, figures in enumerate(trained(each, config)):
            EXACT.check_all(figures, expected[rank], f"{name}, rank {rank}")


@pytest.mark.parametrize("case", thinned(CASES))
def test_replays_equal_eager_steps(case: str) -> None:
    check(CASES[case], {k: v for k, v in {**MODULES, "whole step": WHOLE}.items() if is_captured(case, v)})


@pytest.mark.parametrize("case", thinned(TAPED))
def test_replays_of_recorded_ops_equal_eager_steps(case: str) -> None:
    each = TAPED[case]
    only_whole = each.memory.recompute.recompute_method or each.memory.offload.offload_modules
    check(each, {"whole step": WHOLE} | ({} if only_whole else {"modules": MODULES["experts computed"]}))


@pytest.mark.parametrize("case", ONE_KIND)
def test_replays_of_one_kind_equal_eager_steps(case: str) -> None:
    each, config = ONE_KIND[case]
    check(each, {case: config})
