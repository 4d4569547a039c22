"""Runs one MoE layer over ranks and on one rank, and gathers the results by name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.mlp import ActivationConfig, MLPConfig
from megatron_moe.config.model import InitConfig
from megatron_moe.config.moe import CapacityConfig, ExpertsConfig, MoEConfig, RouterConfig, SharedExpertsConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.kernels.ops import Kernels
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.model.init import init_parameters
from megatron_moe.moe.moe_layer import MoELayer
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import named_parameters, write_shard
from megatron_moe.precision.quantizer_factory import NO_QUANTIZERS, LinearQuantizers
from tests.helpers import tiny_models
from tests.helpers.modules import module_of
from tests.helpers.ranks import on_threads

HIDDEN, LATENT, FFN, EXPERTS, STEPS, BATCH = 8, 6, 8, 8, 8, 2
SWIGLU = ActivationConfig(kind="silu", gated=True)
SHARED = SharedExpertsConfig(mlp=MLPConfig(hidden_size=HIDDEN, ffn_hidden_size=8, activation=SWIGLU), gate=True)
KERNELS = reference.bundle()


def moe_config(
    *,
    dispatcher: str = "alltoall",
    latent: bool = False,
    shared: bool = False,
    overlap: bool = False,
    capacity: CapacityConfig | None = None,
    router: dict[str, Any] | None = None,
    **experts: Any,
) -> MoEConfig:
    return MoEConfig(
        router=RouterConfig(**{"hidden_size": HIDDEN, "num_experts": EXPERTS, "topk": 2, **(router or {})}),
        experts=ExpertsConfig(
            **{
                "num_experts": (router or {}).get("num_experts", EXPERTS),
                "hidden_size": LATENT if latent else HIDDEN,
                "ffn_hidden_size": FFN,
                "activation": SWIGLU,
                **experts,
            }
        ),
        capacity=capacity,
        shared=SHARED if shared else None,
        latent_size=LATENT if latent else None,
        dispatcher=dispatcher,
        shared_overlap=overlap,
    )


def folds(world_size: int) -> Iterator[ParallelConfig]:
    """Yields every legal layout of attention (tp with sequence parallelism, dp) and experts (etp, ep) on the ranks."""
    for tp in divisors(world_size):
        for etp in divisors(world_size):
            for ep in divisors(world_size // etp):
                if etp * ep > 1:
                    yield parallel(world_size, tp=tp, etp=etp, ep=ep)


def parallel(world_size: int, *, tp: int = 1, cp: int = 1, etp: int = 1, ep: int = 1, **fields: Any) -> ParallelConfig:
    return ParallelConfig(world_size=world_size, tp=tp, cp=cp, etp=etp, ep=ep, sequence_parallel=tp > 1, **fields)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def name_of(config: ParallelConfig) -> str:
    hosts = "" if config.ranks_per_host is None else f" {config.ranks_per_host} a host"
    return f"tp{config.tp} cp{config.cp} dp{config.dp} etp{config.etp} ep{config.ep}{hosts}"


@dataclass
class Data:
    """Inputs of every data-parallel rank: hidden states and output gradients [S, B, H], and validity [B, S]."""

    hidden: list[Tensor]
    push: list[Tensor]
    valid: list[Tensor | None]

    @classmethod
    def random(cls, dp: int, *, padded: bool = False) -> "Data":
        draw = torch.Generator().manual_seed(dp)
        hidden = [torch.randn(STEPS, BATCH, HIDDEN, generator=draw, dtype=torch.float64) for _ in range(dp)]
        push = [torch.randn(STEPS, BATCH, HIDDEN, generator=draw, dtype=torch.float64) for _ in range(dp)]
        valid: list[Tensor | None] = [None] * dp
        if padded:
            # Sequences have different lengths, and the last one contains only padding.
            lengths = [torch.randint(1, STEPS, (BATCH, 1), generator=draw) for _ in range(dp)]
            lengths[-1][-1] = 0
            valid = [torch.arange(STEPS) < length for length in lengths]
        return cls(hidden, push, valid)

    def piece(self, config: ParallelConfig, dp: int, cp: int, tp: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns hidden states, output gradients and validity of the positions of one rank."""
        length = STEPS // (config.cp * config.tp)
        at = slice((cp * config.tp + tp) * length, (cp * config.tp + tp + 1) * length)
        valid = self.valid[dp]
        return self.hidden[dp][at], self.push[dp][at], None if valid is None else valid[:, at]


