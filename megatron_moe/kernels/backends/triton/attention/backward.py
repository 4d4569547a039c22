"""Attention backward from output and log-sum-exp: one kernel for the gradients of k and v (one program per tile of
keys), another for the gradient of q (Dao et al., arXiv 2205.14135 section B.2)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends.triton.attention.tiles import (
    BAND,
    Segments,
    Shape,
    load_rows,
    tile_width,
    visible,
    visible_ranges,
)
from megatron_moe.kernels.backends.triton.launch import INTERPRETED, cdiv, dot


def gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments | None,
    lse_BNS: Tensor,
    delta_BNS: Tensor,
    shape: Shape,
    into: tuple[Tensor, ...],
    *,
    add: bool = False,
) -> None:
    """Writes the gradients of q, k and v to the contiguous tensors `into`, or adds them if `add`. `lse_BNS` and
    `delta_BNS` (see `deltas`) are contiguous and fp32."""
    grad_q, grad_k, grad_v = into
    of_queries, of_keys = (q, q) if segments is None else segments
    inputs = q, k, v, grad, lse_BNS, delta_BNS, of_queries, of_keys
    strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad.stride()[:3]
    strides = *strides, of_queries.stride(0), of_keys.stride(0)
    options = {
        "ADD": add, "SEGMENTS": segments is not None, "WIDEN": INTERPRETED, "WIDTH": tile_width(shape.width),
        "VALUE": tile_width(shape.value_width),
    }  # fmt: skip
    by_keys, by_rows = _tiles(max(shape.width, shape.value_width), q.element_size())
    _key_grads[(cdiv(shape.keys, by_keys["KEYS"]), shape.batch * shape.groups)](
        *inputs, grad_k, grad_v, *shape.sizes, *strides, **by_keys, **options
    )
    _query_grads[(cdiv(shape.rows, by_rows["ROWS"]), shape.batch * shape.heads)](
        *inputs, grad_q, *shape.sizes, *strides, **by_rows, **options
    )


def deltas(grad: Tensor, out: Tensor) -> Tensor:
    """Returns delta, fp32 [B, N, S], from grad and out, both [S, B, N, E]: the sum over E of grad * out."""
    seq, batch, heads, width = out.shape
    delta_BNS = torch.empty(batch, heads, seq, device=out.device, dtype=torch.float32)
    _deltas[(cdiv(seq, 32), batch * heads)](
        grad, out, delta_BNS, seq, heads, width, *grad.stride()[:3], *out.stride()[:3],
        ROWS=32, VALUE=tile_width(width),
    )  # fmt: skip
    return delta_BNS


def _tiles(width: int, num_bytes: int) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the tile sizes and launch options of `_key_grads` and of `_query_grads`. For wide heads and 4-byte dtypes
    these are the largest tiles that fit, otherwise the fastest ones measured (docs/experiments.md)."""
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


