"""Splits the QKV projection's output into queries, keys and values, and applies head norms and RoPE, in one pass.

Forward reads the heads from the rows of the projection's output. Backward writes gradients in the same row layout.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends.triton.launch import cdiv, num_sms, power_of_two, weight_grad
from megatron_moe.kernels.ops import QueryKeyTransform
from megatron_moe.parallel.autograd_function import AutogradFunction

TILE = 2048
"""Maximum elements in a tile of queries or keys."""
BACKWARD_PROGRAMS = 6
"""Backward programs per SM."""


def query_key_value(
    qkv_SBGC: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, transform: QueryKeyTransform
) -> tuple[Tensor, Tensor, Tensor]:
    # tiles are padded with heads of zeros, whose norm must be finite
    eps = max(transform.eps, torch.finfo(torch.float32).tiny)
    transform = transform._replace(
        eps=eps, cos_SBD=transform.cos_SBD.contiguous(), sin_SBD=transform.sin_SBD.contiguous()
    )
    q, k, v = _QueryKeyValue.apply(qkv_SBGC, q_weight, k_weight, transform)
    return q, k, v


class _QueryKeyValue(AutogradFunction):
    @staticmethod
    def forward(
        ctx: Any, qkv_SBGC: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, transform: QueryKeyTransform
    ) -> tuple[Tensor, Tensor, Tensor]:
        eps, zero_centered, cos_SBD, sin_SBD, interleaved, heads_per_group = transform
        qkv_SBGC = qkv_SBGC.contiguous()
        length, batch, groups, width = qkv_SBGC.shape
        width //= heads_per_group + 2
        q_SBND = qkv_SBGC.new_empty(length, batch, groups * heads_per_group, width)
        k_SBGD = qkv_SBGC.new_empty(length, batch, groups, width)
        normed = q_weight is not None
        if qkv_SBGC.numel():
            _qkv_forward[(length * batch,)](
                qkv_SBGC, q_weight if normed else cos_SBD, k_weight if normed else cos_SBD, cos_SBD, sin_SBD, q_SBND,
                k_SBGD, batch, groups, heads_per_group, width, cos_SBD.shape[-1], eps, cos_SBD.stride(0),
                0 if cos_SBD.shape[1] == 1 else cos_SBD.stride(1),
                NORMED=normed, ZERO_CENTERED=zero_centered, INTERLEAVED=interleaved,
                **_tiles(groups, heads_per_group, width, cos_SBD.shape[-1]),
            )  # fmt: skip
        ctx.save_for_backward(qkv_SBGC, cos_SBD, sin_SBD)
        ctx.weights = q_weight, k_weight
        ctx.settings = (eps, zero_centered, interleaved, heads_per_group)
        return q_SBND, k_SBGD, qkv_SBGC[..., -width:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv_SBGC, cos_SBD, sin_SBD = ctx.saved_tensors
        q_weight, k_weight = ctx.weights
        eps, zero_centered, interleaved, heads_per_group = ctx.settings
        grad_q, grad_k, grad_v = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        length, batch, groups, width = qkv_SBGC.shape
        width //= heads_per_group + 2
        normed = q_weight is not None
        grad_qkv = torch.empty_like(qkv_SBGC)
        # each program writes partial weight gradients of its tokens; these are added in a fixed order
        sizes = _tiles(groups, heads_per_group, width, cos_SBD.shape[-1])
        tiles = cdiv(groups * heads_per_group, sizes["HEADS"]) + cdiv(groups, sizes["GROUPS"])
        num_programs = min(length * batch, cdiv(BACKWARD_PROGRAMS * num_sms(qkv_SBGC.device), tiles))
        partials_P2D = qkv_SBGC.new_empty(num_programs * tiles, 2, width, dtype=torch.float32)
        if qkv_SBGC.numel():
            _qkv_backward[(num_programs, tiles)](
                grad_q, grad_k, grad_v, qkv_SBGC, q_weight if normed else cos_SBD, k_weight if normed else cos_SBD,
                cos_SBD, sin_SBD, grad_qkv, partials_P2D, length * batch, batch, groups, heads_per_group, width,
                cos_SBD.shape[-1], eps, *grad_q.stride()[:3], *grad_k.stride()[:3], *grad_v.stride()[:3],
                cos_SBD.stride(0), 0 if cos_SBD.shape[1] == 1 else cos_SBD.stride(1),
                NORMED=normed, ZERO_CENTERED=zero_centered, INTERLEAVED=interleaved, WIDTH=power_of_two(width), **sizes,
            )  # fmt: skip
        if not normed:
            return grad_qkv, None, None, None
        grad_weights = (weight_grad(partials_P2D[:, i], weight) for i, weight in enumerate(ctx.weights))
        return grad_qkv, *grad_weights, None


def _tiles(groups: int, heads_per_group: int, width: int, rotary_dim: int) -> dict[str, Any]:
    """Tile sizes, as powers of two: PAIRS (rotated pairs of dims), REST (other dims), HEADS (query), GROUPS (key)."""
    pairs, rest = power_of_two(rotary_dim // 2), power_of_two(width - rotary_dim)
    most = max(TILE // power_of_two(2 * pairs + (rest if rotary_dim < width else 0)), 1)
    heads, keys = min(power_of_two(groups * heads_per_group), most), min(power_of_two(groups), most)
    return {"PAIRS": pairs, "REST": rest, "HAS_REST": rotary_dim < width, "HEADS": heads, "GROUPS": keys}


@triton.jit
def _factor(weight_ptr, dims, mask, ZERO_CENTERED: tl.constexpr):
    weight = tl.load(weight_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    return weight[None, :]


@triton.jit
def _pairs_of(rotary_dim, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Returns the dims that RoPE rotates together: (first dim of every pair, second dim of every pair, mask of valid
    pairs)."""
    pairs = tl.arange(0, PAIRS)
    half = rotary_dim // 2
    if INTERLEAVED:
        return 2 * pairs, 2 * pairs + 1, pairs < half
    else:
        return pairs, pairs + half, pairs < half


