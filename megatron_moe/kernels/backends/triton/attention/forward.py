"""Attention with sliding windows, sinks and documents: what cuDNN does not know, tile by tile without stored logits.

Dao, arXiv 2307.08691, with windows as in arXiv 2004.05150. A sink is a logit that the softmax of every row begins with.
Tiles outside the window are not visited, and only those at its edges are masked. The backward visits all tiles twice,
once by keys and once by queries, so that every sum has one owner and a fixed order (`backward.py`).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends import torch_native
from megatron_moe.kernels.backends.triton.attention.backward import gradients
from megatron_moe.kernels.backends.triton.attention.tiles import Shape, dot, load_rows, stretches, tile_width, visible
from megatron_moe.kernels.backends.triton.launch import INTERPRETED
from megatron_moe.specs.attention import CoreAttentionSpec
from megatron_moe.specs.params import Part

WIDEST = 256
"""Dims of a head that a tile can hold."""


def attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGE: Tensor,
    spec: CoreAttentionSpec,
    sinks_N: Tensor | None,
    segments_BS: Tensor | None,
    dropout_key: tuple[int | str, ...] | None,
    head_part: Part = (0, 1),
) -> Tensor:
    """See `Kernels.attention`. Without window, sinks and documents it is torch's, and so are dropout and fp32. Where
    everything must repeat it is ours: torch then takes no backward of cuDNN, and all others are slower."""
    special = spec.window is not None or sinks_N is not None or spec.off_by_one or segments_BS is not None
    special = special or torch.are_deterministic_algorithms_enabled()
    drops = spec.dropout > 0.0 and dropout_key is not None
    narrow = max(q_SBND.shape[-1], v_SBGE.shape[-1]) <= WIDEST and q_SBND.numel() > 0
    near = all(x.shape[0] * x.stride(0) < 2**31 for x in (q_SBND, k_SBGD, v_SBGE))  # offsets are 32-bit
    slow = q_SBND.dtype is torch.float32 and not INTERPRETED  # matrix units have no fp32
    if not special or drops or slow or not (narrow and near):
        return torch_native.attention(q_SBND, k_SBGD, v_SBGE, spec, sinks_N, segments_BS, dropout_key, head_part)
    if spec.off_by_one and sinks_N is None:
        sinks_N = q_SBND.new_zeros(q_SBND.shape[2])
    out: Tensor = _Attention.apply(q_SBND, k_SBGD, v_SBGE, sinks_N, segments_BS, spec)  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_SBND: Tensor,
        k_SBGD: Tensor,
        v_SBGE: Tensor,
        sinks_N: Tensor | None,
        segments_BS: Tensor | None,
        spec: CoreAttentionSpec,
    ) -> Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_SBND, k_SBGD, v_SBGE))
        segments_BS = None if segments_BS is None else segments_BS.contiguous()
        shape = Shape.of(q, k, v, spec)
        out = q.new_empty(shape.seq, shape.batch, shape.heads, shape.value_width)
        lse_BNS = torch.empty(shape.batch, shape.heads, shape.seq, device=q.device, dtype=torch.float32)
        rows, keys = (128, 64) if max(shape.width, shape.value_width) <= 128 else (64, 64)
        _attend[(triton.cdiv(shape.seq, rows), shape.batch * shape.heads)](
            q, k, v, q if sinks_N is None else sinks_N, q if segments_BS is None else segments_BS, out, lse_BNS,
            *shape.sizes, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            SINKS=sinks_N is not None, SEGMENTS=segments_BS is not None, WIDEN=INTERPRETED, ROWS=rows, KEYS=keys,
            WIDTH=tile_width(shape.width), VALUE=tile_width(shape.value_width),
            num_warps=8 if rows == 128 else 4, num_stages=3,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, sinks_N, segments_BS, out, lse_BNS)
        ctx.shape = shape
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_N, segments_BS, out, lse_BNS = ctx.saved_tensors
        grad_q, grad_k, grad_v, delta_BNS = gradients(grads[0], q, k, v, segments_BS, out, lse_BNS, ctx.shape)
        grad_sinks = None
        if sinks_N is not None and ctx.needs_input_grad[3]:
            shares_BNS = (sinks_N.float()[:, None] - lse_BNS).exp() * delta_BNS
            grad_sinks = -shares_BNS.sum(dim=(0, 2)).to(sinks_N.dtype)
        return grad_q, grad_k, grad_v, grad_sinks, None, None


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, sinks_ptr, segments_ptr, out_ptr, lse_ptr,
    seq, num_heads, heads_per_group, batch, width, value_width, scale, left, right,
    q_s, q_b, q_n, k_s, k_b, k_n, v_s, v_b, v_n,
    SINKS: tl.constexpr, SEGMENTS: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # the rows that see most go first
    b, n = (tl.program_id(1) // num_heads).to(tl.int64), (tl.program_id(1) % num_heads).to(tl.int64)
    group = n // heads_per_group
    rows = first + tl.arange(0, ROWS)
    q = load_rows(q_ptr + b * q_b + n * q_n, q_s, rows, seq, width, WIDTH, True)
    k_ptr += b * k_b + group * k_n
    v_ptr += b * v_b + group * v_n
    segments_ptr += b * seq
    of_rows = rows
    if SEGMENTS:
        of_rows = tl.load(segments_ptr + rows, mask=rows < seq, other=-1)
    # base 2: exp2 is what the machine has
    factor = scale * 1.4426950408889634
    total = tl.zeros((ROWS,), dtype=tl.float32)
    # the lowest finite number, not minus infinity: minus infinity minus itself is not a number
    peak = tl.full((ROWS,), -3.4028234663852886e38, dtype=tl.float32)
    if SINKS:
        peak = tl.full((ROWS,), 1.0, dtype=tl.float32) * tl.load(sinks_ptr + n).to(tl.float32) * 1.4426950408889634
        total += 1.0
    out = tl.zeros((ROWS, VALUE), dtype=tl.float32)
    ends = stretches(first, ROWS, left, right, seq, KEYS, SEGMENTS)
    for part in tl.static_range(3):
        for at in range(ends[part], tl.minimum(ends[part + 1], ends[3]), KEYS):
            keys = at + tl.arange(0, KEYS)
            k = load_rows(k_ptr, k_s, keys, seq, width, WIDTH, part != 1)
            logits = dot(q, tl.trans(k), None, WIDEN) * factor
            if part != 1:
                seen = visible(rows, keys, of_rows, segments_ptr, seq, left, right, SEGMENTS)
                logits = tl.where(seen, logits, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(logits, axis=1))
            probs = tl.exp2(logits - new_peak[:, None])
            shrink = tl.exp2(peak - new_peak)
            total = total * shrink + tl.sum(probs, axis=1)
            v = load_rows(v_ptr, v_s, keys, seq, value_width, VALUE, part != 1)
            out = dot(probs.to(v.dtype), v, out * shrink[:, None], WIDEN)
            peak = new_peak
    total = tl.where(rows < seq, total, 1.0)  # rows past the last see nothing
    out = out / total[:, None]
    lse = (peak + tl.log2(total)) * 0.6931471805599453
    dims = tl.arange(0, VALUE)
    place = out_ptr + ((rows.to(tl.int64) * batch + b) * num_heads + n)[:, None] * value_width + dims[None, :]
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=(rows < seq)[:, None] & (dims < value_width)[None, :])
    tl.store(lse_ptr + (b * num_heads + n) * seq + rows, lse, mask=rows < seq)
