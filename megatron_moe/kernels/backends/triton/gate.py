"""Router GEMM: fp32 logits from bf16 hidden states and weights, and both gradients in one pass over the tokens.

A product of two bf16 numbers is exact in fp32, and an fp32 gradient is the sum of three bf16 numbers. bf16 tensor cores
with fp32 accumulation therefore give fp32 accuracy in forward and backward. fp32 operands would not use tensor cores.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends.torch_native import backend as torch_native
from megatron_moe.kernels.backends.triton.launch import (
    INTERPRETED,
    cdiv,
    dot,
    num_sms,
    power_of_two,
    rows_of,
    weight_grad,
)
from megatron_moe.parallel.autograd_function import AutogradFunction


class Tile(NamedTuple):
    """Maximum tile sizes of a program, with launch options; `columns` are hidden dimensions."""

    tokens: int
    experts: int
    columns: int
    warps: int
    stages: int


FORWARD = Tile(tokens=64, experts=128, columns=128, warps=4, stages=4)
BACKWARD = Tile(tokens=64, experts=128, columns=128, warps=8, stages=3)
"""Backward tile. A program keeps sums for all experts in registers. With more than 128 experts, torch is faster."""
BACKWARD_PROGRAMS = 1
"""Backward programs per SM; registers limit it to one."""
PARTS = 3
"""Number of bf16 numbers into which an fp32 gradient is split: 3 x 8 bits represent the 24 bits of the mantissa."""
_LEAST = 16
"""Minimum number of rows and columns of a tile that tensor cores can multiply."""


def router_logits(hidden_TH: Tensor, weight_EH: Tensor, dtype: torch.dtype) -> Tensor:
    """See `Kernels.router_logits`. Requires bf16 inputs, fp32 logits and at most 128 experts; otherwise uses torch."""
    is_fused = hidden_TH.dtype is weight_EH.dtype is torch.bfloat16 and dtype is torch.float32
    if not is_fused or len(weight_EH) > BACKWARD.experts:
        return torch_native.router_logits(hidden_TH, weight_EH, dtype)
    return _RouterGemm.apply(hidden_TH, weight_EH)


class _RouterGemm(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_EH: Tensor) -> Tensor:
        hidden_TH = rows_of(hidden_TH)
        ctx.save_for_backward(hidden_TH)
        ctx.weight = weight_EH
        return _logits(hidden_TH, weight_EH)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_TH,) = ctx.saved_tensors
        return _gradients(rows_of(grads[0]), hidden_TH, ctx.weight)


def _logits(hidden_TH: Tensor, weight_EH: Tensor) -> Tensor:
    (num_tokens, width), num_experts = hidden_TH.shape, len(weight_EH)
    logits_TE = torch.empty(num_tokens, num_experts, device=hidden_TH.device, dtype=torch.float32)
    experts, columns = _fitted(FORWARD.experts, num_experts), _fitted(FORWARD.columns, width)
    if num_tokens:
        # programs of the same tokens are adjacent in the grid, so that all but the first read the tokens from the cache
        _gate_forward[(cdiv(num_experts, experts), cdiv(num_tokens, FORWARD.tokens))](
            hidden_TH, weight_EH, logits_TE, num_tokens, num_experts, width, hidden_TH.stride(0), weight_EH.stride(0),
            WIDEN=INTERPRETED, TOKENS=FORWARD.tokens, EXPERTS=experts, COLUMNS=columns, WHOLE=width % columns == 0,
            num_warps=FORWARD.warps, num_stages=FORWARD.stages,
        )  # fmt: skip
    return logits_TE


def _gradients(grad_TE: Tensor, hidden_TH: Tensor, weight_EH: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of the hidden states and of the weight, each rounded once. The second is None if it was
    added to the gradient buffer."""
    num_experts, width = weight_EH.shape
    experts, columns = _fitted(BACKWARD.experts, num_experts), _fitted(BACKWARD.columns, width)
    most_segments = BACKWARD_PROGRAMS * num_sms(hidden_TH.device) // cdiv(width, columns)
    segments = max(min(most_segments, cdiv(len(hidden_TH), BACKWARD.tokens)), 1)
    grad_hidden_TH = torch.empty_like(hidden_TH, memory_format=torch.contiguous_format)
    shares_PEH = torch.empty(segments, num_experts, width, device=hidden_TH.device, dtype=torch.float32)
    # programs of the same tokens are adjacent in the grid, so that all but the first read the gradient from the cache
    _gate_backward[(cdiv(width, columns), segments)](
        grad_TE, hidden_TH, weight_EH, grad_hidden_TH, shares_PEH, len(hidden_TH), num_experts, width,
        grad_TE.stride(0), hidden_TH.stride(0), weight_EH.stride(0),
        WIDEN=INTERPRETED, PARTS=PARTS, EXPERTS=experts, TOKENS=BACKWARD.tokens, COLUMNS=columns,
        STAGES=BACKWARD.stages, num_warps=BACKWARD.warps,
    )  # fmt: skip
    return grad_hidden_TH, weight_grad(shares_PEH.view(segments, -1), weight_EH)


