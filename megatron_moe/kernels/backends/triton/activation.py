"""MLP activations, gated or not, multiplied by an optional probability per row. Forward and backward each take one pass
over memory.

Only the input and the probabilities are saved; backward recomputes the rest. Results can be stored in FP8 directly.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.config.precision import OperandFormat
from megatron_moe.config.registry import ACTIVATIONS
from megatron_moe.kernels.backends.torch_native import backend as torch_native
from megatron_moe.kernels.backends.triton.launch import cdiv, power_of_two, rows_of
from megatron_moe.kernels.backends.triton.quantize import (
    BLOCK,
    E4M3,
    MakeColumns,
    columnwise_copy,
    empty_rows,
    quantize_constants,
    quantize_rows,
    store_tile,
)
from megatron_moe.kernels.ops import QuantizedActivationGrads
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.parallel.autograd_function import AutogradFunction
from megatron_moe.precision.quantized_tensor import QuantizedCopy, QuantizedTensor

FORWARD_TILE, BACKWARD_TILE, NARROW_BACKWARD_TILE = (2048, 1024), (1024, 1024), (1024, 256)
"""(elements per tile, maximum columns per tile), the fastest values on an H200. `NARROW_BACKWARD_TILE` is for output
widths up to 1024."""
QUANTIZED_FORWARD_TILE, QUANTIZED_BACKWARD_TILE = (2048, 256), (2048, 256)
"""Tiles for FP8 results; more rows than in bf16 tiles, because the scales of a column of blocks are contiguous."""

NO_CLAMP = float("inf")


def activation(x_RF: Tensor, probs_R: Tensor | None, config: ActivationConfig) -> Tensor:
    if not ACTIVATIONS.get(config.kind).fused:
        return torch_native.activation(x_RF, probs_R, config)
    return _FusedActivation.apply(x_RF, probs_R, config)


class _FusedActivation(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor | None, config: ActivationConfig) -> Tensor:
        x_RF, probs_R = rows_of(x), None if probs is None else probs.reshape(-1).contiguous()
        width = x_RF.shape[1] // config.fc1_width_factor
        out_RF = torch.empty(x_RF.shape[0], width, device=x.device, dtype=x.dtype)
        _forward(x_RF, probs_R, config, out_RF, FORWARD_TILE)
        ctx.save_for_backward(x_RF, probs_R)
        ctx.config = config
        return out_RF.view(*x.shape[:-1], width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_RF, probs_R = ctx.saved_tensors
        grad_x_RF = torch.empty_like(x_RF, memory_format=torch.contiguous_format)
        tile = BACKWARD_TILE if rows_of(grads[0]).shape[1] > 1024 else NARROW_BACKWARD_TILE
        grad_probs_R = _backward(grads[0], x_RF, probs_R, ctx.config, grad_x_RF, tile)
        shape = grads[0].shape[:-1]
        return (grad_x_RF.view(*shape, x_RF.shape[1]), None if grad_probs_R is None else grad_probs_R.view(shape), None)


def quantize_activation(
    x_RF: Tensor, probs_R: Tensor | None, config: ActivationConfig, fmt: OperandFormat = E4M3
) -> QuantizedTensor:
    """Activation with FP8 results: equals `quantize_rows(activation(...))` without the bf16 result in memory."""
    if not ACTIVATIONS.get(config.kind).fused:
        return quantize_rows(activation(x_RF, probs_R, config), fmt, rowwise=True, columnwise=False)
    x_RF, probs_R = rows_of(x_RF), None if probs_R is None else probs_R.contiguous()
    out = empty_rows(x_RF.shape[0], x_RF.shape[1] // config.fc1_width_factor, x_RF.device, fmt)
    _forward(x_RF, probs_R, config, out.data, QUANTIZED_FORWARD_TILE, out.scales, fmt)
    return QuantizedTensor(out, None, fmt.block, x_RF.dtype)


def quantize_activation_grad(
    grad_RF: Tensor,
    x_RF: Tensor,
    probs_R: Tensor | None,
    config: ActivationConfig,
    fmt: OperandFormat = E4M3,
    *,
    columns: OperandFormat | None = None,
    offsets_e: Tensor | None = None,
    make_columns: MakeColumns = columnwise_copy,
) -> QuantizedActivationGrads:
    """See `Kernels.quantize_activation_grad`. For gated activations, the width must be a multiple of 128, because
    no scale block may contain gradients of both halves."""
    if not ACTIVATIONS.get(config.kind).fused:
        quantize = partial(quantize_rows, make_columns=make_columns)
        return reference.quantize_activation_grad(
            grad_RF, x_RF, probs_R, config, fmt, columns=columns, offsets_e=offsets_e, quantize=quantize
        )
    x_RF, probs_R = rows_of(x_RF), None if probs_R is None else probs_R.contiguous()
    width = grad_RF.shape[-1]
    assert not config.gated or width % BLOCK == 0, f"the width {width} of a gated activation is no multiple of {BLOCK}"
    quantized = empty_rows(x_RF.shape[0], x_RF.shape[1], x_RF.device, fmt)
    grad_x_RF = torch.empty(x_RF.shape, device=x_RF.device, dtype=x_RF.dtype)
    out_RF = torch.empty(grad_RF.shape, device=x_RF.device, dtype=x_RF.dtype)
    tile = QUANTIZED_BACKWARD_TILE
    grad_probs_R = _backward(grad_RF, x_RF, probs_R, config, grad_x_RF, tile, quantized, out_RF, fmt)
    if columns is None:
        grad_x_q = QuantizedTensor(quantized, None, fmt.block, x_RF.dtype)
        return QuantizedActivationGrads(grad_x_q, grad_x_RF, grad_probs_R, out_RF)
    # Columnwise copies are made by a separate kernel. One kernel for both kinds of copies computed the gradients twice,
    # in bands that fit into registers: for 32,768 rows of 2 x 2048 it took 2.2 ms, against at most 0.35 ms without
    # columnwise copies.
    grad_columns, out_columns = (
        make_columns(each, None, len(each), None, kind, offsets_e)
        for each, kind in ((grad_x_RF, fmt), (out_RF, columns))
    )
    grad_x_q = QuantizedTensor(quantized, grad_columns, fmt.block, x_RF.dtype)
    out = QuantizedTensor(None, out_columns, columns.block, x_RF.dtype)
    return QuantizedActivationGrads(grad_x_q, None, grad_probs_R, out)


def _forward(
    x_RF: Tensor,
    probs_R: Tensor | None,
    config: ActivationConfig,
    out_RF: Tensor,
    tile: tuple[int, int],
    scales: Tensor | None = None,
    fmt: OperandFormat = E4M3,
) -> None:
    """Writes the results to `out_RF`. If `scales` is given, results are FP8 and their scales are written to
    `scales`."""
    if out_RF.numel():
        num_rows, width = out_RF.shape
        rows, columns = _tile(width if scales is None else max(width, BLOCK), *tile)
        _activation_forward[(cdiv(num_rows, rows), cdiv(width, columns))](
            x_RF, x_RF if probs_R is None else probs_R, out_RF, scales, num_rows, width, x_RF.stride(0),
            config.linear_offset, NO_CLAMP if config.clamp is None else config.clamp, KIND=config.kind,
            GATED=config.gated, CLAMPED=config.clamp is not None, WEIGHTED=probs_R is not None,
            ROWS=rows, COLUMNS=columns, **quantize_constants(fmt, x_RF.dtype),
        )  # fmt: skip


def _backward(
    grad: Tensor,
    x_RF: Tensor,
    probs_R: Tensor | None,
    config: ActivationConfig,
    grad_x_RF: Tensor,
    tile: tuple[int, int],
    quantized: QuantizedCopy | None = None,
    out_RF: Tensor | None = None,
    fmt: OperandFormat = E4M3,
) -> Tensor | None:
    """Writes the gradient of x to `grad_x_RF` and returns that of the probabilities. If given, also writes the gradient
    of x in FP8 to `quantized`, and the result of the activation to `out_RF`."""
    grad_RF = rows_of(grad)
    num_rows, width = grad_RF.shape
    grad_probs_R = None if probs_R is None else torch.empty_like(probs_R)
    if grad_RF.numel():
        rows, columns = _tile(width if quantized is None else max(width, BLOCK), *tile)
        _activation_backward[(cdiv(num_rows, rows),)](
            grad_RF, x_RF, x_RF if probs_R is None else probs_R, grad_x_RF,
            None if quantized is None else quantized.data, None if quantized is None else quantized.scales, out_RF,
            x_RF if grad_probs_R is None else grad_probs_R, num_rows, width, grad_RF.stride(0), x_RF.stride(0),
            config.linear_offset, NO_CLAMP if config.clamp is None else config.clamp, KIND=config.kind,
            GATED=config.gated, CLAMPED=config.clamp is not None, WEIGHTED=probs_R is not None,
            ROWS=rows, COLUMNS=columns, **quantize_constants(fmt, x_RF.dtype),
        )  # fmt: skip
    return grad_probs_R


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
        return _relu(x)
    else:
        tl.static_assert(KIND == "squared_relu")
        return _relu(x) * _relu(x)


@triton.jit
def _relu(x):
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _clamp(x, up, clamp):
    """Limits the gate from above and the up projection on both sides; NaN stays NaN, so that the step is rejected."""
    x = tl.minimum(x, clamp, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -clamp, propagate_nan=tl.PropagateNan.ALL)
    return x, tl.minimum(up, clamp, propagate_nan=tl.PropagateNan.ALL)


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
        return 2.0 * _relu(x)


@triton.jit
def _activation_forward(
    x_ptr, probs_ptr, out_ptr, scales_ptr, num_rows, width, x_stride, offset, clamp,
    KIND: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr, BOUND: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    mask = inside
    if WEIGHTED:  # rows of probability 0 are padding and are not read
        probs = tl.load(probs_ptr + rows, mask=rows < num_rows, other=0.0).to(tl.float32)
        mask = inside & (probs != 0.0)[:, None]
    pointers = x_ptr + rows[:, None] * x_stride + columns[None, :]
    x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(pointers + width, mask=mask, other=0.0).to(tl.float32)
        if CLAMPED:
            x, up = _clamp(x, up, clamp)
        out = _value(x, KIND) * (up + offset)
    else:
        out = _value(x, KIND)
    if WEIGHTED:
        out *= probs[:, None]
    if scales_ptr is None:
        tl.store(out_ptr + rows[:, None] * width + columns[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        out = out.to(x_ptr.dtype.element_ty)  # rounds as if the result were stored and quantised later
        first = tl.program_id(1) * COLUMNS
        store_tile(
            out, rows, first, out_ptr, scales_ptr, num_rows, width, num_rows, width, LARGEST, BOUND, POWER_OF_TWO
        )


@triton.jit
def _store_grad(
    grad, rows, first, x_ptr, out_ptr, quantized_ptr, scales_ptr, num_rows, width, end,
    LARGEST: tl.constexpr, BOUND: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """Stores a tile of the gradient of x up to column `end`; x has `width` columns. With `scales_ptr`, also stores it
    in FP8."""
    columns = first + tl.arange(0, grad.shape[1])
    inside = (rows < num_rows)[:, None] & (columns < end)[None, :]
    grad = grad.to(x_ptr.dtype.element_ty)  # rounds as if the gradient were stored and quantised later
    tl.store(out_ptr + rows[:, None] * width + columns[None, :], grad, mask=inside)
    if scales_ptr is not None:
        store_tile(
            grad, rows, first, quantized_ptr, scales_ptr, num_rows, width, num_rows, end, LARGEST, BOUND, POWER_OF_TWO
        )


@triton.jit
def _load_probs(probs_ptr, rows, end, WEIGHTED: tl.constexpr):
    """Returns the probabilities [ROWS], and a mask of the rows to read, without padding rows (probability 0)."""
    mask = rows < end
    probs = tl.full(rows.shape, 1.0, tl.float32)
    if WEIGHTED:
        probs = tl.load(probs_ptr + rows, mask=mask, other=0.0).to(tl.float32)
        mask = mask & (probs != 0.0)
    return probs, mask


@triton.jit
def _gradients(
    grad_ptr, x_ptr, probs, rows, columns, mask, width, grad_stride, x_stride, offset, clamp,
    KIND: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Returns four tiles: the gradient of the gate (of x if the activation is not gated), the gradient of the up
    projection, the result, and the gradient times the result before multiplication by the probability, whose sum over
    columns is the gradient of the probability."""
    grad = tl.load(grad_ptr + rows[:, None] * grad_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    pointers = x_ptr + rows[:, None] * x_stride + columns[None, :]
    x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(pointers + width, mask=mask, other=0.0).to(tl.float32)
        gate = x
        linear = up
        if CLAMPED:
            gate, linear = _clamp(x, up, clamp)
        linear += offset
        value = _value(gate, KIND)
        out = value * linear
        product = grad * value * linear
        if WEIGHTED:
            grad *= probs[:, None]
        grad_x = grad * linear * _slope(gate, KIND)
        grad_up = grad * value
        if CLAMPED:
            grad_x = tl.where(x <= clamp, grad_x, 0.0)
            grad_up = tl.where((up <= clamp) & (up >= -clamp), grad_up, 0.0)
    else:
        out = _value(x, KIND)
        product = grad * out
        if WEIGHTED:
            grad *= probs[:, None]
        grad_x = grad * _slope(x, KIND)
        grad_up = grad_x
    if WEIGHTED:
        out *= probs[:, None]
    return grad_x, grad_up, out, product


@triton.jit
def _activation_backward(
    grad_ptr, x_ptr, probs_ptr, grad_x_ptr, quantized_ptr, scales_ptr, out_ptr, grad_probs_ptr, num_rows, width,
    grad_stride, x_stride, offset, clamp,
    KIND: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr, BOUND: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    factor: tl.constexpr = 2 if GATED else 1
    probs, read = _load_probs(probs_ptr, rows, num_rows, WEIGHTED)
    grad_probs = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, width, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        grad_x, grad_up, out, product = _gradients(
            grad_ptr, x_ptr, probs, rows, columns, read[:, None] & (columns < width)[None, :], width,
            grad_stride, x_stride, offset, clamp, KIND, GATED, CLAMPED, WEIGHTED,
        )  # fmt: skip
        if WEIGHTED:
            grad_probs += tl.sum(product, axis=1)
        if GATED:
            _store_grad(
                grad_up, rows, start + width, x_ptr, grad_x_ptr, quantized_ptr, scales_ptr, num_rows, 2 * width,
                2 * width, LARGEST, BOUND, POWER_OF_TWO,
            )  # fmt: skip
        _store_grad(
            grad_x, rows, start, x_ptr, grad_x_ptr, quantized_ptr, scales_ptr, num_rows, factor * width, width,
            LARGEST, BOUND, POWER_OF_TWO,
        )  # fmt: skip
        if out_ptr is not None:
            inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
            out = out.to(x_ptr.dtype.element_ty)
            tl.store(out_ptr + rows[:, None] * width + columns[None, :], out, mask=inside)
    if WEIGHTED:
        tl.store(grad_probs_ptr + rows, grad_probs.to(grad_probs_ptr.dtype.element_ty), mask=rows < num_rows)