@triton.jit
def _position(token, batch):
    """Returns a token's (position in the sequence, index in the batch). 32-bit division is much faster than 64-bit."""
    return (token // batch).to(tl.int64), (token % batch).to(tl.int64)


@triton.jit
def _angles(cos_ptr, sin_ptr, offsets, mask, PAIRS: tl.constexpr):
    offsets += tl.arange(0, PAIRS)
    cos = tl.load(cos_ptr + offsets, mask=mask, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + offsets, mask=mask, other=0.0).to(tl.float32)[None, :]
    return cos, sin


@triton.jit
def _norm_rope(
    from_ptr, to_ptr, weight_ptr, valid, cos, sin, width, rotary_dim, eps, NORMED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_REST: tl.constexpr,
    PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Applies norm and RoPE to the heads at `from_ptr` [heads, 1] and writes the results to `to_ptr` [heads, 1]."""
    first, second, paired = _pairs_of(rotary_dim, PAIRS, INTERLEAVED)
    rest = rotary_dim + tl.arange(0, REST)
    pair_mask, rest_mask = valid & paired[None, :], valid & (rest < width)[None, :]
    x1 = tl.load(from_ptr + first[None, :], mask=pair_mask, other=0.0).to(tl.float32)
    x2 = tl.load(from_ptr + second[None, :], mask=pair_mask, other=0.0).to(tl.float32)
    if HAS_REST:
        x3 = tl.load(from_ptr + rest[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(x1 * x1 + x2 * x2, axis=1)
        if HAS_REST:
            squares += tl.sum(x3 * x3, axis=1)
        scale = (1.0 / tl.sqrt(squares / width + eps))[:, None]
        x1 = x1 * scale * _factor(weight_ptr, first, paired, ZERO_CENTERED)
        x2 = x2 * scale * _factor(weight_ptr, second, paired, ZERO_CENTERED)
        if HAS_REST:
            x3 = x3 * scale * _factor(weight_ptr, rest, rest < width, ZERO_CENTERED)
    tl.store(to_ptr + first[None, :], (x1 * cos - x2 * sin).to(to_ptr.dtype.element_ty), mask=pair_mask)
    tl.store(to_ptr + second[None, :], (x2 * cos + x1 * sin).to(to_ptr.dtype.element_ty), mask=pair_mask)
    if HAS_REST:
        tl.store(to_ptr + rest[None, :], x3.to(to_ptr.dtype.element_ty), mask=rest_mask)


@triton.jit
def _qkv_forward(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, batch, num_groups, heads_per_group, width,
    rotary_dim, eps, angle_s, angle_b,
    NORMED: tl.constexpr, ZERO_CENTERED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_REST: tl.constexpr,
    PAIRS: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    s, b = _position(tl.program_id(0), batch)
    paired = tl.arange(0, PAIRS) < rotary_dim // 2
    cos, sin = _angles(cos_ptr, sin_ptr, s * angle_s + b * angle_b, paired, PAIRS)
    num_heads, group_width = num_groups * heads_per_group, (heads_per_group + 2) * width
    from_ptr = qkv_ptr + token * num_groups * group_width
    for start in range(0, num_heads, HEADS):
        heads = (start + tl.arange(0, HEADS))[:, None]
        offsets = heads // heads_per_group * group_width + heads % heads_per_group * width
        _norm_rope(
            from_ptr + offsets, q_ptr + (token * num_heads + heads) * width, q_weight_ptr, heads < num_heads, cos, sin,
            width, rotary_dim, eps, NORMED, ZERO_CENTERED, INTERLEAVED, HAS_REST, PAIRS, REST,
        )  # fmt: skip
    for start in range(0, num_groups, GROUPS):
        groups = (start + tl.arange(0, GROUPS))[:, None]
        _norm_rope(
            from_ptr + groups * group_width + heads_per_group * width, k_ptr + (token * num_groups + groups) * width,
            k_weight_ptr, groups < num_groups, cos, sin,
            width, rotary_dim, eps, NORMED, ZERO_CENTERED, INTERLEAVED, HAS_REST, PAIRS, REST,
        )  # fmt: skip


@triton.jit
def _norm_rope_backward(
    grad_ptr, x_ptr, to_ptr, weight_ptr, partial1, partial2, partial3, valid, cos, sin, width, rotary_dim, eps,
    NORMED: tl.constexpr, ZERO_CENTERED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_REST: tl.constexpr,
    PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Backward of norm and RoPE: writes the input gradients of the heads at `x_ptr` [heads, 1] to `to_ptr`. Returns
    (partial1, partial2, partial3), the running sums of the norm's weight gradient, with these heads added."""
    first, second, paired = _pairs_of(rotary_dim, PAIRS, INTERLEAVED)
    rest = rotary_dim + tl.arange(0, REST)
    pair_mask, rest_mask = valid & paired[None, :], valid & (rest < width)[None, :]
    y1 = tl.load(grad_ptr + first[None, :], mask=pair_mask, other=0.0).to(tl.float32)
    y2 = tl.load(grad_ptr + second[None, :], mask=pair_mask, other=0.0).to(tl.float32)
    g1, g2 = y1 * cos + y2 * sin, y2 * cos - y1 * sin
    if HAS_REST:
        g3 = tl.load(grad_ptr + rest[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if NORMED:
        n1 = tl.load(x_ptr + first[None, :], mask=pair_mask, other=0.0).to(tl.float32)
        n2 = tl.load(x_ptr + second[None, :], mask=pair_mask, other=0.0).to(tl.float32)
        squares = tl.sum(n1 * n1 + n2 * n2, axis=1)
        if HAS_REST:
            n3 = tl.load(x_ptr + rest[None, :], mask=rest_mask, other=0.0).to(tl.float32)
            squares += tl.sum(n3 * n3, axis=1)
        scale = (1.0 / tl.sqrt(squares / width + eps))[:, None]
        n1, n2 = n1 * scale, n2 * scale
        partial1 += g1 * n1
        partial2 += g2 * n2
        g1 *= _factor(weight_ptr, first, paired, ZERO_CENTERED)
        g2 *= _factor(weight_ptr, second, paired, ZERO_CENTERED)
        total = tl.sum(g1 * n1 + g2 * n2, axis=1)
        if HAS_REST:
            n3 *= scale
            partial3 += g3 * n3
            g3 *= _factor(weight_ptr, rest, rest < width, ZERO_CENTERED)
            total += tl.sum(g3 * n3, axis=1)
        mean = (total / width)[:, None]
        g1, g2 = (g1 - n1 * mean) * scale, (g2 - n2 * mean) * scale
        if HAS_REST:
            g3 = (g3 - n3 * mean) * scale
    tl.store(to_ptr + first[None, :], g1.to(to_ptr.dtype.element_ty), mask=pair_mask)
    tl.store(to_ptr + second[None, :], g2.to(to_ptr.dtype.element_ty), mask=pair_mask)
    if HAS_REST:
        tl.store(to_ptr + rest[None, :], g3.to(to_ptr.dtype.element_ty), mask=rest_mask)
    return partial1, partial2, partial3


@triton.jit
def _store_partials(
    offsets, partial1, partial2, partial3, width, rotary_dim,
    INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    first, second, paired = _pairs_of(rotary_dim, PAIRS, INTERLEAVED)
    rest = rotary_dim + tl.arange(0, REST)
    tl.store(offsets + first, tl.sum(partial1, axis=0), mask=paired)
    tl.store(offsets + second, tl.sum(partial2, axis=0), mask=paired)
    tl.store(offsets + rest, tl.sum(partial3, axis=0), mask=rest < width)


@triton.jit
def _norm_rope_tile_backward(
    grad_ptr, g_s, g_b, value_ptr, v_s, v_b, valid, offsets, weight_ptr, partials_ptr, zeros_ptr,
    qkv_ptr, cos_ptr, sin_ptr, to_ptr, num_tokens, batch, row_width, width, rotary_dim, eps, angle_s, angle_b,
    OF_KEYS: tl.constexpr, NORMED: tl.constexpr, ZERO_CENTERED: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_REST: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Backward of norm and RoPE for one tile of heads and a part of the tokens. `offsets` [HEADS, 1]: offset of each
    head in a token's row of qkv. `grad_ptr` [HEADS, 1]: output gradients. OF_KEYS: also copies the gradients of the
    values."""
    paired, dims = tl.arange(0, PAIRS) < rotary_dim // 2, tl.arange(0, WIDTH)
    value_mask = valid & (dims < width)[None, :]
    # Weight gradients are summed over heads only at the end, because a sum over a tile needs barriers.
    partial1, partial2 = tl.zeros((HEADS, PAIRS), dtype=tl.float32), tl.zeros((HEADS, PAIRS), dtype=tl.float32)
    partial3 = tl.zeros((HEADS, REST), dtype=tl.float32)
    for number in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        s, b = _position(number, batch)
        cos, sin = _angles(cos_ptr, sin_ptr, s * angle_s + b * angle_b, paired, PAIRS)
        inside = tl.cast(number, tl.int64) * row_width + offsets
        if OF_KEYS:  # loaded before any store, because a load after a store would wait for it
            values = tl.load(value_ptr + s * v_s + b * v_b + dims[None, :], mask=value_mask)
        partial1, partial2, partial3 = _norm_rope_backward(
            grad_ptr + s * g_s + b * g_b, qkv_ptr + inside, to_ptr + inside, weight_ptr, partial1, partial2, partial3,
            valid, cos, sin, width, rotary_dim, eps, NORMED, ZERO_CENTERED, INTERLEAVED, HAS_REST, PAIRS, REST,
        )  # fmt: skip
        if OF_KEYS:
            tl.store(to_ptr + inside + width + dims[None, :], values, mask=value_mask)
    if NORMED:
        _store_partials(partials_ptr, partial1, partial2, partial3, width, rotary_dim, INTERLEAVED, PAIRS, REST)
        tl.store(zeros_ptr + dims, tl.zeros((WIDTH,), dtype=tl.float32), mask=dims < width)


@triton.jit
def _qkv_backward(
    grad_q_ptr, grad_k_ptr, grad_v_ptr, qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, grad_ptr, partials_ptr,
    num_tokens, batch, num_groups, heads_per_group, width, rotary_dim, eps,
    q_s, q_b, q_n, k_s, k_b, k_n, v_s, v_b, v_n, angle_s, angle_b,
    NORMED: tl.constexpr, ZERO_CENTERED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_REST: tl.constexpr,
    PAIRS: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Backward of one tile. A program processes either query heads or key and value heads, because both together would
    need too many registers."""
    num_heads, group_width = num_groups * heads_per_group, (heads_per_group + 2) * width
    q_partials_ptr = partials_ptr + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 2 * width
    k_partials_ptr = q_partials_ptr + width
    tiles_q = tl.cdiv(num_heads, HEADS)
    if tl.program_id(1) < tiles_q:
        heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
        _norm_rope_tile_backward(
            grad_q_ptr + heads * q_n, q_s, q_b, grad_v_ptr, v_s, v_b, heads < num_heads,
            heads // heads_per_group * group_width + heads % heads_per_group * width, q_weight_ptr,
            q_partials_ptr, k_partials_ptr, qkv_ptr, cos_ptr, sin_ptr, grad_ptr, num_tokens, batch,
            num_groups * group_width, width, rotary_dim, eps, angle_s, angle_b,
            False, NORMED, ZERO_CENTERED, INTERLEAVED, HAS_REST, PAIRS, REST, HEADS, WIDTH,
        )  # fmt: skip
    else:
        groups = ((tl.program_id(1) - tiles_q) * GROUPS + tl.arange(0, GROUPS))[:, None]
        _norm_rope_tile_backward(
            grad_k_ptr + groups * k_n, k_s, k_b, grad_v_ptr + groups * v_n, v_s, v_b, groups < num_groups,
            groups * group_width + heads_per_group * width, k_weight_ptr,
            k_partials_ptr, q_partials_ptr, qkv_ptr, cos_ptr, sin_ptr, grad_ptr, num_tokens, batch,
            num_groups * group_width, width, rotary_dim, eps, angle_s, angle_b,
            True, NORMED, ZERO_CENTERED, INTERLEAVED, HAS_REST, PAIRS, REST, GROUPS, WIDTH,
        )  # fmt: skip
