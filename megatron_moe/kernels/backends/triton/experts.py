"""Weight gradients of the experts, accumulated in fp32 straight into the gradient buffer.

One program makes one tile of one expert's gradient from that expert's rows; the offsets stay on the device. torch's
grouped product gives bf16 alone, which would cost a rounding and three more passes over the buffer.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels import reference
from megatron_moe.kernels.backends.triton.launch import INTERPRETED
from megatron_moe.kernels.ops import GroupedPart, Operand


def grouped_weight_grad(parts: Sequence[GroupedPart], out: Tensor, accumulate: bool) -> None:
    """See `Kernels.grouped_weight_grad`."""
    for part, adds in reference.one_by_one(parts, accumulate):
        _weight_grad(*part, out, adds)


def _weight_grad(grad: Operand, rows: Operand, offsets_e: Tensor, out: Tensor, accumulate: bool) -> None:
    grad_RO, rows_RI = grad.plain(), rows.plain()
    grad_RO = grad_RO if grad_RO.stride(-1) == 1 else grad_RO.contiguous()
    rows_RI = rows_RI if rows_RI.stride(-1) == 1 else rows_RI.contiguous()
    num_experts, outputs, inputs = out.shape
    assert out.is_contiguous() and len(offsets_e) == num_experts, f"{tuple(out.shape)}, {len(offsets_e)} offsets"
    tile_o, tile_i, tile_r = 128, 128, 32
    tiles = triton.cdiv(outputs, tile_o) * triton.cdiv(inputs, tile_i)
    if tiles and num_experts:
        _expert_grad[(tiles * num_experts,)](
            grad_RO, rows_RI, offsets_e, out, outputs, inputs, grad_RO.stride(0), rows_RI.stride(0),
            ACCUMULATE=accumulate, WIDEN=INTERPRETED, WHOLE=outputs % tile_o == inputs % tile_i == 0,
            TILE_O=tile_o, TILE_I=tile_i, TILE_R=tile_r, num_warps=4, num_stages=6,
        )  # fmt: skip


@triton.jit
def _add_rows(total, grad, rows, WIDEN: tl.constexpr):
    if WIDEN:
        grad, rows = grad.to(tl.float32), rows.to(tl.float32)
    return tl.dot(tl.trans(grad), rows, total, input_precision="ieee")


@triton.jit
def _expert_grad(
    grad_ptr, rows_ptr, offsets_ptr, out_ptr, outputs, inputs, grad_stride, rows_stride,
    ACCUMULATE: tl.constexpr, WIDEN: tl.constexpr, WHOLE: tl.constexpr,
    TILE_O: tl.constexpr, TILE_I: tl.constexpr, TILE_R: tl.constexpr,
):  # fmt: skip
    num_o, num_i = tl.cdiv(outputs, TILE_O), tl.cdiv(inputs, TILE_I)
    expert = (tl.program_id(0) // (num_o * num_i)).to(tl.int64)
    tile = tl.program_id(0) % (num_o * num_i)
    o = (tile % num_o) * TILE_O + tl.arange(0, TILE_O)
    i = (tile // num_o) * TILE_I + tl.arange(0, TILE_I)
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0).to(tl.int64)
    end = tl.load(offsets_ptr + expert).to(tl.int64)
    r = start + tl.arange(0, TILE_R)
    grad_ptrs = grad_ptr + r[:, None] * grad_stride + o[None, :]
    rows_ptrs = rows_ptr + r[:, None] * rows_stride + i[None, :]
    place = out_ptr + expert * outputs * inputs + o[:, None].to(tl.int64) * inputs + i[None, :]
    inside = (o < outputs)[:, None] & (i < inputs)[None, :]
    if ACCUMULATE:
        total = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    else:
        total = tl.zeros((TILE_O, TILE_I), dtype=tl.float32)
    num_whole = ((end - start) // TILE_R).to(tl.int32)
    for _ in range(num_whole):
        if WHOLE:
            grad, rows = tl.load(grad_ptrs), tl.load(rows_ptrs)
        else:
            grad = tl.load(grad_ptrs, mask=(o < outputs)[None, :], other=0.0)
            rows = tl.load(rows_ptrs, mask=(i < inputs)[None, :], other=0.0)
        total = _add_rows(total, grad, rows, WIDEN)
        grad_ptrs += TILE_R * grad_stride
        rows_ptrs += TILE_R * rows_stride
    # behind the last row of the expert stand those of the next one
    held = (r + num_whole * TILE_R < end)[:, None]
    grad = tl.load(grad_ptrs, mask=held & (o < outputs)[None, :], other=0.0)
    rows = tl.load(rows_ptrs, mask=held & (i < inputs)[None, :], other=0.0)
    total = _add_rows(total, grad, rows, WIDEN)
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=inside)