@dataclass
class Result:
    """Outputs and input gradients of a layer in rank order, gradients of whole parameters, metrics and router state."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    """Counters and buffers of the router."""


Change = Callable[[MoELayer], None]
"""Modifies a newly built layer, identically on every rank."""


def leave(layer: MoELayer) -> None:
    pass


def make_layer(
    config: MoEConfig,
    ctx: ParallelContext,
    change: Change = leave,
    kernels: Kernels = KERNELS,
    quantizers: LinearQuantizers = NO_QUANTIZERS,
) -> MoELayer:
    layer = module_of(config, ctx, kernels, layer=3, quantizers=quantizers)
    init_parameters(layer, 5, InitConfig(method="unit_gain"))
    change(layer)
    return layer


def make_mb(hidden: Tensor, valid: Tensor | None, **fields: Any) -> MicrobatchContext:
    steps, batch = hidden.shape[:2]
    return tiny_models.make_mb(batch, steps, valid_BS=valid, **fields)


def on_one_rank(
    config: MoEConfig,
    data: Data,
    partition: ParallelConfig | None = None,
    change: Change = leave,
    ctx: ParallelContext | None = None,
    kernels: Kernels = KERNELS,
) -> Result:
    """Runs the layer on one rank, as the oracle: the data of each data-parallel rank is one microbatch.

    With `partition`, the part of every rank of that layout is a separate microbatch. `ctx` has one rank; the default is
    the CPU in fp64.
    """
    ctx = ctx or ParallelContext.single()
    layer, metrics, dp = make_layer(config, ctx, change, kernels), MetricAccumulator(), len(data.hidden)
    shape = partition or ParallelConfig(world_size=dp)
    outs, grads = [], []
    for d, c, t in _pieces(shape, dp):
        hidden, push, valid = data.piece(shape, d, c, t)
        hidden, push = (part.to(ctx.device, ctx.dtype) for part in (hidden, push))
        valid = None if valid is None else valid.to(ctx.device)
        hidden = hidden.clone().requires_grad_()
        out = layer(hidden, make_mb(hidden, valid, metrics=metrics, aux_loss_scale=1.0))
        (out * push).sum().backward()
        outs.append(out.detach())
        grads.append(hidden.grad)
    tensors = {"out": torch.cat(outs), "hidden": torch.cat(grads)}
    tensors |= {name: parameter.grad / dp for name, parameter in layer.named_parameters()}
    return Result(tensors, {n: m.value for n, m in metrics.reduce(ctx).items()}, _state(layer))


def over_ranks(config: MoEConfig, parallel: ParallelConfig, data: Data, change: Change = leave) -> Result:
    """Runs the layer on all ranks and combines the results; gradients are reduced as the optimizer does."""
    return gathered(on_threads(parallel, lambda ctx: on_this_rank(ctx, config, parallel, data, change)), parallel)


def on_this_rank(
    ctx: ParallelContext,
    config: MoEConfig,
    parallel: ParallelConfig,
    data: Data,
    change: Change = leave,
    kernels: Kernels = KERNELS,
    quantizers: LinearQuantizers = NO_QUANTIZERS,
) -> tuple[Any, ...]:
    """Runs the layer on one rank and returns its part of the result, which `gathered` combines with the other parts."""
    layer, metrics = make_layer(config, ctx, change, kernels, quantizers), MetricAccumulator()
    out, hidden, place = forward_backward(layer, ctx, parallel, data, metrics)
    parts = {name: (p.grad.cpu(), p.boxes, p.meta, p.global_shape) for name, p in named_parameters(layer)}
    metrics = {n: m.value for n, m in metrics.reduce(ctx).items()}
    return place, out.detach().cpu(), hidden.grad.cpu() / parallel.cp, parts, metrics, _state(layer)


def forward_backward(
    layer: MoELayer,
    ctx: ParallelContext,
    parallel: ParallelConfig,
    data: Data,
    metrics: MetricAccumulator | None = None,
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Runs forward and backward on this rank's tokens; returns output, input and (dp, cp, tp) coordinates."""
    place = tuple(ctx.group(axis).rank for axis in ("dp", "cp", "tp"))
    hidden, push, _ = data.piece(parallel, *place)
    hidden, push = (part.to(ctx.device, ctx.dtype) for part in (hidden, push))
    hidden = hidden.clone().requires_grad_()
    out = layer(hidden, _mb_on_rank(hidden, ctx, data.valid[place[0]], metrics))
    (out * push).sum().mul(parallel.cp).backward()
    return out, hidden, place


def gathered(results: list[tuple[Any, ...]], parallel: ParallelConfig) -> Result:
    """Combines what `on_this_rank` returned on every rank into one result."""
    results = sorted(results, key=lambda result: result[0])
    tensors = {"out": torch.cat([r[1] for r in results]), "hidden": torch.cat([r[2] for r in results])}
    for name in results[0][3]:
        tensors[name] = _whole_gradient([r[3][name] for r in results], parallel)
    for r in results[1:]:
        assert r[4] == results[0][4], f"ranks report different metrics: {r[4]}, {results[0][4]}"
    states = {n: sum(r[5][n] for r in results) for n in results[0][5]}
    return Result(tensors, results[0][4], states)


def _mb_on_rank(
    hidden: Tensor, ctx: ParallelContext, valid: Tensor | None, metrics: MetricAccumulator | None
) -> MicrobatchContext:
    """Describes the microbatch of one rank.

    The validity mask covers all positions of the context-parallel rank; the router selects those of its tp rank.
    """
    cp = ctx.group("cp")
    if valid is not None:
        valid = valid.chunk(cp.size, dim=1)[cp.rank].to(ctx.device)
    return make_mb(hidden, valid, metrics=metrics, aux_loss_scale=float(cp.size))


def _whole_gradient(parts: list[Any], parallel: ParallelConfig) -> Tensor:
    """Assembles a whole gradient from the shards of all ranks, averaged over dp * cp."""
    _, _, meta, shape = parts[0]
    num_copies = parallel.etp if meta.grid == "expert" else parallel.tp
    if meta.tp_dim is not None or meta.partial_over_tp:
        num_copies = 1
    whole = torch.zeros(shape, dtype=torch.float64)
    for grad, boxes, _, _ in parts:
        piece = torch.zeros(shape, dtype=torch.float64)
        write_shard(piece, grad, boxes, meta)
        whole += piece
    return whole / (parallel.dp * parallel.cp * num_copies)


def _pieces(shape: ParallelConfig, dp: int) -> list[tuple[int, int, int]]:
    return [(d, c, t) for d in range(dp) for c in range(shape.cp) for t in range(shape.tp)]


def _state(layer: MoELayer) -> dict[str, Tensor]:
    router = layer.router
    return {} if router.expert_bias is None else {"tokens_since_update": router.tokens_since_update.cpu().clone()}
