"""Synthetic parameters in any layout, with partial gradients of every rank and their totals on one rank.

Gradients are multiples of 1/16, so that any order of sums gives the same bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from zlib import crc32

import torch
from torch import Tensor

from megatron_moe.config.optimizer import OptimizerConfig
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig
from megatron_moe.config.param_meta import ParamMeta
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.optim.clip_grads import clip_coefficient, gradient_norms
from megatron_moe.optim.distributed_optimizer import Optimizer
from megatron_moe.optim.grad_buffers import GradBuffers, finish_grads
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import Parameter, local_shard, new_parameter
from tests.helpers.optim_parameters import FP64
from tests.helpers.sharded import Held, whole
from tests.helpers.tolerances import EXACT

NUM_LAYERS = 2
SPEC = OptimizerConfig(adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-6, clip_grad=1.0)

_LAYER = {
    "input_layernorm.weight": ((6,), ParamMeta(role="norm", partial_over_tp=True)),
    "self_attention.linear_qkv.weight": ((16, 6), ParamMeta(role="matrix", tp_dim=0, splits=(2, 1, 1))),
    "self_attention.linear_qkv.bias": ((16,), ParamMeta(role="bias", tp_dim=0, splits=(2, 1, 1))),
    "self_attention.linear_proj.weight": ((6, 8), ParamMeta(role="matrix", tp_dim=1)),
    "mlp.router.weight": ((8, 6), ParamMeta(role="router", partial_over_tp=True)),
    "mlp.latent.weight": ((5, 6), ParamMeta(role="matrix")),
    "mlp.experts.linear_fc1.weight": (
        (8, 8, 6),
        ParamMeta(role="matrix", grid="expert", num_experts=8, tp_dim=0, splits=(4, 4)),
    ),
    "mlp.experts.linear_fc2.weight": ((8, 6, 4), ParamMeta(role="matrix", grid="expert", num_experts=8, tp_dim=1)),
    "mlp.experts.linear_fc2.bias": ((8, 6), ParamMeta(role="bias", grid="expert", num_experts=8, decay=False)),
}
KINDS = {
    "embedding.word_embeddings.weight": ((24, 6), ParamMeta(role="embedding", tp_dim=0, shared_stages=True)),
    **{f"decoder.layers.{i}.{name}": kind for i in range(NUM_LAYERS) for name, kind in _LAYER.items()},
    "decoder.final_layernorm.weight": ((6,), ParamMeta(role="norm", partial_over_tp=True)),
    "output_layer.weight": ((24, 6), ParamMeta(role="head", tp_dim=0)),
}


def stage_names(stage: int, num_stages: int) -> Iterator[str]:
    """Yields the parameter names of a stage: layers divided evenly, the embedding on the first and the last stage."""
    first, last = stage == 0, stage == num_stages - 1
    for name in KINDS:
        if name.startswith("embedding"):
            here = first or last
        elif name.startswith("decoder.layers."):
            here = int(name.split(".")[2]) * num_stages // NUM_LAYERS == stage
        else:
            here = last
        if here:
            yield name


def make_parameters(context: ParallelContext) -> dict[str, Parameter]:
    """Creates this rank's parameters; values depend on the name alone and are exact in bf16."""
    group = context.group("pp")
    parameters = {}
    for name in stage_names(group.rank, group.size):
        shape, meta = KINDS[name]
        parameters[name] = new_parameter(shape, meta, context)
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(crc32(name.encode()))).bfloat16()
        parameters[name].data.copy_(local_shard(whole, parameters[name].boxes, meta))
    return parameters


def _share(name: str, step: int, part: tuple[int, ...]) -> Tensor:
    """Contribution of one rank to a gradient."""
    seed = crc32(f"{name} {step} {part}".encode())
    sixteenths = torch.randint(-64, 65, KINDS[name][0], generator=torch.Generator().manual_seed(seed))
    return sixteenths.double() / 16


