"""Initial values. Each depends on the seed, the parameter's global name and the expert id alone, never on the layout.

Values are drawn on the CPU in fp32 on every device and for every dtype, then copied.
"""

import math

import torch
from torch import Tensor, nn

from megatron_moe.parallel import rng
from megatron_moe.parallel.parameter import Parameter, expert_part, held_experts, local_part
from megatron_moe.specs.model import InitSpec
from megatron_moe.specs.params import ParamMeta

SPREAD = 0.1
"""Of norm weights, biases and expert biases in unit-gain initial values."""


@torch.no_grad()
def init_parameters(model: nn.Module, seed: int, spec: InitSpec) -> None:
    """Fills every parameter of the model, and with unit gain the routers' expert biases, in place."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, Parameter), f"{name} was not made by new_parameter"
        parameter.copy_(_initial_part(parameter, name, seed, spec))
    if spec.method == "unit_gain":
        for name, buffer in model.named_buffers():
            if name.endswith(".expert_bias"):
                buffer.copy_(SPREAD * normal(tuple(buffer.shape), (seed, name)))


def _initial_part(parameter: Parameter, name: str, seed: int, spec: InitSpec) -> Tensor:
    """What this rank holds of the whole parameter. Experts of other ranks are not drawn."""
    shape, meta, boxes = parameter.global_shape, parameter.meta, parameter.boxes
    if meta.num_experts is None:
        return local_part(_draw(shape, meta, (seed, name), spec), boxes, meta)
    held = held_experts(parameter)
    return torch.stack([expert_part(_draw(shape[1:], meta, (seed, name, id), spec), parameter) for id in held])


def _draw(shape: tuple[int, ...], meta: ParamMeta, key: rng.Key, spec: InitSpec) -> Tensor:
    own = meta.init == "embedding" and spec.embedding_std is not None
    if spec.method == "xavier_uniform" and len(shape) == 2 and not own:
        bound = math.sqrt(6 / sum(shape))
        return bound * (2 * torch.rand(shape, generator=rng.generator(key), dtype=torch.float32) - 1)
    mean, std = 1.0 if meta.init == "ones" else 0.0, standard_deviation(meta, spec)
    return torch.full(shape, mean) if std == 0.0 else mean + std * normal(shape, key)


def standard_deviation(meta: ParamMeta, spec: InitSpec) -> float:
    """Of one parameter; 0: it starts as a constant."""
    if spec.method == "unit_gain":
        constant = meta.init in ("zeros", "ones") or meta.role in ("norm", "bias")
        return SPREAD if constant else 1 / math.sqrt(meta.fan_in)
    match meta.init:
        case "normal":
            return spec.std
        case "output":
            return spec.output_std
        case "embedding":
            return spec.std if spec.embedding_std is None else spec.embedding_std
        case "zeros" | "ones":
            return 0.0


def normal(shape: tuple[int, ...], key: rng.Key) -> Tensor:
    """Standard normal numbers, fp32 on the CPU."""
    return torch.randn(shape, generator=rng.generator(key), dtype=torch.float32)
