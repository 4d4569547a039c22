"""Parameter initialisation. Values depend only on the seed, the parameter's global name and the expert id.

All values are drawn in fp32 as whole tensors, so they do not depend on layout or dtype. Values drawn on a GPU differ
from those drawn on the CPU.
"""

import math
from types import MappingProxyType

import torch
from torch import Tensor, nn

from megatron_moe.config.model import InitConfig
from megatron_moe.config.param_meta import ParamMeta
from megatron_moe.parallel import rng
from megatron_moe.parallel.parameter import Parameter, local_expert_ids, local_shard, local_shard_of_expert

Device = torch.device | str

SPREAD = 0.1
"""Standard deviation of norm weights, biases and routers' expert biases in unit-gain initialisation."""
_CONSTANTS = ("zeros", "ones", "constant")


def _time_step(drawn: Tensor) -> Tensor:
    """Inverse softplus of time steps between 0.001 and 0.1, as in Mamba."""
    step = (math.log(1e-3) + drawn * (math.log(1e-1) - math.log(1e-3))).exp()
    return step + (-torch.expm1(-step)).log()


_UNIFORM = MappingProxyType(
    {
        "uniform": lambda drawn: 2 * drawn - 1,
        "decay_rate": lambda drawn: (1 + 15 * drawn).log(),
        "time_step": _time_step,
    }
)
"""Maps `ParamMeta.init` to a function of uniform random numbers in [0, 1); its result is divided by sqrt(fan_in)."""


@torch.no_grad()
def init_parameters(model: nn.Module, seed: int, config: InitConfig, device: Device = "cpu") -> None:
    """Initialises all parameters in place, except those without memory, with values drawn on `device`. Unit-gain
    initialisation also sets the expert biases of the routers."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, Parameter), f"{name} was not created by new_parameter"
        if not parameter.is_meta:
            parameter.copy_(initial_shard(parameter, name, seed, config, device))
    if config.method == "unit_gain":
        for name, buffer in model.named_buffers():
            if name.endswith(".expert_bias"):
                buffer.copy_(SPREAD * normal(tuple(buffer.shape), (seed, name), device))


def initial_shard(parameter: Parameter, name: str, seed: int, config: InitConfig, device: Device) -> Tensor:
    """Draws the initial values of this rank's shard of a parameter. No values are drawn for experts of other ranks."""
    shape, meta, boxes = parameter.global_shape, parameter.meta, parameter.boxes
    if meta.num_experts is None:
        return local_shard(_draw(shape, meta, (seed, name), config, device), boxes, meta)
    experts = [_draw(shape[1:], meta, (seed, name, id), config, device) for id in local_expert_ids(parameter)]
    return torch.stack([local_shard_of_expert(expert, parameter) for expert in experts])


def _draw(shape: tuple[int, ...], meta: ParamMeta, key: rng.Key, config: InitConfig, device: Device) -> Tensor:
    if meta.init in _UNIFORM:
        drawn = torch.rand(shape, generator=rng.generator(key, device), dtype=torch.float32, device=device)
        return _UNIFORM[meta.init](drawn) / math.sqrt(meta.fan_in)
    own = meta.init == "embedding" and config.embedding_std is not None
    if config.method == "xavier_uniform" and len(shape) == 2 and not own:
        bound = math.sqrt(6 / sum(shape))
        drawn = torch.rand(shape, generator=rng.generator(key, device), dtype=torch.float32, device=device)
        return bound * (2 * drawn - 1)
    mean, std = 1.0 if meta.init == "ones" else meta.constant, standard_deviation(meta, config)
    return torch.full(shape, mean, device=device) if std == 0.0 else mean + std * normal(shape, key, device)


def standard_deviation(meta: ParamMeta, config: InitConfig) -> float:
    """Standard deviation of the initial values of a parameter; 0 if all its values are equal."""
    if config.method == "unit_gain":
        constant = meta.init in _CONSTANTS or meta.role in ("norm", "bias")
        return SPREAD if constant else 1 / math.sqrt(meta.fan_in)
    embedding_std = config.std if config.embedding_std is None else config.embedding_std
    stds = {"normal": config.std, "output": config.output_std, "embedding": embedding_std}
    return 0.0 if meta.init in _CONSTANTS else stds[meta.init]


def normal(shape: tuple[int, ...], key: rng.Key, device: Device) -> Tensor:
    """Draws standard normal values in fp32."""
    return torch.randn(shape, generator=rng.generator(key, device), dtype=torch.float32, device=device)