def _axes(name: str) -> tuple[str, ...]:
    """Process groups whose ranks compute partial gradients of a parameter."""
    meta = KINDS[name][1]
    axes = ("edp",) if meta.grid == "expert" else ("dp_cp",)
    return axes + (("tp",) if meta.partial_over_tp else ()) + (("embedding",) if meta.shared_stages else ())


def my_gradient(name: str, step: int, parameter: Parameter, context: ParallelContext) -> Tensor:
    """Gradient of this rank's backward passes."""
    part = tuple(context.group(axis).rank for axis in _axes(name))
    return local_shard(_share(name, step, part), parameter.boxes, parameter.meta)


def my_gradients(optimizer: Optimizer, step: int) -> dict[str, Tensor]:
    main_grads, context = optimizer.buffers.main_grads, optimizer.buffers.context
    return {each.name: my_gradient(each.name, step, each.parameter, context) for each in main_grads}


def total_gradient(name: str, step: int, config: ParallelConfig) -> Tensor:
    """Gradient of the global batch: the sum of all contributions over the number of ranks with different tokens."""
    sizes = {"dp_cp": config.dp * config.cp, "edp": config.edp, "tp": config.tp, "embedding": min(config.pp, 2)}
    parts = product(*(range(sizes[axis]) for axis in _axes(name)))
    return sum(_share(name, step, part) for part in parts) / (config.dp * config.cp)


@dataclass
class Run:
    """Results of a few steps on one rank."""

    optimizer: Optimizer
    norms: list[dict[str, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.weights = {
            each.name: Held.of(each.parameter.data, each.parameter) for each in self.optimizer.buffers.main_grads
        }


def make_optimizer(
    context: ParallelContext,
    data_parallel: DataParallelConfig,
    precision: PrecisionConfig = FP64,
    optimizer: OptimizerConfig = SPEC,
) -> Optimizer:
    buffers = GradBuffers(
        make_parameters(context).items(),
        precision,
        context,
        reference.bundle(),
        optimizer=optimizer,
        data_parallel=data_parallel,
    )
    return Optimizer(buffers, precision)


def step_with(
    optimizer: Optimizer, gradients: dict[str, Tensor], *, apply_update: bool = True, clip: float = 1.0
) -> dict[str, Tensor]:
    """Runs one clipped step with the gradients of this rank and returns the norms."""
    buffers = optimizer.buffers
    buffers.begin_step(1)
    for each in buffers.main_grads:
        each.parameter.grad = gradients[each.name].to(each.parameter)
    buffers.collect_autograd_grads()
    finish_grads(buffers, buffers.context)
    norms = gradient_norms(buffers, buffers.context)
    optimizer.step(
        lr=3e-2,
        weight_decay=0.1,
        grad_scale=clip_coefficient(norms["all"], clip),
        apply_update=torch.tensor(apply_update, device=buffers.device),
    )
    return norms


def run(
    context: ParallelContext,
    data_parallel: DataParallelConfig,
    *,
    num_steps: int = 5,
    precision: PrecisionConfig = FP64,
    optimizer: OptimizerConfig = SPEC,
) -> Run:
    """Runs optimizer steps with clipping and weight-decay groups on every rank's own gradients."""
    stepped = make_optimizer(context, data_parallel, precision, optimizer)
    return Run(stepped, [step_with(stepped, my_gradients(stepped, step)) for step in range(num_steps)])


def run_alone(config: ParallelConfig, *, num_steps: int = 5, optimizer: OptimizerConfig = SPEC) -> Run:
    """Runs one rank with the gradients of the whole layout."""
    stepped = make_optimizer(ParallelContext.single(), DataParallelConfig(), optimizer=optimizer)
    norms = [
        step_with(stepped, {name: total_gradient(name, step, config) for name in KINDS}) for step in range(num_steps)
    ]
    return Run(stepped, norms)


def joined(runs: list[Run]) -> dict[str, Tensor]:
    """Joins the shards of all ranks to whole weights; ranks that own the same elements must have equal bits."""
    tensors = whole([each.weights for each in runs], EXACT)
    assert set(tensors) == set(KINDS), f"{set(KINDS) - set(tensors)} are on no rank"
    return tensors
