"""AdamW over flat buffers (Loshchilov and Hutter, arXiv 1711.05101) in one pass, for all state formats; sums of the
gradients of several ranks.

The formats are those of `precision/optimizer_state.py`. Every program processes whole blocks of 128 elements, which
share a scale. Rounding to 16 and 8 bits uses integer arithmetic or conversions that agree with torch. The interpreter
therefore produces the same bits, except for bf16 moments, which it truncates.
"""

import math
import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends.triton.launch import cdiv
from megatron_moe.kernels.ops import AdamWState, AdamWStep
from megatron_moe.precision import optimizer_state
from megatron_moe.precision.optimizer_state import PackedState

BLOCK = 1024
"""Elements per program."""
SUM_BLOCK = 4096
"""Elements per program of `sum_contributions_`. Its programs are short, so that GEMMs on another stream start soon on
all SMs."""
PLAIN, FP16, FP8, REMAINDER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
SCALED = tl.constexpr(optimizer_state.BLOCK)
LEAST_EXPONENT = tl.constexpr(optimizer_state.LEAST_EXPONENT)


def adamw_(
    master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, move: AdamWStep, weights: Tensor | None = None
) -> None:
    """See `Kernels.adamw_`. The gradient is not modified."""
    state = AdamWState(*(PackedState("plain", tensor) for tensor in (master, exp_avg, exp_avg_sq)))
    adamw_packed_(state, grad, move, weights)


def adamw_packed_(
    state: AdamWState, grad: Tensor, move: AdamWStep, weights: Tensor | None = None, first: int = 0
) -> None:
    """See `Kernels.adamw_packed_`. The gradient is not modified."""
    master = state.master
    if not master.size:
        return
    as_bits = weights is not None and weights.dtype is torch.bfloat16
    rounded = master.data if weights is None else weights.view(torch.int16) if as_bits else weights
    _adamw[(cdiv(master.size, BLOCK),)](
        *(each.data for each in state), grad, rounded,
        *(each.data if each.exponents is None else each.exponents for each in state),
        move.grad_scale, *(flag.view(torch.uint8) for flag in (move.apply_update, move.nonfinite)), move.step,
        master.size, first,
        *_log2(move.beta1), *_log2(move.beta2), move.lr, move.beta1, move.beta2, move.eps, move.weight_decay,
        *(_FORMATS.index(each.format) for each in state), state.exp_avg_sq.root,
        ROUNDED=weights is not None, AS_BITS=as_bits, BLOCKED=any(each.exponents is not None for each in state),
        BLOCK=BLOCK,
    )  # fmt: skip


_FORMATS = ("plain", "fp16", "fp8", "remainder")
"""State formats in the order of the kernel constants (PLAIN, FP16, FP8, REMAINDER)."""


def _log2(beta: float) -> tuple[float, float]:
    """Base-2 logarithm of beta as two summands (high, low), because one fp32 kernel argument is too inaccurate."""
    exact = math.log2(max(beta, 1e-300))
    high = struct.unpack("f", struct.pack("f", exact))[0]
    return high, exact - high


