"""Models on tensor-parallel ranks as threads, and assembly of their shards."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron_moe.config.model import ModelConfig
from megatron_moe.config.optimizer import OptimizerConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.param_meta import ParamBox, ParamMeta
from megatron_moe.config.tp_overlap import OVERLAPPED
from megatron_moe.data.batch import MicroBatch, to_device
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.model.gpt import GPT, training_objective
from megatron_moe.model.init import init_parameters
from megatron_moe.optim.distributed_optimizer import Optimizer
from megatron_moe.optim.grad_buffers import GradBuffers, finish_grads
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import Parameter, named_parameters, write_shard
from megatron_moe.parallel.sequence_shards import PeerShards
from tests.helpers.optim_parameters import FP64
from tests.helpers.ranks import on_threads
from tests.helpers.tiny_models import UNIT_GAIN
from tests.helpers.tolerances import FP64_LAYOUT, Tolerance

KERNELS = reference.bundle()
# Adam normalises gradients; a small eps would amplify gradients that are only rounding errors, as of a bias on k.
STEADY = OptimizerConfig(adam_eps=1e-4)


def tensor_parallel_config(tp: int, *, sequence: bool = False) -> ParallelConfig:
    return ParallelConfig(world_size=tp, tp=tp, sequence_parallel=sequence and tp > 1)


LAYOUTS = {
    f"tp{tp}{'-sp' if sequence else ''}": tensor_parallel_config(tp, sequence=sequence)
    for tp in (2, 4)
    for sequence in (False, True)
}
LAYOUTS |= {f"tp{tp}-sp-overlap": replace(LAYOUTS[f"tp{tp}-sp"], tp_comm_overlap=OVERLAPPED) for tp in (2, 4)}
SEQUENCE_LAYOUTS = {name: config for name, config in LAYOUTS.items() if config.sequence_parallel}


@dataclass
class Held:
    """Shard of a tensor with the shape of a parameter."""

    part: Tensor
    whole: tuple[int, ...]
    boxes: tuple[ParamBox, ...]
    meta: ParamMeta

    @classmethod
    def of(cls, tensor: Tensor, parameter: Parameter) -> "Held":
        part = tensor.detach().clone().cpu()
        return cls(part, parameter.global_shape, parameter.boxes, parameter.meta)


def held(tensors: Iterable[tuple[str, Tensor]], module: nn.Module) -> dict[str, Held]:
    """Shards of tensors of the parameters with these names."""
    parameters = dict(named_parameters(module))
    return {name: Held.of(tensor, parameters[name]) for name, tensor in tensors}


def whole(of_ranks: Sequence[Mapping[str, Held]], same: Tolerance = FP64_LAYOUT) -> dict[str, Tensor]:
    """Assembles tensors from the shards of all ranks. Replicas must be equal, and no element may be missing."""
    tensors: dict[str, Tensor] = {}
    for of_rank in of_ranks:
        for name, mine in of_rank.items():
            joined = tensors.setdefault(name, torch.full(mine.whole, torch.nan, dtype=mine.part.dtype))
            before = joined.clone()
            write_shard(joined, mine.part, mine.boxes, mine.meta)
            copied = before.isfinite() & (before != joined)
            same.check(before[copied], joined[copied], f"{name} on two ranks")
    for name, joined in tensors.items():
        assert joined.isfinite().all(), f"{name}: {int(joined.isnan().sum())} elements are on no rank"
    return tensors


@dataclass
class Trained:
    """Results of a few steps on one rank."""

    losses: list[Tensor]
    gradients: dict[str, Held]
    """Gradients of the first step."""
    weights: dict[str, Held]


def train(
    config: ModelConfig, batches: Sequence[Sequence[MicroBatch]], ctx: ParallelContext, *, seed: int = 7
) -> Trained:
    """Trains with AdamW on `batches` [step][microbatch], without clipping."""
    model = GPT(config, ctx, KERNELS, peers=peers_of(ctx))
    init_parameters(model, seed, config.init)
    buffers = GradBuffers(named_parameters(model), FP64, ctx, KERNELS, optimizer=STEADY)
    optimizer = Optimizer(buffers, FP64)
    trained = Trained([], {}, {})
    for step in batches:
        buffers.begin_step()
        for batch in step:
            batch = to_device(batch, ctx.device)
            scalar, _ = training_objective(model(batch), batch, mtp=config.mtp, per_token=False)
            (scalar / len(step)).backward()
            buffers.collect_autograd_grads()
            trained.losses.append(scalar.detach().cpu())
        finish_grads(buffers, ctx)
        if not trained.gradients:
            trained.gradients = held(((each.name, each.main_grad) for each in buffers.main_grads), model)
        one, yes = (torch.ones((), dtype=dtype, device=ctx.device) for dtype in (torch.float64, torch.bool))
        optimizer.step(lr=1e-2, weight_decay=0.1, grad_scale=one, apply_update=yes)
    trained.weights = held(named_parameters(model), model)
    return trained


def peers_of(ctx: ParallelContext) -> PeerShards | None:
    """Buffers for the shards of tiny models, if the layout overlaps tensor-parallel communication."""
    return PeerShards(2**16, ctx, KERNELS.sum_contributions_) if ctx.config.tp_comm_overlap else None


def check_training(config: ModelConfig, batches: Sequence[Sequence[MicroBatch]], layout: ParallelConfig) -> None:
    """Checks that losses, gradients of the first step and final weights equal those of one rank."""
    check_equal(
        on_threads(layout, lambda ctx: train(config, batches, ctx)), train(config, batches, ParallelContext.single())
    )


def check_equal(ranks: Sequence[Trained], alone: Trained) -> None:
    for rank, trained in enumerate(ranks):
        FP64_LAYOUT.check(torch.stack(trained.losses), torch.stack(alone.losses), f"losses on rank {rank}")
    FP64_LAYOUT.check_all(whole([r.gradients for r in ranks]), whole([alone.gradients]), "gradients")
    FP64_LAYOUT.check_all(whole([r.weights for r in ranks]), whole([alone.weights]), "weights")


def sum_partials(module: nn.Module, ctx: ParallelContext) -> None:
    """Sums partial gradients in `.grad` over tensor-parallel ranks, as `finish_grads` does."""
    for _, parameter in named_parameters(module):
        if parameter.meta.partial_over_tp:
            all_reduce_(parameter.grad, ctx.group("tp"))


@dataclass
class Passed:
    """Results of one forward and backward of a module on one rank."""

    out: Tensor
    grad_x: Tensor
    gradients: dict[str, Held]


def run_module(
    make: Callable[[ParallelContext], nn.Module],
    x: Tensor,
    probe: Tensor,
    ctx: ParallelContext,
    call: Callable[[nn.Module, Tensor], Tensor] = lambda module, x: module(x),
) -> Passed:
    """Runs a module with unit-gain weights forward and backward. `x`, `probe`: the rank's input and output gradient."""
    module = make(ctx)
    init_parameters(module, 5, UNIT_GAIN)
    x = x.clone().requires_grad_()
    out = call(module, x)
    (out * probe).sum().backward()
    sum_partials(module, ctx)
    return Passed(out.detach(), x.grad, held(((name, p.grad) for name, p in module.named_parameters()), module))
