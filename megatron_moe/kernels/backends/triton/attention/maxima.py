"""Largest attention logits per head. A tile of rows whose log-sum-exps are all below the largest logit known so far, or
below the smallest logit of interest, is skipped, because no logit exceeds the log-sum-exp of its row."""

import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.attention_blocks import mask_blocks
from megatron_moe.kernels.backends.triton.attention.blocks import rectangle_inputs, with_unit_stride_inputs
from megatron_moe.kernels.backends.triton.attention.tiles import (
    BAND,
    load_rows,
    supports_inputs,
    tile_width,
    visible,
    visible_ranges,
)
from megatron_moe.kernels.backends.triton.launch import INTERPRETED, cdiv, dot
from megatron_moe.kernels.ops import AttentionBlock
from megatron_moe.kernels.reference import backend as reference


def max_logits_(block: AttentionBlock, lse_SBN: Tensor, maxima_N: Tensor, least: float) -> None:
    """See `Kernels.max_logits_`. fp32 runs on plain torch."""
    block = with_unit_stride_inputs(block)
    pairs = mask_blocks(block.query.chunks, block.key.chunks, block.config)
    q, k, v = block[:3]
    if not all(supports_inputs(q[pair.rows], k[pair.keys], v[pair.keys]) for pair in pairs):
        reference.max_logits_(block, lse_SBN, maxima_N, least)
        return
    for pair in pairs:
        (queries, keys, _), shape, segments = rectangle_inputs(block, pair)
        rows, columns = (128, 64) if shape.width <= 128 else (64, 64)
        of_queries, of_keys = (queries, queries) if segments is None else segments
        lse_BNS = lse_SBN[pair.rows].permute(1, 2, 0)
        _raise[(cdiv(shape.rows, rows), shape.batch * shape.heads)](
            queries, keys, of_queries, of_keys, lse_BNS, maxima_N, least,
            shape.rows, shape.keys, shape.heads, shape.heads // shape.groups, shape.width, shape.scale,
            shape.left, shape.right, *queries.stride()[:3], *keys.stride()[:3],
            lse_BNS.stride(2), lse_BNS.stride(0), lse_BNS.stride(1), of_queries.stride(0), of_keys.stride(0),
            SEGMENTS=segments is not None, WIDEN=INTERPRETED, ROWS=rows, KEYS=columns, WIDTH=tile_width(shape.width),
            num_warps=8 if rows == 128 else 4, num_stages=3,
        )  # fmt: skip


@triton.jit(do_not_specialize=BAND)
def _raise(
    q_ptr, k_ptr, of_queries_ptr, of_keys_ptr, lse_ptr, maxima_ptr, least, num_rows, num_keys, num_heads,
    heads_per_group, width, scale, left, right, q_s, q_b, q_n, k_s, k_b, k_n, l_s, l_b, l_n, of_queries_b, of_keys_b,
    SEGMENTS: tl.constexpr, WIDEN: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    b, n = (tl.program_id(1) // num_heads).to(tl.int64), (tl.program_id(1) % num_heads).to(tl.int64)
    rows = first + tl.arange(0, ROWS)
    lse_ptr += b * l_b + n * l_n
    lse = tl.load(lse_ptr + rows.to(tl.int64) * l_s, mask=rows < num_rows, other=float("-inf"))
    # Other programs may raise the maximum concurrently; this program then computes a tile that it could have skipped.
    if tl.max(lse) > tl.maximum(least, tl.load(maxima_ptr + n)):
        q = load_rows(q_ptr + b * q_b + n * q_n, q_s, rows, num_rows, width, WIDTH, True)
        k_ptr += b * k_b + n // heads_per_group * k_n
        of_keys_ptr += b * of_keys_b
        of_rows = rows
        if SEGMENTS:
            of_rows = tl.load(of_queries_ptr + b * of_queries_b + rows, mask=rows < num_rows, other=-1)
        peak = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
        ends = visible_ranges(first, ROWS, left, right, num_keys, KEYS, SEGMENTS)
        for part in tl.static_range(3):
            for at in range(ends[part], tl.minimum(ends[part + 1], ends[3]), KEYS):
                keys = at + tl.arange(0, KEYS)
                k = load_rows(k_ptr, k_s, keys, num_keys, width, WIDTH, part != 1)
                logits = dot(q, tl.trans(k), None, WIDEN)
                if part != 1:
                    seen = visible(rows, keys, of_rows, of_keys_ptr, num_keys, left, right, SEGMENTS)
                    logits = tl.where(seen, logits, float("-inf"))
                peak = tl.maximum(peak, tl.max(logits, axis=1))
        tl.atomic_max(maxima_ptr + n, tl.max(tl.where(rows < num_rows, peak * scale, float("-inf"))))
