"""Gradients of attention from its output and log-sum-exp: keys and values by tiles of keys, queries by tiles of queries
(Dao et al., arXiv 2205.14135 section B.2)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends.triton.attention.tiles import Shape, dot, load_rows, stretches, tile_width, visible
from megatron_moe.kernels.backends.triton.launch import INTERPRETED


def gradients(
    grad_SBNE: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments_BS: Tensor | None,
    out: Tensor,
    lse_BNS: Tensor,
    shape: Shape,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, and delta: fp32 [B, N, S], the sum of gradient times output over the value's width."""
    grad = grad_SBNE if grad_SBNE.stride(-1) == 1 else grad_SBNE.contiguous()
    delta_BNS = torch.empty_like(lse_BNS)
    value = tile_width(shape.value_width)
    _deltas[(triton.cdiv(shape.seq, 32), shape.batch * shape.heads)](
        grad, out, delta_BNS, shape.seq, shape.heads, shape.value_width, *grad.stride()[:3], *out.stride()[:3],
        ROWS=32, VALUE=value,
    )  # fmt: skip
    grad_q, grad_k, grad_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    inputs = q, k, v, grad, lse_BNS, delta_BNS, q if segments_BS is None else segments_BS
    strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad.stride()[:3]
    options = {
        "SEGMENTS": segments_BS is not None, "WIDEN": INTERPRETED, "WIDTH": tile_width(shape.width), "VALUE": value,
    }  # fmt: skip
    of_keys, of_queries = _tiles(max(shape.width, shape.value_width), q.element_size())
    _key_grads[(triton.cdiv(shape.seq, of_keys["KEYS"]), shape.batch * shape.groups)](
        *inputs, grad_k, grad_v, *shape.sizes, *strides, **of_keys, **options
    )
    _query_grads[(triton.cdiv(shape.seq, of_queries["ROWS"]), shape.batch * shape.heads)](
        *inputs, grad_q, *shape.sizes, *strides, **of_queries, **options
    )
    return grad_q, grad_k, grad_v, delta_BNS


def _tiles(width: int, num_bytes: int) -> tuple[dict[str, int], dict[str, int]]:
    """Tiles of the two kernels, the fastest of those that were measured (docs/decisions/0276); those for wide heads and
    for 4 bytes per number are what has room."""
    if width > 128:
        return _tile(32, 64, 4, 2), _tile(64, 32, 4, 2)
    if num_bytes > 2:
        return _tile(32, 128, 8, 2), _tile(128, 64, 8, 2)
    return _tile(64, 64, 4, 2), _tile(64, 64, 4, 3) if width <= 64 else _tile(128, 64, 8, 3)


def _tile(rows: int, keys: int, warps: int, stages: int) -> dict[str, int]:
    return {"ROWS": rows, "KEYS": keys, "num_warps": warps, "num_stages": stages}


