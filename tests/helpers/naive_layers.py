"""Attention, MLA and norms as loops over positions and heads: oracles for tests.

Every value is a list with one vector per position, so that errors of the real modules in a reshape, a mask or a
broadcast cannot be repeated here. Gradients come from autograd.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron_moe.config.attention import AttentionConfig, CoreAttentionConfig, NormConfig
from megatron_moe.config.mla import MLAConfig

Weights = Mapping[str, Tensor]


def norm(x: Tensor, config: NormConfig, weights: Weights, name: str) -> Tensor:
    """Norm of one vector [width]."""
    gamma = weights[f"{name}.weight"] + (1 if config.zero_centered else 0)
    if config.kind == "RMSNorm":
        return x / torch.sqrt((x * x).sum() / len(x) + config.eps) * gamma
    mean = x.sum() / len(x)
    variance = ((x - mean) ** 2).sum() / len(x)
    return (x - mean) / torch.sqrt(variance + config.eps) * gamma + weights[f"{name}.bias"]


def turn(x: Tensor, position: int, config) -> Tensor:
    """Applies RoPE to one head vector: rotates pair i by position * base^(-2i/dim)."""
    out = list(x)
    for i in range(config.dim // 2):
        first, second = (2 * i, 2 * i + 1) if config.interleaved else (i, i + config.dim // 2)
        angle = position * config.base ** (-2 * i / config.dim)
        out[first] = x[first] * math.cos(angle) - x[second] * math.sin(angle)
        out[second] = x[second] * math.cos(angle) + x[first] * math.sin(angle)
    return torch.stack(out)


def attend(
    q: list[Tensor],
    k: list[Tensor],
    v: list[Tensor],
    core: CoreAttentionConfig,
    sink: Tensor | None,
    document: list[int],
) -> list[Tensor]:
    """Attention of one head of one sequence, as lists of vectors over positions."""
    result = []
    for i in range(len(q)):
        left, right = core.window or (-1, -1)
        seen = [
            j
            for j in range(len(k))
            if document[i] == document[j]
            and (j <= i or not core.causal)
            and (left < 0 or i - j <= left)
            and (right < 0 or j - i <= right)
        ]
        weights = [torch.exp((q[i] * k[j]).sum() * core.softmax_scale) for j in seen]
        total = sum(weights) + (torch.exp(sink) if sink is not None else 0) + (1 if core.off_by_one else 0)
        result.append(sum((w / total * v[j] for w, j in zip(weights, seen, strict=True)), torch.zeros_like(v[0])))
    return result


def per_sequence(x_SBH: Tensor, one: Callable[[list[Tensor], int], list[Tensor]]) -> Tensor:
    """Applies `one(vectors over positions, sequence number)` to every sequence."""
    seq, batch, _ = x_SBH.shape
    columns = [torch.stack(one([x_SBH[s, b] for s in range(seq)], b)) for b in range(batch)]
    return torch.stack(columns, dim=1)


def gqa(x_SBH: Tensor, config: AttentionConfig, weights: Weights, positions_BS: Tensor, segments_BS: Tensor) -> Tensor:
    """Grouped-query attention; weights are named as in the module."""
    dim, per_group = config.head_dim, config.num_heads // config.num_query_groups
    group_rows = dim * (per_group * (2 if config.output_gate else 1) + 2)

    def linear(x: Tensor, name: str) -> Tensor:
        return weights[f"{name}.weight"] @ x + weights.get(f"{name}.bias", 0)

    def one(xs: list[Tensor], b: int) -> list[Tensor]:
        mixed = [linear(x, "linear_qkv") for x in xs]
        heads: list[list[Tensor]] = []
        for n in range(config.num_heads):
            group, inside = n // per_group, n % per_group
            start = group * group_rows
            q = [m[start + inside * dim :][:dim] for m in mixed]
            gate = [m[start + (per_group + inside) * dim :][:dim] for m in mixed]
            k = [m[start + group_rows - 2 * dim :][:dim] for m in mixed]
            v = [m[start + group_rows - dim :][:dim] for m in mixed]
            if config.qk_norm == "per_head":
                q = [norm(x, config.norm, weights, "q_layernorm") for x in q]
                k = [norm(x, config.norm, weights, "k_layernorm") for x in k]
            if config.qk_norm == "l2":
                q, k = ([x / torch.sqrt((x * x).sum() / dim + config.norm.eps) for x in xs] for xs in (q, k))
            if config.rope is not None:
                q = [turn(x, int(positions_BS[b, s]), config.rope) for s, x in enumerate(q)]
                k = [turn(x, int(positions_BS[b, s]), config.rope) for s, x in enumerate(k)]
            sink = weights["sinks"][n] if config.core.sinks else None
            out = attend(q, k, v, config.core, sink, segments_BS[b].tolist())
            heads.append([o * torch.sigmoid(g) for o, g in zip(out, gate, strict=True)] if config.output_gate else out)
        return [linear(torch.cat([head[s] for head in heads]), "linear_proj") for s in range(len(xs))]

    return per_sequence(x_SBH, one)


def mla(x_SBH: Tensor, config: MLAConfig, weights: Weights, positions_BS: Tensor, segments_BS: Tensor) -> Tensor:
    """Multi-latent attention; weights are named as in the module."""

    def latent(x: Tensor, name: str) -> Tensor:
        return norm(x, config.norm, weights, name) if config.qk_norm else x

    def query(x: Tensor) -> Tensor:
        if config.q_lora_rank is None:
            return weights["linear_q_proj.weight"] @ x
        return weights["linear_q_up_proj.weight"] @ latent(weights["linear_q_down_proj.weight"] @ x, "q_layernorm")

    def one(xs: list[Tensor], b: int) -> list[Tensor]:
        positions = positions_BS[b].tolist()
        down = [weights["linear_kv_down_proj.weight"] @ x for x in xs]
        up = [weights["linear_kv_up_proj.weight"] @ latent(d[: config.kv_lora_rank], "kv_layernorm") for d in down]
        shared = [turn(d[config.kv_lora_rank :], p, config.rope) for d, p in zip(down, positions, strict=True)]
        nope, heads = config.qk_head_dim, []
        for n in range(config.num_heads):
            q = [query(x)[n * config.q_head_dim :][: config.q_head_dim] for x in xs]
            q = [torch.cat([h[:nope], turn(h[nope:], p, config.rope)]) for h, p in zip(q, positions, strict=True)]
            kv = [u[n * (nope + config.v_head_dim) :][: nope + config.v_head_dim] for u in up]
            k = [torch.cat([h[:nope], s]) for h, s in zip(kv, shared, strict=True)]
            sink = weights["sinks"][n] if config.core.sinks else None
            heads.append(attend(q, k, [h[nope:] for h in kv], config.core, sink, segments_BS[b].tolist()))
        return [weights["linear_proj.weight"] @ torch.cat([head[s] for head in heads]) for s in range(len(xs))]

    return per_sequence(x_SBH, one)
