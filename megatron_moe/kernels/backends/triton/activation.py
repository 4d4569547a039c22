"""MLP activations, gated or not, times a probability per row. Forward and backward each take one pass over memory.

Only the input and the probabilities are saved; backward recomputes the rest.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.config.moe import ActivationConfig
from megatron_moe.kernels.backends.triton.launch import power_of_two, rows_of

FORWARD_TILE, BACKWARD_TILE, NARROW_BACKWARD_TILE = (2048, 1024), (1024, 1024), (1024, 256)
"""(elements per tile, maximum columns per tile); the fastest on an H200. `NARROW_BACKWARD_TILE` is for output widths
up to 1024."""

NO_CLAMP = float("inf")


def activation(x_RF: Tensor, probs_R: Tensor | None, config: ActivationConfig) -> Tensor:
    """See `Kernels.activation`."""
    out: Tensor = _Activation.apply(x_RF, probs_R, config)  # type: ignore[no-untyped-call]
    return out


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor | None, config: ActivationConfig) -> Tensor:
        x_RF, probs_R = rows_of(x), None if probs is None else probs.reshape(-1).contiguous()
        num_rows, width = x_RF.shape[0], x_RF.shape[1] // config.fan
        out_RF = torch.empty(num_rows, width, device=x.device, dtype=x.dtype)
        if out_RF.numel():
            rows, columns = _tile(width, *FORWARD_TILE)
            _activation_forward[(triton.cdiv(num_rows, rows), triton.cdiv(width, columns))](
                x_RF, x_RF if probs_R is None else probs_R, out_RF, num_rows, width, x_RF.stride(0),
                config.linear_offset, NO_CLAMP if config.clamp is None else config.clamp, KIND=config.kind,
                GATED=config.gated,
                CLAMPED=config.clamp is not None, WEIGHTED=probs_R is not None, ROWS=rows, COLUMNS=columns,
            )  # fmt: skip
        ctx.save_for_backward(x_RF, probs_R)
        ctx.config = config
        return out_RF.view(*x.shape[:-1], width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_RF, probs_R = ctx.saved_tensors
        config: ActivationConfig = ctx.config
        grad_RF = rows_of(grads[0])
        num_rows, width = grad_RF.shape
        grad_x_RF = torch.empty_like(x_RF, memory_format=torch.contiguous_format)
        grad_probs_R = None if probs_R is None else torch.empty_like(probs_R)
        if grad_RF.numel():
            rows, columns = _tile(width, *(BACKWARD_TILE if width > 1024 else NARROW_BACKWARD_TILE))
            _activation_backward[(triton.cdiv(num_rows, rows),)](
                grad_RF, x_RF, x_RF if probs_R is None else probs_R, grad_x_RF,
                grad_x_RF if grad_probs_R is None else grad_probs_R, num_rows, width, grad_RF.stride(0), x_RF.stride(0),
                config.linear_offset, NO_CLAMP if config.clamp is None else config.clamp, KIND=config.kind,
                GATED=config.gated,
                CLAMPED=config.clamp is not None, WEIGHTED=probs_R is not None, ROWS=rows, COLUMNS=columns,
            )  # fmt: skip
        shape = grads[0].shape[:-1]
        return (grad_x_RF.view(*shape, x_RF.shape[1]), None if grad_probs_R is None else grad_probs_R.view(shape), None)


def _tile(width: int, elements: int, most_columns: int) -> tuple[int, int]:
    """Returns (rows, columns) of a tile of `elements` elements; the columns cover the width with little padding."""
    columns = min(power_of_two(width), most_columns)
    while columns > 128 and width % columns and width % columns <= columns // 2:
        columns //= 2
    return max(elements // columns, 1), columns


@triton.jit
def _value(x, KIND: tl.constexpr):
    if KIND == "silu":
        return x * tl.sigmoid(x)
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == "quick_gelu":
        return x * tl.sigmoid(1.702 * x)
    elif KIND == "relu":
        return tl.maximum(x, 0.0)
    else:
        tl.static_assert(KIND == "squared_relu")
        return tl.maximum(x, 0.0) * tl.maximum(x, 0.0)


@triton.jit
def _slope(x, KIND: tl.constexpr):
    if KIND == "silu":
        s = tl.sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    elif KIND == "gelu":
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif KIND == "gelu_tanh":
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        return s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif KIND == "quick_gelu":
        s = tl.sigmoid(1.702 * x)
        return s * (1.0 + 1.702 * x * (1.0 - s))
    elif KIND == "relu":
        return tl.where(x > 0.0, 1.0, 0.0)
    else:
        tl.static_assert(KIND == "squared_relu")
        return 2.0 * tl.maximum(x, 0.0)


@triton.jit
def _activation_forward(
    x_ptr, probs_ptr, out_ptr, num_rows, width, x_stride, offset, clamp,
    KIND: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    held = inside
    if WEIGHTED:  # rows of probability 0 are padding and are not read
        probs = tl.load(probs_ptr + rows, mask=rows < num_rows, other=0.0).to(tl.float32)
        held = inside & (probs != 0.0)[:, None]
    place = x_ptr + rows[:, None] * x_stride + columns[None, :]
    x = tl.load(place, mask=held, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(place + width, mask=held, other=0.0).to(tl.float32)
        if CLAMPED:
            x = tl.minimum(x, clamp)
            up = tl.minimum(tl.maximum(up, -clamp), clamp)
        out = _value(x, KIND) * (up + offset)
    else:
        out = _value(x, KIND)
    if WEIGHTED:
        out *= probs[:, None]
    tl.store(out_ptr + rows[:, None] * width + columns[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _activation_backward(
    grad_ptr, x_ptr, probs_ptr, grad_x_ptr, grad_probs_ptr, num_rows, width, grad_stride, x_stride, offset, clamp,
    KIND: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    fan: tl.constexpr = 2 if GATED else 1
    if WEIGHTED:
        probs = tl.load(probs_ptr + rows, mask=rows < num_rows, other=0.0).to(tl.float32)
        grad_probs = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, width, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
        held = inside
        if WEIGHTED:
            held = inside & (probs != 0.0)[:, None]
        place = x_ptr + rows[:, None] * x_stride + columns[None, :]
        to_ptr = grad_x_ptr + rows[:, None] * width * fan + columns[None, :]
        grad = tl.load(grad_ptr + rows[:, None] * grad_stride + columns[None, :], mask=held, other=0.0).to(tl.float32)
        x = tl.load(place, mask=held, other=0.0).to(tl.float32)
        if GATED:
            up = tl.load(place + width, mask=held, other=0.0).to(tl.float32)
            gate = x
            linear = up + offset
            if CLAMPED:
                gate = tl.minimum(x, clamp)
                linear = tl.minimum(tl.maximum(up, -clamp), clamp) + offset
            value = _value(gate, KIND)
            if WEIGHTED:
                grad_probs += tl.sum(grad * value * linear, axis=1)
                grad *= probs[:, None]
            grad_gate = grad * linear * _slope(gate, KIND)
            grad_up = grad * value
            if CLAMPED:
                grad_gate = tl.where(x <= clamp, grad_gate, 0.0)
                grad_up = tl.where((up <= clamp) & (up >= -clamp), grad_up, 0.0)
            tl.store(to_ptr, grad_gate.to(grad_x_ptr.dtype.element_ty), mask=inside)
            tl.store(to_ptr + width, grad_up.to(grad_x_ptr.dtype.element_ty), mask=inside)
        else:
            if WEIGHTED:
                grad_probs += tl.sum(grad * _value(x, KIND), axis=1)
                grad *= probs[:, None]
            tl.store(to_ptr, (grad * _slope(x, KIND)).to(grad_x_ptr.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(grad_probs_ptr + rows, grad_probs.to(grad_probs_ptr.dtype.element_ty), mask=rows < num_rows)
