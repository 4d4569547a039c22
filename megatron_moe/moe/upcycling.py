"""Upcycling: weights of an MoE layer from those of a dense MLP, so that training continues from the dense model.

Plain (arXiv 2212.05055): every expert is a copy of the MLP. Granular (arXiv 2410.07524): the MLP is cut along its ffn
width into g slices, g = dense ffn / expert ffn. Experts i * g ... i * g + g - 1 hold the g slices and form virtual
group i, one whole MLP; the router gives them equal logits, so that top-k takes whole groups when g divides K.

With p_i the weight of every expert of group i, the layer computes sum_i p_i * scale * MLP(x), which is MLP(x) for
scale = g / (sum of a token's K weights). The whole scale goes on the second matrix: a gated activation is not linear in
the first one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.moe import MoEConfig, RouterConfig


@dataclass(frozen=True)
class Upcycled:
    """Weights of one MoE layer, and whether they compute what the dense MLP computed."""

    weights: dict[str, Tensor]
    """Weights by name inside the layer: router.weight, experts.linear_fc1.weight, ..."""
    inexact: str | None
    """Why the layer's output is not the dense MLP's, for a warning; None: it is, up to rounding."""


def upcycle(dense: Mapping[str, Tensor], router: Mapping[str, Tensor], config: MoEConfig) -> Upcycled:
    """Turns a dense MLP into the MoE layer of `spec`.

    dense: linear_fc1.weight [fan * g * F, H] (gate rows first), linear_fc2.weight [H, g * F], and their biases if the
    experts have some. router: freshly drawn weight [E, H] and optional bias [E]. Dtypes stay. Raises CheckpointProblem
    when the sizes do not fit.
    """
    granularity = _granularity(dense, config)
    num_experts = config.experts.num_experts
    copies, fan, ffn = num_experts // granularity, config.experts.activation.fan, config.experts.ffn_hidden_size
    scale = granularity / expected_weight_sum(config.router)
    hidden = config.experts.hidden_size
    first = dense["linear_fc1.weight"].reshape(fan, granularity, ffn, hidden).transpose(0, 1)
    second = dense["linear_fc2.weight"].reshape(hidden, granularity, ffn).transpose(0, 1) * scale
    weights = {
        "experts.linear_fc1.weight": first.flatten(1, 2).repeat(copies, 1, 1),
        "experts.linear_fc2.weight": second.repeat(copies, 1, 1),
    }
    if config.experts.bias:
        first_bias = dense["linear_fc1.bias"].reshape(fan, granularity, ffn).transpose(0, 1).flatten(1, 2)
        weights["experts.linear_fc1.bias"] = first_bias.repeat(copies, 1)
        # every slice brings its part of the one bias
        weights["experts.linear_fc2.bias"] = (dense["linear_fc2.bias"] * (scale / granularity)).repeat(num_experts, 1)
    for name, rows in router.items():
        weights[f"router.{name}"] = rows[:copies].repeat_interleave(granularity, dim=0)
    return Upcycled(weights, inexact_reason(config, granularity))


def expected_weight_sum(router: RouterConfig) -> float:
    """Sum of the weights of a token's K choices: a constant where they are normalised, else its value for a token whose
    logits are all 0."""
    even = router.topk / router.num_experts
    if "sinkhorn" in router.balancing:
        return even if router.topk > 1 else 0.5
    factor = router.scaling_factor or 1.0
    if "expert_choice" in router.balancing or (router.score_function == "softmax" and router.pre_softmax):
        return factor * even
    if router.score_function == "softmax" or router.topk > 1:
        return factor
    return factor * (0.5 if router.score_function == "sigmoid" else math.sqrt(math.log(2)))


def inexact_reason(config: MoEConfig, granularity: int) -> str | None:
    """Why an upcycled layer does not compute what the dense MLP computed; None: it does."""
    router = config.router
    for kind in ("sinkhorn", "expert_choice"):
        if kind in router.balancing:
            return f"with {kind} the weights of a token do not sum to a constant"
    if router.score_function == "softmax" and router.pre_softmax:
        return "with softmax before top-k the weights of a token do not sum to a constant"
    if router.score_function != "softmax" and router.topk == 1:
        return f"with top-1 the {router.score_function} score is not normalised"
    if router.topk % granularity:
        return f"top-{router.topk} does not take whole virtual groups of {granularity} experts"
    if router.group_topk and router.num_groups and router.num_experts // router.num_groups % granularity:
        return f"expert groups of {router.num_experts // router.num_groups} cut virtual groups of {granularity} experts"
    if config.capacity is not None:
        return "the capacity of the experts may drop tokens"
    return None


def _granularity(dense: Mapping[str, Tensor], config: MoEConfig) -> int:
    """Slices per dense MLP, after checking every size."""
    experts = config.experts
    if config.shared is not None or config.latent_size is not None:
        raise CheckpointProblem(
            "upcycling: a dense MLP has no weights for shared experts or latent projections; train without them"
        )
    expected = {"linear_fc1.weight", "linear_fc2.weight"}
    if experts.bias:
        expected |= {"linear_fc1.bias", "linear_fc2.bias"}
    if dense.keys() != expected:
        raise CheckpointProblem(
            f"upcycling: the dense MLP has {sorted(dense)}, but experts {'with' if experts.bias else 'without'} biases "
            f"need {sorted(expected)}"
        )
    hidden, dense_ffn = dense["linear_fc2.weight"].shape
    wide = experts.activation.fan * dense_ffn
    if hidden != experts.hidden_size or dense["linear_fc1.weight"].shape != (wide, hidden):
        raise CheckpointProblem(
            f"upcycling: dense matrices {tuple(dense['linear_fc1.weight'].shape)} and {(hidden, dense_ffn)} do not fit "
            f"hidden size {experts.hidden_size} with {'a gated' if experts.activation.gated else 'a plain'} activation"
        )
    granularity, rest = divmod(dense_ffn, experts.ffn_hidden_size)
    if rest or granularity == 0:
        raise CheckpointProblem(
            f"upcycling: the dense ffn size {dense_ffn} is not a multiple of the expert ffn size "
            f"{experts.ffn_hidden_size}; choose --moe-ffn-hidden-size = --ffn-hidden-size / granularity"
        )
    if experts.num_experts % granularity:
        raise CheckpointProblem(
            f"upcycling: {experts.num_experts} experts cannot hold whole copies of {granularity} slices; "
            f"choose a number of experts divisible by {granularity}"
        )
    return granularity
