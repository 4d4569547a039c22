"""Attention forward, tile by tile with an online softmax and without stored logits (Dao, arXiv 2307.08691).

Tiles outside the mask band are skipped. The mask is evaluated for tiles at the edges of the band, or for all tiles if
there are document ids. The online softmax can start from a sink, or from earlier results for other keys.
"""

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


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks_N: Tensor | None,
    segments: Segments | None,
    out: Tensor,
    lse_BNS: Tensor,
    shape: Shape,
    *,
    onward: bool = False,
) -> None:
    """Writes the attention output to `out` (contiguous [rows, B, N, E]) and the log-sum-exp to `lse_BNS`. `onward`:
    `out` and `lse_BNS` already contain results for other keys, into which the new results are merged."""
    rows, keys = (128, 64) if max(shape.width, shape.value_width) <= 128 else (64, 64)
    of_queries, of_keys = (q, q) if segments is None else segments
    _attend[(cdiv(shape.rows, rows), shape.batch * shape.heads)](
        q, k, v, q if sinks_N is None else sinks_N, of_queries, of_keys, out, lse_BNS, *shape.sizes,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], lse_BNS.stride(2), lse_BNS.stride(0), lse_BNS.stride(1),
        of_queries.stride(0), of_keys.stride(0),
        SINKS=sinks_N is not None, ONWARD=onward, SEGMENTS=segments is not None, WIDEN=INTERPRETED,
        ROWS=rows, KEYS=keys, WIDTH=tile_width(shape.width), VALUE=tile_width(shape.value_width),
        num_warps=8 if rows == 128 else 4, num_stages=3,
    )  # fmt: skip


@triton.jit(do_not_specialize=BAND)
def _attend(
    q_ptr, k_ptr, v_ptr, sinks_ptr, of_queries_ptr, of_keys_ptr, out_ptr, lse_ptr,
    num_rows, num_keys, num_heads, heads_per_group, batch, width, value_width, scale, left, right,
    q_s, q_b, q_n, k_s, k_b, k_n, v_s, v_b, v_n, l_s, l_b, l_n, of_queries_b, of_keys_b,
    SINKS: tl.constexpr, ONWARD: tl.constexpr, SEGMENTS: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    # rows that see the most keys are processed first, which balances the load
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    b, n = (tl.program_id(1) // num_heads).to(tl.int64), (tl.program_id(1) % num_heads).to(tl.int64)
    group = n // heads_per_group
    rows = first + tl.arange(0, ROWS)
    q = load_rows(q_ptr + b * q_b + n * q_n, q_s, rows, num_rows, width, WIDTH, True)
    k_ptr += b * k_b + group * k_n
    v_ptr += b * v_b + group * v_n
    of_keys_ptr += b * of_keys_b
    of_rows = rows
    if SEGMENTS:
        of_rows = tl.load(of_queries_ptr + b * of_queries_b + rows, mask=rows < num_rows, other=-1)
    lse_ptr += b * l_b + n * l_n
    # logits are in base 2, because the hardware instruction is exp2
    factor = scale * 1.4426950408889634
    total = tl.zeros((ROWS,), dtype=tl.float32)
    # the lowest finite number instead of -inf, because -inf - (-inf) is nan
    peak = tl.full((ROWS,), -3.4028234663852886e38, dtype=tl.float32)
    if SINKS:
        peak = tl.full((ROWS,), 1.0, dtype=tl.float32) * tl.load(sinks_ptr + n).to(tl.float32) * 1.4426950408889634
        total += 1.0
    out = tl.zeros((ROWS, VALUE), dtype=tl.float32)
    if ONWARD:
        # earlier results act as one additional key: its logit is their log-sum-exp, its value is their output
        before = tl.load(lse_ptr + rows.to(tl.int64) * l_s, mask=rows < num_rows, other=float("-inf"))
        total = tl.where(before > float("-inf"), 1.0, 0.0)
        peak = tl.maximum(before * 1.4426950408889634, peak)
        offsets, mask = _offsets(rows, b, n, num_rows, batch, num_heads, value_width, VALUE)
        out = tl.load(out_ptr + offsets, mask=mask, other=0.0)
    ends = visible_ranges(first, ROWS, left, right, num_keys, KEYS, SEGMENTS)
    for part in tl.static_range(3):
        for at in range(ends[part], tl.minimum(ends[part + 1], ends[3]), KEYS):
            keys = at + tl.arange(0, KEYS)
            k = load_rows(k_ptr, k_s, keys, num_keys, width, WIDTH, part != 1)
            logits = dot(q, tl.trans(k), None, WIDEN) * factor
            if part != 1:
                seen = visible(rows, keys, of_rows, of_keys_ptr, num_keys, left, right, SEGMENTS)
                logits = tl.where(seen, logits, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(logits, axis=1))
            probs = tl.exp2(logits - new_peak[:, None])
            shrink = tl.exp2(peak - new_peak)
            total = total * shrink + tl.sum(probs, axis=1)
            v = load_rows(v_ptr, v_s, keys, num_keys, value_width, VALUE, part != 1)
            out = dot(probs.to(v.dtype), v, out * shrink[:, None], WIDEN)
            peak = new_peak
    seen = total > 0.0  # False for rows beyond the last one and rows without a visible key so far
    total = tl.where(seen, total, 1.0)
    lse = tl.where(seen, (peak + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    offsets, mask = _offsets(rows, b, n, num_rows, batch, num_heads, value_width, VALUE)
    tl.store(out_ptr + offsets, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + rows.to(tl.int64) * l_s, lse, mask=rows < num_rows)


@triton.jit
def _offsets(rows, b, n, num_rows, batch, num_heads, value_width, VALUE: tl.constexpr):
    """Returns (offsets of the given rows of a head in a contiguous output [rows, B, N, E], mask of valid elements)."""
    dims = tl.arange(0, VALUE)
    offsets = ((rows.to(tl.int64) * batch + b) * num_heads + n)[:, None] * value_width + dims[None, :]
    return offsets, (rows < num_rows)[:, None] & (dims < value_width)[None, :]