def _fitted(most: int, number: int) -> int:
    return min(most, max(power_of_two(number), _LEAST))


@triton.jit
def _gate_forward(
    hidden_ptr, weight_ptr, logits_ptr, num_tokens, num_experts, width, hidden_stride, weight_stride,
    WIDEN: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    tokens, columns = tl.arange(0, TOKENS), tl.arange(0, COLUMNS)
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    first = tl.program_id(1).to(tl.int64) * TOKENS
    held_tokens, held_experts = (tokens < num_tokens - first)[:, None], (experts < num_experts)[None, :]
    logits = tl.zeros((TOKENS, EXPERTS), dtype=tl.float32)
    for start in range(0, width, COLUMNS):
        here = start + columns
        held_hidden, held_weight = held_tokens, held_experts
        if not WHOLE:
            held_hidden &= (here < width)[None, :]
            held_weight &= (here < width)[:, None]
        pointers = hidden_ptr + first * hidden_stride + tokens[:, None] * hidden_stride + here[None, :]
        hidden = tl.load(pointers, mask=held_hidden, other=0.0)
        weight = tl.load(weight_ptr + experts[None, :] * weight_stride + here[:, None], mask=held_weight, other=0.0)
        logits = dot(hidden, weight, logits, WIDEN)
    pointers = logits_ptr + first * num_experts + tokens[:, None] * num_experts + experts[None, :]
    tl.store(pointers, logits, mask=held_tokens & held_experts)


@triton.jit
def _gate_backward(
    grad_ptr, hidden_ptr, weight_ptr, grad_hidden_ptr, shares_ptr, num_tokens, num_experts, width,
    grad_stride, hidden_stride, weight_stride,
    WIDEN: tl.constexpr, PARTS: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # Columns are the first dimension of every matmul, so the split gradient is always the second operand. That operand
    # is read from shared memory; a first operand would be transposed in registers for each matmul.
    tokens, experts = tl.arange(0, TOKENS), tl.arange(0, EXPERTS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    held_columns = columns < width
    mask = (experts < num_experts)[:, None] & held_columns[None, :]
    weight_ptr += experts[:, None] * weight_stride + columns[None, :]
    weight = tl.trans(tl.load(weight_ptr, mask=mask, other=0.0))
    share = tl.zeros((COLUMNS, EXPERTS), dtype=tl.float32)
    # software pipelining: loads of the next tokens overlap with this tile
    for tile in tl.range(tl.program_id(1), tl.cdiv(num_tokens, TOKENS), tl.num_programs(1), num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * TOKENS
        held_tokens = (tokens < num_tokens - first)[:, None]
        held_hidden = held_tokens & held_columns[None, :]
        pointers = hidden_ptr + first * hidden_stride + tokens[:, None] * hidden_stride + columns[None, :]
        hidden = tl.trans(tl.load(pointers, mask=held_hidden, other=0.0))
        pointers = grad_ptr + first * grad_stride + tokens[:, None] * grad_stride + experts[None, :]
        rest = tl.load(pointers, mask=held_tokens & (experts < num_experts)[None, :], other=0.0)
        grad_hidden = tl.zeros((COLUMNS, TOKENS), dtype=tl.float32)
        for _ in tl.static_range(PARTS):
            part = rest.to(tl.bfloat16)
            rest -= part.to(tl.float32)
            grad_hidden = dot(weight, tl.trans(part), grad_hidden, WIDEN)
            share = dot(hidden, part, share, WIDEN)
        pointers = grad_hidden_ptr + first * width + tokens[:, None] * width + columns[None, :]
        tl.store(pointers, tl.trans(grad_hidden.to(tl.bfloat16)), mask=held_hidden)
    shares_ptr += tl.program_id(1).to(tl.int64) * num_experts * width
    tl.store(shares_ptr + experts[:, None] * width + columns[None, :], tl.trans(share), mask=mask)
