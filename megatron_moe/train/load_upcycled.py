"""Upcycling at load time: initialises an MoE model from a dense checkpoint by converting its MLPs to experts."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from megatron_moe.checkpoint.load import CheckpointSource, load_checkpoint
from megatron_moe.checkpoint.tensor_shards import TensorShard, tensor_key
from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.moe import MoEConfig
from megatron_moe.config.param_meta import sharded_dim
from megatron_moe.model.gpt import GPT
from megatron_moe.moe.upcycling import upcycle
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import Parameter, local_shard, named_parameters


@torch.no_grad()
def load_upcycled(
    source: CheckpointSource,
    granularity: int,
    model: GPT,
    context: ParallelContext,
    *,
    say: Callable[[str], None] = print,
) -> None:
    """Initialises this rank's part of an MoE model from a dense checkpoint.

    Warns if the MoE model computes another function than the dense model. Every rank reads the complete dense MLPs of
    its layers into host memory, but only its own shards of other weights. Raises CheckpointProblem if the checkpoint is
    not of the dense model that corresponds to the MoE model.
    """
    if source.is_hugging_face:
        raise CheckpointProblem(
            f"--moe-use-upcycling needs a dense checkpoint of this program, --load {source.location} is a Hugging Face "
            f"folder; give a folder of iter_NNNNNNN"
        )
    parameters = dict(named_parameters(model))
    layers = dict(_moe_layers(model))
    dense = {prefix: _empty_mlp(config, granularity, context.dtype) for prefix, config in layers.items()}
    wanted = {
        f"{prefix}{name}": TensorShard.whole(value) for prefix, mlp in dense.items() for name, value in mlp.items()
    }
    for name, p in parameters.items():
        if not name.startswith(tuple(layers)):
            part = p.detach().view(-1)
            wanted[name] = TensorShard.part(p.global_shape, p.boxes, sharded_dim(p.meta) or 0, part)
    tensors = {tensor_key("model", name): tensor for name, tensor in wanted.items()}
    loaded = load_checkpoint(replace(source, optimizer=False), tensors, context, say=say)
    reasons = {_convert(dense[prefix], config, _below(prefix, parameters)) for prefix, config in layers.items()}
    say(f"upcycled the dense checkpoint {loaded.path} with granularity {granularity}; training starts at iteration 0")
    for reason in sorted(reason for reason in reasons if reason is not None):
        say(f"warning: the upcycled model does not start with the dense model's function: {reason}")


def _convert(dense: Mapping[str, Tensor], config: MoEConfig, layer: Mapping[str, Parameter]) -> str | None:
    """Converts a dense MLP to this rank's part `layer` of an MoE layer. Returns why their outputs differ, or None."""
    upcycled = upcycle(dense, _below("router.", layer), config)
    for name, value in upcycled.weights.items():
        parameter = layer[name]
        parameter.copy_(local_shard(value, parameter.boxes, parameter.meta))
    return upcycled.inexact


def _below(prefix: str, parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    return {name.removeprefix(prefix): p for name, p in parameters.items() if name.startswith(prefix)}


def _empty_mlp(moe: MoEConfig, granularity: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Uninitialised host tensors by name, for an unsharded dense MLP that will be converted to the experts of `moe`."""
    experts = moe.experts
    hidden, ffn = experts.hidden_size, experts.ffn_hidden_size * granularity
    first = ffn * experts.activation.fc1_width_factor
    shapes: dict[str, tuple[int, ...]] = {"linear_fc1.weight": (first, hidden), "linear_fc2.weight": (hidden, ffn)}
    if experts.bias:
        shapes |= {"linear_fc1.bias": (first,), "linear_fc2.bias": (hidden,)}
    return {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}


def _moe_layers(model: GPT) -> Iterator[tuple[str, MoEConfig]]:
    """Yields (name prefix, config) of every MoE layer on this rank, MTP layers included."""
    config = model.config
    for layer in sorted(index for chunk in model.chunks for index in chunk.layers):
        moe = config.layers[layer].moe
        if moe is not None:
            yield f"decoder.layers.{layer}.mlp.", moe
    last = config.mtp_layer.moe
    if model.mtp is not None and last is not None:
        for depth in range(model.mtp.num_layers):
            yield f"mtp.layers.{depth}.transformer_layer.mlp.", last
