"""Trains a few steps on this rank and records losses, norms, metrics, gradients, weights and token counts.

A record contains only host data, so that ranks can be threads or processes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron_moe import build
from megatron_moe.config.param_meta import ParamBox, ParamMeta
from megatron_moe.config.run import RunPlan
from megatron_moe.data.batch import MicroBatch
from megatron_moe.data.datasets import Datasets
from megatron_moe.data.loader import RowPacker
from megatron_moe.kernels.kernel_set import KernelSet
from megatron_moe.logs.metric_values import MetricValue
from megatron_moe.memory.cuda_graphs.graph_metrics import MetricRecorder
from megatron_moe.moe.router import Router
from megatron_moe.moe.token_dispatcher.base import Routing
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.grid import attention_grid, expert_grid
from megatron_moe.parallel.parameter import Parameter
from megatron_moe.train.train_state import TrainState
from megatron_moe.train.trainer import Trainer

STEADY_EPS = 1e-5
"""AdamW epsilon for comparisons. With 1e-8, the rounding error of a gradient near zero would dominate its update."""

MetricKey = tuple[str, int | None]
"""(metric name, layer index). The layer index is None for metrics that are not per layer."""
BeforeStep = Callable[[Sequence[MicroBatch], int], None]
"""Callback that runs before each step with the step's microbatches and iteration number as arguments."""


@dataclass(frozen=True)
class RecordedTensor:
    """One rank's shard of the gradient or weight of a parameter."""

    value: Tensor
    """Values of the shard, on the host. Gradient elements that another rank owns are NaN."""
    global_shape: tuple[int, ...]
    boxes: tuple[ParamBox, ...]
    meta: ParamMeta


@dataclass
class RankRecord:
    """Results that one rank records for the comparison."""

    rank: int
    coordinates: dict[str, int]
    """Coordinates of the rank on the attention grid and the expert grid, by axis name."""
    losses: list[float] = field(default_factory=list)
    """Reported loss of each step."""
    norms: list[dict[str, float]] = field(default_factory=list)
    """Gradient norms of each step: "all", "dense", "experts" and "router"."""
    metrics: list[dict[MetricKey, MetricValue]] = field(default_factory=list)
    """Metrics of each step, reduced over ranks."""
    gradients: dict[str, RecordedTensor] = field(default_factory=dict)
    """Gradients of the first step after reduction and before clipping."""
    weights: dict[str, RecordedTensor] = field(default_factory=dict)
    """Weights after the last step."""
    biases: dict[int, Tensor] = field(default_factory=dict)
    """Expert biases after the last step, by layer index."""
    tokens: dict[int, Tensor] = field(default_factory=dict)
    """Layer index -> number of choices of each expert by this rank's tokens, summed over all steps; int64 [E]."""


def record_run(
    plan: RunPlan,
    context: ParallelContext,
    kernels: KernelSet,
    datasets: Datasets,
    *,
    num_steps: int,
    prepare: Callable[[Trainer], BeforeStep | None] | None = None,
    packer: RowPacker | None = None,
) -> RankRecord:
    """Trains the plan's model for `num_steps` steps on this rank and records the results.

    `prepare` receives the trainer before the first step and returns a callback to run before every step, or None.
    `packer`: packer of variable-length data; None selects the packer of the plan.
    """
    model = build.build_model(plan, context, kernels)
    trainer = build.build_trainer(plan, context, model, kernels)
    loader = build.build_train_loader(plan, context, datasets, packer)
    assert loader is not None, "the plan has no training steps to record"
    before_step = None if prepare is None else prepare(trainer)
    record = RankRecord(context.rank, coordinates_of(context))
    _count_tokens(trainer, record)
    state, config = TrainState(), build.build_train_state_config(plan)
    for step in range(num_steps):
        batches = loader.next_step()
        if before_step is not None:
            before_step(batches, state.iteration + 1)
        outcome = trainer.step(batches, state, loader.last_counts)
        state.advance(outcome.counts, config)
        record.losses.append(float(outcome.loss))
        record.norms.append({name: float(norm) for name, norm in outcome.norms.items()})
        record.metrics.append(dict(_figures(trainer, context)))
        if step == 0:
            record.gradients = dict(_gradients(trainer))
    loader.close()
    trainer.optimizer.finish_gather()
    with trainer.optimizer.unquantized_weights():
        record.weights = {each.name: _held(each.parameter, each.parameter) for each in trainer.buffers.main_grads}
    for router in trainer.routers:
        if router.expert_bias is not None:
            record.biases[router.layer] = router.expert_bias.detach().cpu().clone()
    return record


def _gradients(trainer: Trainer) -> Iterator[tuple[str, RecordedTensor]]:
    """Yields parameter names with their reduced gradients; elements that another rank owns are NaN."""
    for buffer in trainer.buffers.buffers:
        finished = torch.full_like(buffer.grads, float("nan"))
        for start, end in buffer.owned:
            finished[start:end] = buffer.owned_grads(start, end)
        for each, (_, value) in zip(buffer.main_grads, buffer.views(finished), strict=True):
            yield each.name, _held(each.parameter, value)


def coordinates_of(context: ParallelContext) -> dict[str, int]:
    """Coordinates of this rank by axis name: pp, dp, cp, tp and edp, ep, etp."""
    attention = attention_grid(context.config).coordinates(context.rank)
    expert = expert_grid(context.config).coordinates(context.rank)
    place = {axis: attention[axis] for axis in ("pp", "dp", "cp", "tp")}
    return place | {"edp": expert["dp"], "ep": expert["ep"], "etp": expert["tp"]}


def _held(parameter: Parameter, value: Tensor) -> RecordedTensor:
    return RecordedTensor(value.detach().cpu().clone(), parameter.global_shape, parameter.boxes, parameter.meta)


def _figures(trainer: Trainer, context: ParallelContext) -> Iterator[tuple[MetricKey, MetricValue]]:
    """Yields (key, value) of every metric of the last step."""
    for name, metric in trainer.metrics.take_all().reduce(context).items():
        if metric.layers:
            yield from (((name, layer), figure) for layer, figure in metric.layers.items())
        else:
            yield (name, None), metric.value


def _count_tokens(trainer: Trainer, record: RankRecord) -> None:
    """Registers router hooks that add the number of choices of each expert to `record.tokens`."""

    def count_tokens_of_router(router: nn.Module, inputs: tuple, routing: Routing) -> None:
        assert isinstance(router, Router)
        metrics = inputs[1].metrics
        if metrics is not trainer.metrics and not isinstance(metrics, MetricRecorder):
            return  # recomputed forward, already counted
        counts_E = routing.counts_E.detach().cpu().long()
        record.tokens[router.layer] = counts_E + record.tokens.get(router.layer, 0)

    for router in trainer.routers:
        router.register_forward_hook(count_tokens_of_router)
