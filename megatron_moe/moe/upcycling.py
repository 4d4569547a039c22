"""Upcycling: initialises an MoE layer from a dense MLP (`--moe-use-upcycling`).

Plain upcycling (arXiv 2212.05055): every expert is a copy of the MLP. Granular upcycling (arXiv 2410.07524): the MLP is
split along its ffn dim into g = dense ffn / expert ffn slices. Experts i * g to i * g + g - 1 form virtual group i and
hold one slice each. Experts of a group get equal logits, so top-k selects whole groups if g divides K.

If each expert of a selected group i has weight p_i, the layer computes MLP(x) * scale * (sum of p_i over these
groups). This is MLP(x) for scale = g / (sum of the token's K weights). The scale is applied to the second matrix,
because a gated activation is not linear in the first.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.moe import MoEConfig, RouterConfig
from megatron_moe.kernels.reference.routing import score


@dataclass(frozen=True)
class Upcycled:
    """Weights of one upcycled MoE layer."""

    weights: dict[str, Tensor]
    """Weights by their name in the layer: router.weight, experts.linear_fc1.weight, ..."""
    inexact: str | None
    """Warning that explains why the layer's output differs from the dense MLP's; None if they are equal up to
    rounding."""


def upcycle(dense: Mapping[str, Tensor], router: Mapping[str, Tensor], config: MoEConfig) -> Upcycled:
    """Converts the weights of a dense MLP into those of the MoE layer `config`. Dtypes do not change.

    `dense`: linear_fc1.weight [g * F, H] (gated: [2 * g * F, H], gate rows first), linear_fc2.weight [H, g * F], and
    biases if the experts have them. F is the expert ffn size, and g the number of slices. `router`: newly initialised
    weight [E, H] and optional bias [E]. Raises CheckpointProblem if names or sizes do not fit.
    """
    granularity = _granularity(dense, config)
    num_experts = config.experts.num_experts
    copies, ffn = num_experts // granularity, config.experts.ffn_hidden_size
    factor = config.experts.activation.fc1_width_factor
    scale = granularity / expected_weight_sum(config.router)
    hidden = config.experts.hidden_size
    first = dense["linear_fc1.weight"].reshape(factor, granularity, ffn, hidden).transpose(0, 1)
    second = dense["linear_fc2.weight"].reshape(hidden, granularity, ffn).transpose(0, 1) * scale
    weights = {
        "experts.linear_fc1.weight": first.flatten(1, 2).repeat(copies, 1, 1),
        "experts.linear_fc2.weight": second.repeat(copies, 1, 1),
    }
    if config.experts.bias:
        first_bias = dense["linear_fc1.bias"].reshape(factor, granularity, ffn).transpose(0, 1).flatten(1, 2)
        weights["experts.linear_fc1.bias"] = first_bias.repeat(copies, 1)
        # the bias is split evenly over the slices
        weights["experts.linear_fc2.bias"] = (dense["linear_fc2.bias"] * (scale / granularity)).repeat(num_experts, 1)
    for name, rows in router.items():
        weights[f"router.{name}"] = rows[:copies].repeat_interleave(granularity, dim=0)
    return Upcycled(weights, inexact_reason(config, granularity))


def expected_weight_sum(router: RouterConfig) -> float:
    """Sum of a token's K probabilities. For probabilities that are not normalised, the sum at zero logits is used."""
    even = router.topk / router.num_experts
    if "sinkhorn" in router.balancing:
        return even if router.topk > 1 else 0.5
    factor = router.scaling_factor or 1.0
    if "expert_choice" in router.balancing or (router.scores.over_experts and router.pre_softmax):
        return factor * even
    if router.scores.over_experts or router.topk > 1:
        return factor
    return factor * score(torch.zeros(1, 1, dtype=torch.float64), router).item()


def inexact_reason(config: MoEConfig, granularity: int) -> str | None:
    """Reason why an upcycled layer's output differs from the dense MLP's by more than rounding; None if it does not."""
    router = config.router
    for kind in ("sinkhorn", "expert_choice"):
        if kind in router.balancing:
            return f"with {kind} the weights of a token do not sum to a constant"
    if router.scores.over_experts and router.pre_softmax:
        return f"with {router.score_function} before top-k the weights of a token do not sum to a constant"
    if not router.scores.over_experts and router.topk == 1:
        return f"with top-1 the {router.score_function} score is not normalised"
    if router.topk % granularity:
        return f"top-{router.topk} does not select whole virtual groups of {granularity} experts"
    if router.group_topk and router.num_groups and router.num_experts // router.num_groups % granularity:
        return f"expert groups of {router.num_experts // router.num_groups} cut virtual groups of {granularity} experts"
    if config.capacity is not None:
        return "the capacity of the experts may drop tokens"
    return None


def _granularity(dense: Mapping[str, Tensor], config: MoEConfig) -> int:
    """Number of slices into which the dense MLP is split. Raises CheckpointProblem if names or sizes do not fit."""
    experts = config.experts
    expected = {"linear_fc1.weight", "linear_fc2.weight"}
    if experts.bias:
        expected |= {"linear_fc1.bias", "linear_fc2.bias"}
    _require(
        config.shared is None and config.latent_size is None,
        "a dense MLP has no weights for shared experts or latent projections; train without them",
    )
    _require(
        dense.keys() == expected,
        f"the dense MLP has {sorted(dense)}, but experts {'with' if experts.bias else 'without'} biases need "
        f"{sorted(expected)}",
    )
    hidden, dense_ffn = dense["linear_fc2.weight"].shape
    shape = tuple(dense["linear_fc1.weight"].shape)
    _require(
        hidden == experts.hidden_size and shape == (experts.activation.fc1_width_factor * dense_ffn, hidden),
        f"dense matrices {shape} and {(hidden, dense_ffn)} do not fit hidden size {experts.hidden_size} with "
        f"{'a gated' if experts.activation.gated else 'a plain'} activation",
    )
    granularity, rest = divmod(dense_ffn, experts.ffn_hidden_size)
    _require(
        granularity > 0 and not rest,
        f"the dense ffn size {dense_ffn} is not a multiple of the expert ffn size {experts.ffn_hidden_size}; choose "
        f"--moe-ffn-hidden-size = --ffn-hidden-size / granularity",
    )
    _require(
        experts.num_experts % granularity == 0,
        f"{experts.num_experts} experts cannot hold whole copies of {granularity} slices; choose a number of experts "
        f"divisible by {granularity}",
    )
    return granularity


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise CheckpointProblem(f"upcycling: {problem}")