@triton.jit
def _deltas(
    grad_ptr, out_ptr, delta_ptr, seq, num_heads, width, g_s, g_b, g_n, o_s, o_b, o_n,
    ROWS: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    b, n = (tl.program_id(1) // num_heads).to(tl.int64), (tl.program_id(1) % num_heads).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    grad = load_rows(grad_ptr + b * g_b + n * g_n, g_s, rows, seq, width, VALUE, True).to(tl.float32)
    out = load_rows(out_ptr + b * o_b + n * o_n, o_s, rows, seq, width, VALUE, True).to(tl.float32)
    tl.store(delta_ptr + (b * num_heads + n) * seq + rows, tl.sum(grad * out, axis=1), mask=rows < seq)


@triton.jit
def _key_grads(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, segments_ptr, grad_k_ptr, grad_v_ptr,
    seq, num_heads, heads_per_group, batch, width, value_width, scale, left, right,
    q_s, q_b, q_n, k_s, k_b, k_n, v_s, v_b, v_n, g_s, g_b, g_n,
    SEGMENTS: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """One tile of keys, over all rows of all heads of the group that see any of them."""
    num_groups = num_heads // heads_per_group
    first = tl.program_id(0) * KEYS
    b, group = (tl.program_id(1) // num_groups).to(tl.int64), (tl.program_id(1) % num_groups).to(tl.int64)
    keys = first + tl.arange(0, KEYS)
    k = load_rows(k_ptr + b * k_b + group * k_n, k_s, keys, seq, width, WIDTH, True)
    v = load_rows(v_ptr + b * v_b + group * v_n, v_s, keys, seq, value_width, VALUE, True)
    segments_ptr += b * seq
    of_keys = keys
    if SEGMENTS:
        of_keys = tl.load(segments_ptr + keys, mask=keys < seq, other=-2)
    factor = scale * 1.4426950408889634
    grad_k = tl.zeros((KEYS, WIDTH), dtype=tl.float32)
    grad_v = tl.zeros((KEYS, VALUE), dtype=tl.float32)
    ends = stretches(first, KEYS, right, left, seq, ROWS, SEGMENTS)
    for head in range(0, heads_per_group):
        n = group * heads_per_group + head
        of_head = (b * num_heads + n) * seq
        for part in tl.static_range(3):
            for at in range(ends[part], tl.minimum(ends[part + 1], ends[3]), ROWS):
                rows = at + tl.arange(0, ROWS)
                q = load_rows(q_ptr + b * q_b + n * q_n, q_s, rows, seq, width, WIDTH, part != 1)
                grad = load_rows(grad_ptr + b * g_b + n * g_n, g_s, rows, seq, value_width, VALUE, part != 1)
                lse = tl.load(lse_ptr + of_head + rows, mask=rows < seq, other=0.0)
                delta = tl.load(delta_ptr + of_head + rows, mask=rows < seq, other=0.0)
                logits = dot(k, tl.trans(q), None, WIDEN) * factor
                probs = tl.exp2(logits - (lse * 1.4426950408889634)[None, :])
                if part != 1:
                    # which rows each key is seen by: the same question from the other side
                    seen = visible(keys, rows, of_keys, segments_ptr, seq, right, left, SEGMENTS)
                    probs = tl.where(seen, probs, 0.0)
                grad_v = dot(probs.to(grad.dtype), grad, grad_v, WIDEN)
                grad_probs = dot(v, tl.trans(grad), None, WIDEN)
                grad_logits = probs * (grad_probs - delta[None, :])
                grad_k = dot(grad_logits.to(q.dtype), q, grad_k, WIDEN)
    place = (keys.to(tl.int64) * batch + b) * num_groups + group
    dims, held = tl.arange(0, WIDTH), (keys < seq)[:, None]
    to_ptr = grad_k_ptr + place[:, None] * width + dims[None, :]
    tl.store(to_ptr, (grad_k * scale).to(grad_k_ptr.dtype.element_ty), mask=held & (dims < width)[None, :])
    dims = tl.arange(0, VALUE)
    to_ptr = grad_v_ptr + place[:, None] * value_width + dims[None, :]
    tl.store(to_ptr, grad_v.to(grad_v_ptr.dtype.element_ty), mask=held & (dims < value_width)[None, :])


@triton.jit
def _query_grads(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, segments_ptr, grad_q_ptr,
    seq, num_heads, heads_per_group, batch, width, value_width, scale, left, right,
    q_s, q_b, q_n, k_s, k_b, k_n, v_s, v_b, v_n, g_s, g_b, g_n,
    SEGMENTS: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one head, over all keys that they see."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    b, n = (tl.program_id(1) // num_heads).to(tl.int64), (tl.program_id(1) % num_heads).to(tl.int64)
    group = n // heads_per_group
    rows = first + tl.arange(0, ROWS)
    q = load_rows(q_ptr + b * q_b + n * q_n, q_s, rows, seq, width, WIDTH, True)
    grad = load_rows(grad_ptr + b * g_b + n * g_n, g_s, rows, seq, value_width, VALUE, True)
    lse = tl.load(lse_ptr + (b * num_heads + n) * seq + rows, mask=rows < seq, other=0.0) * 1.4426950408889634
    delta = tl.load(delta_ptr + (b * num_heads + n) * seq + rows, mask=rows < seq, other=0.0)
    k_ptr += b * k_b + group * k_n
    v_ptr += b * v_b + group * v_n
    segments_ptr += b * seq
    of_rows = rows
    if SEGMENTS:
        of_rows = tl.load(segments_ptr + rows, mask=rows < seq, other=-1)
    factor = scale * 1.4426950408889634
    grad_q = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    ends = stretches(first, ROWS, left, right, seq, KEYS, SEGMENTS)
    for part in tl.static_range(3):
        for at in range(ends[part], tl.minimum(ends[part + 1], ends[3]), KEYS):
            keys = at + tl.arange(0, KEYS)
            k = load_rows(k_ptr, k_s, keys, seq, width, WIDTH, part != 1)
            v = load_rows(v_ptr, v_s, keys, seq, value_width, VALUE, part != 1)
            probs = tl.exp2(dot(q, tl.trans(k), None, WIDEN) * factor - lse[:, None])
            if part != 1:
                seen = visible(rows, keys, of_rows, segments_ptr, seq, left, right, SEGMENTS)
                probs = tl.where(seen, probs, 0.0)
            grad_logits = probs * (dot(grad, tl.trans(v), None, WIDEN) - delta[:, None])
            grad_q = dot(grad_logits.to(k.dtype), k, grad_q, WIDEN)
    dims = tl.arange(0, WIDTH)
    place = ((rows.to(tl.int64) * batch + b) * num_heads + n)[:, None] * width + dims[None, :]
    held = (rows < seq)[:, None] & (dims < width)[None, :]
    tl.store(grad_q_ptr + place, (grad_q * scale).to(grad_q_ptr.dtype.element_ty), mask=held)