@triton.jit
def _adamw(
    master_ptr, first_ptr, second_ptr, grad_ptr, weights_ptr, master_exp_ptr, first_exp_ptr, second_exp_ptr,
    scale_ptr, proceed_ptr, nonfinite_ptr, step_ptr, num, number, log1_high, log1_low, log2_high, log2_low,
    lr, beta1, beta2, eps, weight_decay,
    MASTER: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, ROOT: tl.constexpr, ROUNDED: tl.constexpr,
    AS_BITS: tl.constexpr, BLOCKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(proceed_ptr) != 0:
        scale, step = tl.load(scale_ptr).to(tl.float32), tl.load(step_ptr)
        correction1, correction2 = _correction(log1_high, log1_low, step), _correction(log2_high, log2_low, step)
        start = tl.program_id(0).to(tl.int64) * BLOCK
        blocks = start // SCALED + tl.arange(0, BLOCK // SCALED)
        if BLOCKED:
            each = blocks[:, None] * SCALED + tl.arange(0, SCALED)[None, :]
        else:
            each = start + tl.arange(0, BLOCK)
        mask, here = each < num, blocks * SCALED < num
        grad = tl.load(grad_ptr + each, mask=mask, other=0.0).to(tl.float32) * scale
        first = _unpacked(first_ptr, first_exp_ptr, each, mask, blocks, here, FIRST, False)
        second = _unpacked(second_ptr, second_exp_ptr, each, mask, blocks, here, SECOND, ROOT)
        if MASTER == REMAINDER:
            master = join_remainder(master_ptr, weights_ptr, each, mask)
        else:
            master = _unpacked(master_ptr, master_exp_ptr, each, mask, blocks, here, MASTER, False)
        first = beta1 * first + (1.0 - beta1) * grad
        second = beta2 * second + (1.0 - beta2) * grad * grad
        update = first / correction1 / (tl.sqrt(second / correction2) + eps)
        master = master * (1.0 - lr * weight_decay) - lr * update
        largest = tl.maximum(
            stored_magnitude_bits(first, first_ptr, FIRST), stored_magnitude_bits(second, second_ptr, SECOND)
        )
        _pack(first, first_ptr, first_exp_ptr, each, mask, blocks, here, number, step, 0, FIRST, False)
        _pack(second, second_ptr, second_exp_ptr, each, mask, blocks, here, number, step, 1, SECOND, ROOT)
        if MASTER == REMAINDER:
            store_remainder(master, master_ptr, each, mask)
        else:
            master = _pack(
                master, master_ptr, master_exp_ptr, each, mask, blocks, here, number, step, 2, MASTER, False
            )  # fmt: skip
        if ROUNDED:
            largest = tl.maximum(largest, store_weights(master, weights_ptr, each, mask, AS_BITS))
        else:
            largest = tl.maximum(largest, stored_magnitude_bits(master, master_ptr, MASTER))
        mark_nonfinite(largest, mask, nonfinite_ptr)


@triton.jit
def stored_magnitude_bits(wide, ptr, FORMAT: tl.constexpr):
    """Bit patterns of the absolute values as fp32; inf and nan have patterns of at least 0x7F800000. PLAIN values are
    first rounded to the stored dtype, in which they may overflow. Other formats cover the full range of fp32."""
    if FORMAT == PLAIN:
        wide = wide.to(ptr.dtype.element_ty).to(tl.float32)
    return wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _correction(log_high, log_low, step):
    """1 - beta^step in fp32, computed in fp64 because beta^step in fp32 is too inaccurate near 1."""
    log = tl.cast(log_high, tl.float64) + tl.cast(log_low, tl.float64)
    return (1.0 - tl.exp2(log * step.to(tl.float64))).to(tl.float32)


@triton.jit
def _unpacked(ptr, exponents_ptr, each, mask, blocks, here, FORMAT: tl.constexpr, ROOT: tl.constexpr):
    """Loads state and unpacks it to fp32, as `optimizer_state.unpack` does."""
    if FORMAT == PLAIN:
        wide = tl.load(ptr + each, mask=mask, other=0.0).to(tl.float32)
    else:
        exponents = tl.load(exponents_ptr + blocks, mask=here, other=0).to(tl.int32)
        if FORMAT == FP16:
            wide = tl.load(ptr + each, mask=mask, other=0.0).to(tl.float32)
        else:
            wide = _from_e4m3(tl.load(ptr + each, mask=mask, other=0).to(tl.int32))
        wide = wide * _power_of_two(exponents)[:, None]
        if ROOT:
            wide = wide * wide
    return wide


@triton.jit
def _pack(
    wide, ptr, exponents_ptr, each, mask, blocks, here, number, step, SALT: tl.constexpr, FORMAT: tl.constexpr,
    ROOT: tl.constexpr,
):  # fmt: skip
    """Packs the fp32 values `wide`, as `optimizer_state.pack` does, and stores them. If `wide` are master weights,
    the caller rounds the returned values to parameters: `wide` for PLAIN, the stored values for FP16."""
    if FORMAT == PLAIN:
        tl.store(ptr + each, wide.to(ptr.dtype.element_ty), mask=mask)
    else:
        TOP: tl.constexpr = 8 if FORMAT == FP8 else 15
        SLACK: tl.constexpr = 0x1FFFFF if FORMAT == FP8 else 0x1FFF
        if ROOT:
            wide = tl.sqrt_rn(wide)
        largest = tl.max(tl.abs(wide), axis=1).to(tl.int32, bitcast=True)
        exponents = tl.maximum(((largest + SLACK) >> 23) - 127 - TOP, LEAST_EXPONENT)
        tl.store(exponents_ptr + blocks, exponents.to(tl.int8), mask=here)
        scaled = wide * _power_of_two(-exponents)[:, None]
        if FORMAT == FP8:
            codes = _to_e4m3(scaled, _dither(number + each, step, SALT))
            if ROOT:
                codes = tl.where((codes == 0) & (wide > 0), 1, codes)
            tl.store(ptr + each, codes.to(tl.uint8), mask=mask)
        else:
            narrow = scaled.to(tl.float16)
            if ROOT:
                narrow = tl.where((narrow == 0) & (wide > 0), 5.960464477539063e-08, narrow.to(tl.float32))
                narrow = narrow.to(tl.float16)
            tl.store(ptr + each, narrow, mask=mask)
            wide = narrow.to(tl.float32) * _power_of_two(exponents)[:, None]
    return wide


@triton.jit
def bf16_bits(wide):
    """Rounds fp32 to bf16, with ties away from zero, as `optimizer_state.round_weights` does. Returns the bf16 bits
    in the low half of an int32."""
    away = (wide.to(tl.int32, bitcast=True) + 0x8000) >> 16
    return tl.where(wide != wide, 0x7FC0, away)


@triton.jit
def join_remainder(remainder_ptr, weights_ptr, each, mask):
    """Returns fp32 master weights, composed of bf16 weights (int16 bits) and the remainders that `store_remainder`
    stored."""
    high = tl.load(weights_ptr + each, mask=mask, other=0).to(tl.int32) << 16
    rest = tl.load(remainder_ptr + each, mask=mask, other=0).to(tl.int32)
    return (high + rest).to(tl.float32, bitcast=True)


@triton.jit
def store_remainder(master, remainder_ptr, each, mask):
    """Stores the remainder of fp32 master weights, which is the difference between their bits and those of the bf16
    weights, as int16."""
    rest = master.to(tl.int32, bitcast=True) - (bf16_bits(master) << 16)
    tl.store(remainder_ptr + each, rest.to(tl.int16), mask=mask)


@triton.jit
def store_weights(master, weights_ptr, each, mask, AS_BITS: tl.constexpr):
    """Stores the fp32 master weights as parameters, bf16 ones as int16 bits. Returns the `stored_magnitude_bits` of the
    stored values."""
    if AS_BITS:
        high = bf16_bits(master)
        tl.store(weights_ptr + each, high.to(tl.int16), mask=mask)
        stored = (high & 0x7FFF) << 16
    else:
        tl.store(weights_ptr + each, master.to(weights_ptr.dtype.element_ty), mask=mask)
        stored = stored_magnitude_bits(master, weights_ptr, PLAIN)
    return stored


@triton.jit
def mark_nonfinite(sizes, mask, nonfinite_ptr):
    """Sets a flag if one of the `stored_magnitude_bits` is that of inf or nan."""
    tl.store(nonfinite_ptr, 1, mask=tl.max(tl.where(mask, sizes, 0)) >= 0x7F800000)


@triton.jit
def _power_of_two(exponents):
    return ((exponents + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _from_e4m3(codes):
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = (mantissa + 8).to(tl.float32) * _power_of_two(exponent - 10)
    size = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    return tl.where(codes > 127, -size, size)


@triton.jit
def _to_e4m3(scaled, dither):
    size = tl.abs(scaled)
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, -6)
    units = size * _power_of_two(3 - exponent)
    number = tl.floor(units + dither).to(tl.int32)
    codes = tl.minimum(number + (exponent + 6) * 8, 126)
    return tl.where(scaled < 0, codes + 128, codes)


@triton.jit
def _dither(number, step, SALT: tl.constexpr):
    """Random numbers in [0, 1) for stochastic rounding, equal to those of `precision.dither`. Computed with
    32-bit integers, whose products are much faster than 64-bit ones."""
    mixed = number.to(tl.uint32) * 0x9E3779B1 + step.to(tl.uint32) * 0x85EBCA77 + (SALT * 0xC2B2AE3D) % 0x100000000
    mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D
    mixed = (mixed ^ (mixed >> 12)) * 0x297A2D39
    return (mixed >> 16).to(tl.float32) * 1.52587890625e-05


def sum_contributions_(out: Tensor, own: Tensor, received_PN: Tensor, rank: int, *, accumulate: bool) -> None:
    if len(out):
        _sum_contributions[(cdiv(len(out), SUM_BLOCK),)](
            out, own, received_PN, len(out), received_PN.stride(0),
            RANK=rank, NUM_RANKS=len(received_PN) + 1, ACCUMULATE=accumulate, BLOCK=SUM_BLOCK, num_warps=8,
        )  # fmt: skip


@triton.jit
def _sum_contributions(
    out_ptr, own_ptr, received_ptr, num, stride,
    RANK: tl.constexpr, NUM_RANKS: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    each = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = each < num
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(NUM_RANKS):
        if rank == RANK:
            values = tl.load(own_ptr + each, mask=mask)
        else:
            row = rank - (rank > RANK)
            values = tl.load(received_ptr + row * stride + each, mask=mask)
        total = values.to(tl.float32) if rank == 0 else total + values.to(tl.float32)
    if ACCUMULATE:
        total = tl.load(out_ptr + each, mask=mask).to(tl.float32) + total
    tl.store(out_ptr + each, total.to(out_ptr.dtype.element_ty), mask=mask)
