"""Expert weight gradients over several microbatches (`--moe-expert-wgrad-interval`)."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.build import build_data, build_model, build_train_loader, build_trainer, record_steps
from megatron_moe.config.memory import ActivationOffloadConfig, CudaGraphConfig, MemoryConfig, RecomputeConfig
from megatron_moe.config.model import LayerConfig, ModelConfig, MTPConfig
from megatron_moe.config.moe import CapacityConfig, SharedExpertsConfig
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig
from megatron_moe.config.pipeline import PipelineConfig
from megatron_moe.config.precision import low_precision_config
from megatron_moe.config.run import RunPlan
from megatron_moe.config.training import BatchConfig
from megatron_moe.kernels.kernel_set import OPS, KernelSet
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.evaluation import evaluate
from megatron_moe.train.train_state import TrainState
from megatron_moe.train.trainer import Trainer
from tests.helpers import tiny, tiny_models
from tests.helpers.eager_graphs import EagerRecorder
from tests.helpers.pipelines import laid_out, run_steps
from tests.helpers.ranks import on_threads
from tests.helpers.thinned import thinned
from tests.helpers.tolerances import FP64_LAYOUT

STEPS = 2


def experts(**changes: Any) -> Any:
    return replace(tiny.moe().experts, **changes)


def model(num_layers: int = 2, *, moe: Any = None, **changes: Any) -> ModelConfig:
    """Model with experts in every layer."""
    layer = LayerConfig(mixer=tiny.attention(), feed_forward=moe or tiny.moe(), norm=tiny.NORM)
    return tiny.model(layers=(layer,) * num_layers, **changes)


def plan(num_microbatches: int = 4, config: ModelConfig | None = None, *, dp: int = 1, **changes: Any) -> RunPlan:
    """Plan with microbatches of one short sequence."""
    return tiny.plan(
        model=config or model(),
        data=replace(tiny.plan().data, seq_length=8),
        batch=BatchConfig(micro_batch_size=1, global_batch_size=num_microbatches * dp),
        **changes,
    )


def over_ranks(num_microbatches: int = 3, moe: Any = None, **sizes: Any) -> RunPlan:
    """Layout with two expert-parallel ranks that process different tokens."""
    parallel = ParallelConfig(**{"world_size": 2, "ep": 2, **sizes})
    return plan(num_microbatches, model(moe=moe), dp=2, parallel=parallel)


def selective(*modules: str) -> MemoryConfig:
    return MemoryConfig(recompute=RecomputeConfig(recompute_modules=modules))


def in_fp8(**options: Any) -> RunPlan:
    low_precision = low_precision_config("blockwise", blocks=4, **options)
    return plan(5, precision=replace(tiny.plan().precision, low_precision=low_precision))


LATENT = tiny.moe(
    latent_size=16,
    experts=experts(hidden_size=16),
    shared=SharedExpertsConfig(mlp=tiny_models.mlp_config(ffn_hidden_size=16)),
)
REPEATED = MTPConfig(num_layers=2, loss_scaling_factor=0.3, repeated_layer=True)
ALL_TO_ALL, ALL_GATHER = tiny.moe(dispatcher="alltoall"), tiny.moe(dispatcher="allgather")
STAGES = laid_out(plan(), "Et|tL", 2)
CHUNKS = laid_out(plan(config=model(4)), "Et|t|t|tL", 2)
PAIRS = PipelineConfig(overlap=True, delay_wgrad_compute=True)
EARLY = DataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True, ddp_bucket_size=1)
MOVED = ActivationOffloadConfig(offload_modules=("expert_fc1", "moe_act"), min_offloaded_tensor_size=1)
CASES = {
    **{f"{number} microbatches": plan(number) for number in (1, 3, 5)},
    "experts in FP8": in_fp8(),
    "experts in FP8, weight gradients not": in_fp8(weight_grad=False),
    "experts in FP8, recorded attention": replace(
        in_fp8(),
        cuda_graphs=CudaGraphConfig(cuda_graph_modules=("attn", "moe_router"), cuda_graph_warmup_steps=1),
    ),
    "experts by all-to-all": over_ranks(moe=ALL_TO_ALL),
    "experts by all-gather": over_ranks(moe=ALL_GATHER),
    "one expert on every rank": over_ranks(moe=tiny.moe(tiny.router(num_experts=2), dispatcher="alltoall")),
    "padded to a capacity": over_ranks(moe=replace(ALL_TO_ALL, capacity=CapacityConfig(factor=1.0, pad=True))),
    "slices of experts": over_ranks(moe=ALL_TO_ALL, ep=1, tp=1, etp=2),
    "copies of experts, reduced early": replace(over_ranks(4, ep=1), data_parallel=EARLY),
    "1F1B": STAGES,
    "chunks": CHUNKS,
    "weight gradients apart": replace(plan(5), pipeline=PipelineConfig(delay_wgrad_compute=True)),
    "pairs of chunks": replace(CHUNKS, pipeline=replace(PAIRS, layout=CHUNKS.pipeline.layout)),
    "pairs over experts": replace(over_ranks(moe=ALL_TO_ALL), pipeline=PAIRS),
    "activation again": plan(memory=selective("moe_act", "layernorm")),
    "layer again": plan(memory=selective("moe")),
    "whole layers again": plan(memory=MemoryConfig(recompute=RecomputeConfig(recompute_method="uniform"))),
    "rows on the host": plan(memory=MemoryConfig(offload=MOVED)),
    "standard permutation, bias": plan(config=model(moe=tiny.moe(experts=experts(probs_on_output=True, bias=True)))),
    "one by one": plan(config=model(moe=tiny.moe(experts=experts(grouped=False)))),
    "latent, prediction by a repeated layer": plan(3, model(moe=LATENT, mtp=REPEATED)),
    "recorded attention": plan(
        cuda_graphs=CudaGraphConfig(cuda_graph_modules=("attn", "moe_router"), cuda_graph_warmup_steps=1)
    ),
    "recorded steps": plan(cuda_graphs=CudaGraphConfig(full_iteration=True, cuda_graph_warmup_steps=1)),
}  # fmt: skip


def every(interval: int, each: RunPlan) -> RunPlan:
    return replace(each, memory=replace(each.memory, moe_expert_wgrad_interval=interval))


def counting(calls: Counter[int]) -> KernelSet:
    """Reference kernels that count calls by the number of microbatches per expert weight gradient."""
    plain = reference.bundle()

    def grouped_weight_grad(parts: Any, out: Tensor, accumulate: bool) -> None:
        calls[len(parts)] += 1
        plain.grouped_weight_grad(parts, out, accumulate)

    functions = {op: getattr(plain, op) for op in OPS} | {"grouped_weight_grad": grouped_weight_grad}
    return KernelSet.of(functions, plain.choices)


def trainer_of(each: RunPlan, context: ParallelContext, calls: Counter[int] | None = None) -> Trainer:
    kernels = counting(Counter() if calls is None else calls)
    trainer = build_trainer(each, context, build_model(each, context, kernels), kernels)
    record_steps(trainer, EagerRecorder(), each.cuda_graphs, each.memory.moe_expert_wgrad_interval)
    return trainer


def trained(each: RunPlan) -> list[dict[str, Tensor]]:
    """Losses, norms, gradients and weights of every rank."""

    def train(context: ParallelContext) -> dict[str, Tensor]:
        return run_steps(each, trainer_of(each, context), TrainState(), STEPS)

    return on_threads(each.parallel, train)


@pytest.mark.parametrize("case", thinned(CASES))
def test_batched_weight_gradients_equal_immediate_ones(case: str) -> None:
    expected = trained(CASES[case])
    for interval in (2, 3) if CASES[case].parallel.world_size == 1 else (2,):
        for rank, figures in enumerate(trained(every(interval, CASES[case]))):
            FP64_LAYOUT.check_all(figures, expected[rank], f"{case}, every {interval}, rank {rank}")


@pytest.mark.parametrize("module", ["moe", "moe_preprocess"])
def test_batched_weight_gradients_reject_captured_expert_modules(module: str) -> None:
    recorded = plan(cuda_graphs=CudaGraphConfig(cuda_graph_modules=(module,), cuda_graph_warmup_steps=1))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="with --moe-expert-wgrad-interval 2"):
        trainer_of(every(2, recorded), ParallelContext.single(dtype=torch.float64))


@pytest.mark.parametrize(
    "number, interval, sizes", [(4, 1, [1, 1, 1, 1]), (4, 2, [2, 2]), (5, 2, [2, 2, 1]), (5, 3, [3, 2]), (3, 7, [3])]
)
def test_one_gemm_covers_several_microbatches(number: int, interval: int, sizes: list[int]) -> None:
    """Counts weight-gradient GEMMs of two layers with two weight stacks each; evaluations add none."""
    calls: Counter[int] = Counter()
    each = every(interval, plan(number))
    context = ParallelContext.single(dtype=torch.float64)
    trainer, datasets = trainer_of(each, context, calls), build_data(each, context)
    loader = build_train_loader(each, context, datasets)
    assert loader is not None
    for _ in range(2):
        calls.clear()
        trainer.step(loader.next_step(), TrainState())
        evaluate(trainer.pipeline, [loader.next_step()])
        assert calls == Counter({size: 4 * sizes.count(size) for size in sizes})


def test_repeated_step_uses_the_same_groups() -> None:
    """Includes a layer that runs twice per microbatch."""
    calls: Counter[int] = Counter()
    each = every(2, CASES["latent, prediction by a repeated layer"])
    context = ParallelContext.single(dtype=torch.float64)
    trainer = trainer_of(each, context, calls)
    loader = build_train_loader(each, context, build_data(each, context))
    assert loader is not None
    batches = loader.next_step()
    trainer.step(batches, TrainState())
    once = calls.copy()
    calls.clear()
    trainer.repeat(batches, 1)
    assert calls == once and once[2] and once[1]
