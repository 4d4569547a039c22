"""Merges attention results for two disjoint sets of keys, in one pass over memory."""

import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends.triton.attention.tiles import tile_width
from megatron_moe.kernels.backends.triton.launch import cdiv


def merge(out: Tensor, lse_BNS: Tensor, part: Tensor, part_lse_BNS: Tensor) -> None:
    """Merges `part` [S, B, N, E] and its log-sum-exp into `out` and `lse_BNS`, in place. `out` is fp32 or has the dtype
    of `part`, to which the result is then rounded."""
    seq, batch, heads, width = out.shape
    _merge[(cdiv(seq, 32), batch * heads)](
        out, lse_BNS, part, part_lse_BNS, seq, heads, width, *out.stride()[:3], *part.stride()[:3],
        lse_BNS.stride(2), lse_BNS.stride(0), lse_BNS.stride(1), *part_lse_BNS.stride()[:2],
        ROWS=32, VALUE=tile_width(width),
    )  # fmt: skip


@triton.jit
def _merge(
    out_ptr, lse_ptr, part_ptr, part_lse_ptr, seq, num_heads, width, o_s, o_b, o_n, p_s, p_b, p_n, l_s, l_b, l_n,
    m_b, m_n, ROWS: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    b, n = (tl.program_id(1) // num_heads).to(tl.int64), (tl.program_id(1) % num_heads).to(tl.int64)
    rows, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, VALUE)
    lse_ptr += b * l_b + n * l_n + rows.to(tl.int64) * l_s
    before = tl.load(lse_ptr, mask=rows < seq, other=float("-inf"))
    added = tl.load(part_lse_ptr + b * m_b + n * m_n + rows, mask=rows < seq, other=0.0)
    # fully masked rectangles are omitted, so each row of a part attends to a key and has a finite log-sum-exp
    peak = tl.maximum(before, added)
    weight, share = tl.exp(before - peak), tl.exp(added - peak)
    total = weight + share
    out_ptr += b * o_b + n * o_n + rows.to(tl.int64)[:, None] * o_s + dims[None, :]
    mask = (rows < seq)[:, None] & (dims < width)[None, :]
    out = tl.load(out_ptr, mask=mask, other=0.0).to(tl.float32)
    part = tl.load(
        part_ptr + b * p_b + n * p_n + rows.to(tl.int64)[:, None] * p_s + dims[None, :], mask=mask, other=0.0
    )
    out = (out * weight[:, None] + part.to(tl.float32) * share[:, None]) / total[:, None]
    tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr, peak + tl.log(total), mask=rows < seq)
