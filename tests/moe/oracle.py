"""Loop oracle of the MoE layer: computes one token and one expert at a time.

The oracle is written from the formulas and shares only the configs with `megatron_moe`. All values are torch scalars or
small vectors, so that autograd computes the gradients.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.config.moe import CapacityConfig, MoEConfig, RouterConfig


@dataclass
class LoopResult:
    """Output, routing and losses of an MoE layer for one microbatch."""

    output_SBH: Tensor
    choices: list[list[int]]
    """Experts of every token (t = s * B + b) in descending order of score, before drops; empty for padding."""
    assignments: list[list[tuple[int, Tensor]]]
    """For every token, the (expert, routing weight) pairs that remain after drops."""
    counts: list[int]
    losses: dict[str, Tensor] = field(default_factory=dict)
    """Losses before multiplication by their coefficients; keys are the names in the log."""
    objective: Tensor | None = None
    """Sum of coefficient * loss over all balancing losses, which is added to the training objective."""


def loop_moe(config: MoEConfig, weights: dict[str, Tensor], hidden_SBH: Tensor, valid_BS: Tensor | None) -> LoopResult:
    """Runs the layer on one training microbatch. Keys of `weights` are parameter names relative to the layer."""
    num_steps, batch, _ = hidden_SBH.shape
    tokens = [hidden_SBH[s, b] for s in range(num_steps) for b in range(batch)]
    sequence_of = [b for _ in range(num_steps) for b in range(batch)]
    real = [valid_BS is None or bool(valid_BS[b, s]) for s in range(num_steps) for b in range(batch)]
    logits = [loop_logits(token, weights) for token in tokens]

    bias = [float(x) for x in weights.get("router.expert_bias", torch.zeros(config.router.num_experts))]
    assignments: list[list[tuple[int, Tensor]]] = []
    for t in range(len(tokens)):
        assignments.append(loop_choose(logits[t], bias, config.router) if real[t] else [])
    choices = [[expert for expert, _ in assigned] for assigned in assignments]
    if config.capacity is not None:
        assignments = loop_drop(assignments, config.router, config.capacity)

    outputs = []
    for t, token in enumerate(tokens):
        out = torch.zeros_like(token)
        for expert, weight in assignments[t]:
            out = out + weight * loop_expert(token, expert, config, weights)
        if config.shared is not None:
            out = out + loop_shared(token, config, weights)
        outputs.append(out)

    chosen = [expert for assigned in assignments for expert, _ in assigned]
    counts = [chosen.count(expert) for expert in range(config.router.num_experts)]
    result = LoopResult(torch.stack(outputs).view_as(hidden_SBH), choices, assignments, counts)
    loop_losses(
        result,
        [x for x, r in zip(logits, real, strict=True) if r],
        [b for b, r in zip(sequence_of, real, strict=True) if r],
        config.router,
    )
    return result


def loop_logits(token_H: Tensor, weights: dict[str, Tensor]) -> list[Tensor]:
    rows = weights["router.weight"]
    logits = [(rows[e] * token_H).sum() for e in range(len(rows))]
    if "router.bias" in weights:
        logits = [logit + weights["router.bias"][e] for e, logit in enumerate(logits)]
    return logits


# expert selection


def loop_scores(logits: list[Tensor], score_function: str) -> list[Tensor]:
    match score_function:
        case "softmax" | "renormalized_softmax":
            total = sum(torch.exp(x) for x in logits)
            return [torch.exp(x) / total for x in logits]
        case "sigmoid":
            return [1 / (1 + torch.exp(-x)) for x in logits]
        case "sqrtsoftplus":
            return [torch.sqrt(torch.log(1 + torch.exp(x))) for x in logits]
    raise AssertionError(score_function)


def number(value: Tensor) -> float:
    return value.detach().item()


def best(values: list[float], k: int, among: list[int]) -> list[int]:
    """Returns the k indices of `among` with the largest values; the lower index wins a tie."""
    return sorted(among, key=lambda i: (-values[i], i))[:k]


def loop_choose(logits: list[Tensor], bias: list[float], config: RouterConfig) -> list[tuple[int, Tensor]]:
    """Selects the experts of one token; returns (expert id, routing weight) for each."""
    k, everyone = config.topk, list(range(config.num_experts))
    softmax_last = config.score_function == "softmax" and not config.pre_softmax
    scores = logits if softmax_last else loop_scores(logits, config.score_function)
    merit = [number(score) + b for score, b in zip(scores, bias, strict=True)]
    if config.group_topk:
        size = config.num_experts // config.num_groups
        groups = [everyone[g * size : (g + 1) * size] for g in range(config.num_groups)]
        worth = [sum(merit[e] for e in best(merit, k // config.group_topk, group)) for group in groups]
        everyone = [e for g in best(worth, config.group_topk, list(range(config.num_groups))) for e in groups[g]]
    ids = best(merit, k, everyone)
    if softmax_last:
        weights = loop_scores([logits[e] for e in ids], "softmax")
    else:
        weights = [scores[e] for e in ids]
        if config.score_function != "softmax" and k > 1:
            total = sum(weights)
            weights = [weight / total for weight in weights]
    factor = config.scaling_factor or 1.0
    return [(e, weight * factor) for e, weight in zip(ids, weights, strict=True)]


def loop_drop(
    assignments: list[list[tuple[int, Tensor]]], config: RouterConfig, capacity: CapacityConfig
) -> list[list[tuple[int, Tensor]]]:
    """Drops tokens beyond the capacity ceil(T k / E * factor) of each expert.

    Policy "probs" keeps the tokens with the highest weight, policy "position" the first ones.
    """
    limit = math.ceil(len(assignments) * config.topk / config.num_experts * capacity.factor)
    kept: set[tuple[int, int]] = set()
    for expert in range(config.num_experts):
        askers = [(t, number(w)) for t, assigned in enumerate(assignments) for e, w in assigned if e == expert]
        if capacity.policy == "probs":
            askers.sort(key=lambda asker: (-asker[1], asker[0]))
        kept |= {(t, expert) for t, _ in askers[:limit]}
    return [[(e, w) for e, w in assigned if (t, e) in kept] for t, assigned in enumerate(assignments)]


# experts


def loop_expert(token_H: Tensor, expert: int, config: MoEConfig, weights: dict[str, Tensor]) -> Tensor:
    names = ("experts.linear_fc1", "experts.linear_fc2")
    matrices = [weights[f"{name}.weight"][expert] for name in names]
    biases = [weights[f"{name}.bias"][expert] if f"{name}.bias" in weights else None for name in names]
    return loop_mlp(token_H, matrices, biases, config.experts.activation)


def loop_shared(token_H: Tensor, config: MoEConfig, weights: dict[str, Tensor]) -> Tensor:
    matrices = [weights["shared_experts.linear_fc1.weight"], weights["shared_experts.linear_fc2.weight"]]
    out = loop_mlp(token_H, matrices, [None, None], config.shared.mlp.activation)
    if config.shared.gate:
        out = out / (1 + torch.exp(-(weights["shared_experts.gate_weight"][0] * token_H).sum()))
    return out


ACTIVATIONS = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "squared_relu": lambda x: torch.where(x > 0, x * x, torch.zeros_like(x)),
}


def loop_mlp(
    token_H: Tensor, matrices: list[Tensor], biases: list[Tensor | None], activation: ActivationConfig
) -> Tensor:
    wide = matrices[0] @ token_H
    if biases[0] is not None:
        wide = wide + biases[0]
    act = ACTIVATIONS[activation.kind]
    if activation.gated:
        half = len(wide) // 2
        gate, up = wide[:half], wide[half:]
        if activation.clamp is not None:
            gate, up = gate.clamp(max=activation.clamp), up.clamp(min=-activation.clamp, max=activation.clamp)
        inner = act(gate) * (up + activation.linear_offset)
    else:
        inner = act(wide)
    out = matrices[1] @ inner
    return out if biases[1] is None else out + biases[1]


# losses


def loop_losses(result: LoopResult, logits: list[list[Tensor]], sequence_of: list[int], config: RouterConfig) -> None:
    """Sets the losses and the objective of `result`, computed over the valid tokens.

    A balancing loss over N tokens is L = E / (k N^2) sum_e C_e P_e. C_e is the number of tokens whose k best scores
    include expert e, and P_e is the sum of the scores of expert e over all tokens, normalised to sum to 1 per token.
    """
    num_experts, k = config.num_experts, config.topk
    scores = []
    for token in logits:
        raw = loop_scores(token, config.score_function)
        total = sum(raw)
        scores.append([score / total for score in raw])

    def loss_over(tokens: list[int]) -> Tensor:
        picked = [best([number(x) for x in scores[t]], k, list(range(num_experts))) for t in tokens]
        total = torch.zeros((), dtype=torch.float64)
        for e in range(num_experts):
            count = sum(e in ids for ids in picked)
            total = total + count * sum(scores[t][e] for t in tokens)
        return num_experts / (k * len(tokens) ** 2) * total

    everyone = list(range(len(scores)))
    sequences = sorted(set(sequence_of))
    objective = torch.zeros((), dtype=torch.float64)
    for kind, coeff in zip(config.balancing, config.aux_loss_coeffs, strict=True):
        if kind == "none" or not coeff:
            continue
        if kind == "seq_aux_loss":
            parts = [loss_over([t for t in everyone if sequence_of[t] == b]) for b in sequences]
            name, loss = "seq_load_balancing_loss", sum(parts) / len(parts)
        else:
            # On one rank with one microbatch, the global batch equals the microbatch.
            name = "load_balancing_loss" if kind == "aux_loss" else "global_load_balancing_loss"
            loss = loss_over(everyone)
        result.losses[name] = loss
        objective = objective + coeff * loss
    if config.z_loss_coeff:
        squares = [torch.log(sum(torch.exp(x) for x in token)) ** 2 for token in logits]
        result.losses["z_loss"] = sum(squares) / len(squares)
        objective = objective + config.z_loss_coeff * result.losses["z_loss"]
    result.objective = objective
