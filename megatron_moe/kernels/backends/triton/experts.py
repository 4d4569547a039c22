"""Expert weight gradients, accumulated in fp32 in the gradient buffer.

One program computes one tile of one expert's gradient from that expert's rows of one or more microbatches; offsets stay
on the device. torch's grouped GEMM returns bf16, which would cost a rounding and three more passes over the buffer.
"""

from collections.abc import Iterator, Sequence

import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends.triton.launch import INTERPRETED, cdiv, rows_of
from megatron_moe.kernels.ops import GroupedPart

_MOST_PARTS = 4
"""Maximum number of parts (microbatches) per launch: more would enlarge the code and save little buffer traffic."""


def grouped_weight_grad(parts: Sequence[GroupedPart], out: Tensor, accumulate: bool) -> None:
    num_experts, outputs, inputs = out.shape
    assert out.is_contiguous(), f"a buffer of shape {tuple(out.shape)} and strides {out.stride()}"
    tile_o, tile_i, tile_r = 128, 128, 32
    tiles = cdiv(outputs, tile_o) * cdiv(inputs, tile_i)
    if not tiles or not num_experts:
        return
    for grads, rows, offsets, adds in _launches(parts, accumulate):
        assert all(len(each) == num_experts for each in offsets), f"{num_experts} experts, {list(map(len, offsets))}"
        _expert_grad[(tiles * num_experts,)](
            grads, rows, offsets, tuple(x.stride(0) for x in grads), tuple(x.stride(0) for x in rows),
            out, outputs, inputs,
            PARTS=len(grads), ACCUMULATE=adds, WIDEN=INTERPRETED, WHOLE=outputs % tile_o == inputs % tile_i == 0,
            TILE_O=tile_o, TILE_I=tile_i, TILE_R=tile_r, num_warps=4, num_stages=6,
        )  # fmt: skip


_Tensors = tuple[Tensor, ...]


def _launches(parts: Sequence[GroupedPart], accumulate: bool) -> Iterator[tuple[_Tensors, _Tensors, _Tensors, bool]]:
    """Yields the arguments of each launch: (gradients, rows, offsets, whether to accumulate)."""
    for first in range(0, len(parts), _MOST_PARTS):
        several = parts[first : first + _MOST_PARTS]
        yield (
            tuple(rows_of(part.grad) for part in several),
            tuple(rows_of(part.rows) for part in several),
            tuple(part.offsets_e for part in several),
            accumulate or first > 0,
        )


@triton.jit
def _add_rows(total, grad, rows, WIDEN: tl.constexpr):
    if WIDEN:
        grad, rows = grad.to(tl.float32), rows.to(tl.float32)
    return tl.dot(tl.trans(grad), rows, total, input_precision="ieee")


@triton.jit
def _add_part(
    total, grad_ptr, rows_ptr, offsets_ptr, grad_stride, rows_stride, expert, o, i, outputs, inputs,
    WIDEN: tl.constexpr, WHOLE: tl.constexpr, TILE_R: tl.constexpr,
):  # fmt: skip
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0).to(tl.int64)
    end = tl.load(offsets_ptr + expert).to(tl.int64)
    r = start + tl.arange(0, TILE_R)
    grad_ptrs = grad_ptr + r[:, None] * grad_stride + o[None, :]
    rows_ptrs = rows_ptr + r[:, None] * rows_stride + i[None, :]
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
    # the expert's last tile also covers rows of the next expert, which are masked
    mask = (r + num_whole * TILE_R < end)[:, None]
    grad = tl.load(grad_ptrs, mask=mask & (o < outputs)[None, :], other=0.0)
    rows = tl.load(rows_ptrs, mask=mask & (i < inputs)[None, :], other=0.0)
    return _add_rows(total, grad, rows, WIDEN)


@triton.jit
def _expert_grad(
    grad_ptrs, rows_ptrs, offsets_ptrs, grad_strides, rows_strides, out_ptr, outputs, inputs,
    PARTS: tl.constexpr, ACCUMULATE: tl.constexpr, WIDEN: tl.constexpr, WHOLE: tl.constexpr,
    TILE_O: tl.constexpr, TILE_I: tl.constexpr, TILE_R: tl.constexpr,
):  # fmt: skip
    num_o, num_i = tl.cdiv(outputs, TILE_O), tl.cdiv(inputs, TILE_I)
    expert = (tl.program_id(0) // (num_o * num_i)).to(tl.int64)
    tile = tl.program_id(0) % (num_o * num_i)
    o = (tile % num_o) * TILE_O + tl.arange(0, TILE_O)
    i = (tile // num_o) * TILE_I + tl.arange(0, TILE_I)
    pointers = out_ptr + expert * outputs * inputs + o[:, None].to(tl.int64) * inputs + i[None, :]
    inside = (o < outputs)[:, None] & (i < inputs)[None, :]
    if ACCUMULATE:
        total = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    else:
        total = tl.zeros((TILE_O, TILE_I), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        total = _add_part(
            total, grad_ptrs[part], rows_ptrs[part], offsets_ptrs[part], grad_strides[part], rows_strides[part],
            expert, o, i, outputs, inputs, WIDEN, WHOLE, TILE_R,
        )  # fmt: skip
    tl.store(pointers, total.to(out_ptr.dtype.element_ty), mask=inside)
