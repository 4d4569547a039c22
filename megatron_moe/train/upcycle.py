"""Starts an MoE from a dense checkpoint: loads the dense model that it descends from and converts its MLPs."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megatron_moe.checkpoint.load import Source, load
from megatron_moe.checkpoint.shards import SavedTensor, tensor_key
from megatron_moe.kernels.ops import Kernels
from megatron_moe.model.gpt import GPT
from megatron_moe.moe.upcycle import upcycle
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.specs.exitcodes import CheckpointProblem
from megatron_moe.specs.model import ModelSpec
from megatron_moe.specs.moe import MLPSpec, MoESpec


def dense_ancestor(spec: ModelSpec, granularity: int) -> ModelSpec:
    """The dense model an MoE is upcycled from: every MoE layer has one MLP of `granularity` experts' width instead."""

    def mlp(moe: MoESpec) -> MLPSpec:
        experts = moe.experts
        return MLPSpec(
            hidden_size=experts.hidden_size,
            ffn_hidden_size=experts.ffn_hidden_size * granularity,
            activation=experts.activation,
            bias=experts.bias,
        )

    layers = tuple(
        replace(layer, feed_forward=mlp(layer.feed_forward)) if isinstance(layer.feed_forward, MoESpec) else layer
        for layer in spec.layers
    )
    return replace(spec, layers=layers)


@torch.no_grad()
def load_upcycled(
    source: Source,
    granularity: int,
    model: GPT,
    context: ParallelContext,
    kernels: Kernels,
    *,
    say: Callable[[str], None] = print,
) -> None:
    """Fills `model` from a dense checkpoint. Says when the conversion does not keep the function, and why.

    Raises CheckpointProblem when the checkpoint is not that of the dense ancestor.
    """
    if source.is_hugging_face:
        raise CheckpointProblem(
            f"--moe-use-upcycling needs a dense checkpoint of this program, --load {source.location} is a Hugging Face "
            f"folder; give a folder of iter_NNNNNNN"
        )
    dense = GPT(dense_ancestor(model.spec, granularity), context, kernels)
    weights = dict(dense.state_dict())
    wanted = {tensor_key("model", name): SavedTensor.whole(value) for name, value in weights.items()}
    loaded = load(replace(source, optimizer=False), wanted, context, say=say)
    reasons = convert(weights, model)
    say(f"upcycled the dense checkpoint {loaded.path} with granularity {granularity}; training starts at iteration 0")
    for reason in sorted(reasons):
        say(f"warning: the upcycled model does not start with the dense model's function: {reason}")


@torch.no_grad()
def convert(dense: dict[str, Tensor], model: GPT) -> set[str]:
    """Writes dense weights, by name, into an MoE model; the reasons why the function is not kept, if any."""
    targets = dict(model.state_dict())
    reasons = set()
    for prefix, spec in _moe_layers(model.spec):
        mlp = {name.removeprefix(prefix): value for name, value in dense.items() if name.startswith(prefix)}
        router = {
            name.removeprefix(f"{prefix}router."): value
            for name, value in targets.items()
            if name in (f"{prefix}router.weight", f"{prefix}router.bias")
        }
        upcycled = upcycle(mlp, router, spec)
        for name, value in upcycled.weights.items():
            targets[prefix + name].copy_(value)
        if upcycled.inexact is not None:
            reasons.add(upcycled.inexact)
    for name in dense.keys() & targets.keys():
        targets[name].copy_(dense[name])
    return reasons


def _moe_layers(spec: ModelSpec) -> list[tuple[str, MoESpec]]:
    """(name prefix of the feed-forward block, its spec) of every MoE layer, multi-token prediction included."""
    found = [
        (f"decoder.layers.{i}.mlp.", layer.feed_forward)
        for i, layer in enumerate(spec.layers)
        if isinstance(layer.feed_forward, MoESpec)
    ]
    last = spec.layers[-1].feed_forward
    if spec.mtp is not None and isinstance(last, MoESpec):
        count = 1 if spec.mtp.repeated_layer else spec.mtp.num_layers
        found += [(f"mtp.layers.{depth}.transformer_layer.mlp.", last) for depth in range(count)]
    return found
