"""One named parameter of every kind, with gradients, for tests of buffers and optimizer."""

import torch
from torch import Tensor

from megatron_moe.config.param_meta import ParamMeta
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.optim.grad_buffers import GradBuffers
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import Parameter, new_parameter

FP64 = PrecisionConfig(params="fp64", grads="fp64", main_params_dtype="fp64")
BF16 = PrecisionConfig(params="bf16", grads="fp32", main_params_dtype="fp32")
FP32 = PrecisionConfig()

KINDS = {
    "embedding.word_embeddings.weight": ((11, 6), ParamMeta(role="embedding")),
    "decoder.layers.0.input_layernorm.weight": ((6,), ParamMeta(role="norm")),
    "decoder.layers.0.self_attention.linear_qkv.weight": ((18, 6), ParamMeta(role="matrix")),
    "decoder.layers.0.self_attention.linear_qkv.bias": ((18,), ParamMeta(role="bias")),
    "decoder.layers.0.self_attention.q_layernorm.weight": ((3,), ParamMeta(role="norm", decay=False)),
    "decoder.layers.0.mlp.router.weight": ((4, 6), ParamMeta(role="router")),
    "decoder.layers.0.mlp.experts.linear_fc1.weight": (
        (4, 10, 6),
        ParamMeta(role="matrix", grid="expert", num_experts=4),
    ),
    "decoder.layers.0.mlp.experts.linear_fc1.bias": ((4, 10), ParamMeta(role="bias", grid="expert", num_experts=4)),
    "output_layer.weight": ((11, 6), ParamMeta(role="head")),
}
UNDECAYED = (
    "decoder.layers.0.input_layernorm.weight",
    "decoder.layers.0.self_attention.linear_qkv.bias",
    "decoder.layers.0.self_attention.q_layernorm.weight",
    "decoder.layers.0.mlp.experts.linear_fc1.bias",
)


def make_parameters(dtype: torch.dtype = torch.float64, *, seed: int = 0) -> dict[str, Parameter]:
    """One parameter of every kind with values exact in bf16."""
    source = torch.Generator().manual_seed(seed)
    parameters = {}
    for name, (shape, meta) in KINDS.items():
        parameters[name] = new_parameter(shape, meta, ParallelContext.single(dtype=dtype))
        parameters[name].data.copy_(torch.randn(shape, generator=source).bfloat16())
    return parameters


def make_gradients(step: int, *, scale: float = 1.0) -> dict[str, Tensor]:
    """fp64 gradients of all parameters, different in every step."""
    source = torch.Generator().manual_seed(1000 + step)
    return {name: scale * torch.randn(shape, generator=source).double() for name, (shape, _) in KINDS.items()}


def make_buffers(
    parameters: dict[str, Parameter],
    precision: PrecisionConfig = FP64,
    context: ParallelContext | None = None,
    **settings: object,
) -> GradBuffers:
    context = context or ParallelContext.single()
    return GradBuffers(parameters.items(), precision, context, reference.bundle(), **settings)


def set_grads(buffers: GradBuffers, gradients: dict[str, Tensor]) -> None:
    """Writes the gradients of one complete step into the buffers."""
    buffers.begin_step()
    for each in buffers.main_grads:
        each.main_grad.copy_(gradients[each.name])
        each.filled = True


def main_grads(buffers: GradBuffers) -> dict[str, Tensor]:
    """Copies of the accumulated gradients by name."""
    return {each.name: each.main_grad.clone() for each in buffers.main_grads}