@triton.jit(do_not_specialize=BAND)
def _key_grads(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, of_queries_ptr, of_keys_ptr, grad_k_ptr, grad_v_ptr,
    num_rows, num_keys, num_heads, heads_per_group, batch, width, value_width, scale, left, right,
    q_s, q_b, q_n, k_s, k_b, k_n, v_s, v_b, v_n, g_s, g_b, g_n, of_queries_b, of_keys_b,
    ADD: tl.constexpr, SEGMENTS: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of keys and values, summed over the visible query rows of all heads of the group."""
    num_groups = num_heads // heads_per_group
    first = tl.program_id(0) * KEYS
    b, group = (tl.program_id(1) // num_groups).to(tl.int64), (tl.program_id(1) % num_groups).to(tl.int64)
    keys = first + tl.arange(0, KEYS)
    k = load_rows(k_ptr + b * k_b + group * k_n, k_s, keys, num_keys, width, WIDTH, True)
    v = load_rows(v_ptr + b * v_b + group * v_n, v_s, keys, num_keys, value_width, VALUE, True)
    of_queries_ptr += b * of_queries_b
    of_keys = keys
    if SEGMENTS:
        of_keys = tl.load(of_keys_ptr + b * of_keys_b + keys, mask=keys < num_keys, other=-2)
    factor = scale * 1.4426950408889634
    grad_k = tl.zeros((KEYS, WIDTH), dtype=tl.float32)
    grad_v = tl.zeros((KEYS, VALUE), dtype=tl.float32)
    ends = visible_ranges(first, KEYS, right, left, num_rows, ROWS, SEGMENTS)
    for head in range(0, heads_per_group):
        n = group * heads_per_group + head
        of_head = (b * num_heads + n) * num_rows
        for part in tl.static_range(3):
            for at in range(ends[part], tl.minimum(ends[part + 1], ends[3]), ROWS):
                rows = at + tl.arange(0, ROWS)
                q = load_rows(q_ptr + b * q_b + n * q_n, q_s, rows, num_rows, width, WIDTH, part != 1)
                grad = load_rows(grad_ptr + b * g_b + n * g_n, g_s, rows, num_rows, value_width, VALUE, part != 1)
                lse = tl.load(lse_ptr + of_head + rows, mask=rows < num_rows, other=0.0)
                delta = tl.load(delta_ptr + of_head + rows, mask=rows < num_rows, other=0.0)
                logits = dot(k, tl.trans(q), None, WIDEN) * factor
                probs = tl.exp2(logits - (lse * 1.4426950408889634)[None, :])
                if part != 1:
                    # the transposed mask: keys take the role of rows, and left and right are swapped
                    seen = visible(keys, rows, of_keys, of_queries_ptr, num_rows, right, left, SEGMENTS)
                    probs = tl.where(seen, probs, 0.0)
                grad_v = dot(probs.to(grad.dtype), grad, grad_v, WIDEN)
                grad_probs = dot(v, tl.trans(grad), None, WIDEN)
                grad_logits = probs * (grad_probs - delta[None, :])
                grad_k = dot(grad_logits.to(q.dtype), q, grad_k, WIDEN)
    offsets = (keys.to(tl.int64) * batch + b) * num_groups + group
    dims, mask = tl.arange(0, WIDTH), (keys < num_keys)[:, None]
    to_ptr = grad_k_ptr + offsets[:, None] * width + dims[None, :]
    _accumulate(to_ptr, grad_k * scale, mask & (dims < width)[None, :], ADD)
    dims = tl.arange(0, VALUE)
    to_ptr = grad_v_ptr + offsets[:, None] * value_width + dims[None, :]
    _accumulate(to_ptr, grad_v, mask & (dims < value_width)[None, :], ADD)


@triton.jit(do_not_specialize=BAND)
def _query_grads(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, of_queries_ptr, of_keys_ptr, grad_q_ptr,
    num_rows, num_keys, num_heads, heads_per_group, batch, width, value_width, scale, left, right,
    q_s, q_b, q_n, k_s, k_b, k_n, v_s, v_b, v_n, g_s, g_b, g_n, of_queries_b, of_keys_b,
    ADD: tl.constexpr, SEGMENTS: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile of query rows of one head, summed over the visible keys."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    b, n = (tl.program_id(1) // num_heads).to(tl.int64), (tl.program_id(1) % num_heads).to(tl.int64)
    group = n // heads_per_group
    rows = first + tl.arange(0, ROWS)
    q = load_rows(q_ptr + b * q_b + n * q_n, q_s, rows, num_rows, width, WIDTH, True)
    grad = load_rows(grad_ptr + b * g_b + n * g_n, g_s, rows, num_rows, value_width, VALUE, True)
    lse = tl.load(lse_ptr + (b * num_heads + n) * num_rows + rows, mask=rows < num_rows, other=0.0) * 1.4426950408889634
    delta = tl.load(delta_ptr + (b * num_heads + n) * num_rows + rows, mask=rows < num_rows, other=0.0)
    k_ptr += b * k_b + group * k_n
    v_ptr += b * v_b + group * v_n
    of_keys_ptr += b * of_keys_b
    of_rows = rows
    if SEGMENTS:
        of_rows = tl.load(of_queries_ptr + b * of_queries_b + rows, mask=rows < num_rows, other=-1)
    factor = scale * 1.4426950408889634
    grad_q = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    ends = visible_ranges(first, ROWS, left, right, num_keys, KEYS, SEGMENTS)
    for part in tl.static_range(3):
        for at in range(ends[part], tl.minimum(ends[part + 1], ends[3]), KEYS):
            keys = at + tl.arange(0, KEYS)
            k = load_rows(k_ptr, k_s, keys, num_keys, width, WIDTH, part != 1)
            v = load_rows(v_ptr, v_s, keys, num_keys, value_width, VALUE, part != 1)
            probs = tl.exp2(dot(q, tl.trans(k), None, WIDEN) * factor - lse[:, None])
            if part != 1:
                seen = visible(rows, keys, of_rows, of_keys_ptr, num_keys, left, right, SEGMENTS)
                probs = tl.where(seen, probs, 0.0)
            grad_logits = probs * (dot(grad, tl.trans(v), None, WIDEN) - delta[:, None])
            grad_q = dot(grad_logits.to(k.dtype), k, grad_q, WIDEN)
    dims = tl.arange(0, WIDTH)
    offsets = ((rows.to(tl.int64) * batch + b) * num_heads + n)[:, None] * width + dims[None, :]
    mask = (rows < num_rows)[:, None] & (dims < width)[None, :]
    _accumulate(grad_q_ptr + offsets, grad_q * scale, mask, ADD)


@triton.jit
def _accumulate(to_ptr, share, mask, ADD: tl.constexpr):
    """Writes a tile of gradients to memory, or, if ADD, adds it to the values there."""
    if ADD:
        share += tl.load(to_ptr, mask=mask, other=0.0)
    tl.store(to_ptr, share.to(to_ptr.dtype.element_ty), mask=mask)
