"""Triton kernels that permute tokens to expert-sorted rows, unpermute rows, and gather router probabilities.

All ops are deterministic: they use no atomics and sum in a fixed order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends.triton.launch import cdiv, power_of_two, rows_of
from megatron_moe.kernels.ops import RowIndex
from megatron_moe.kernels.permute import PermuteKernels
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.parallel.autograd_function import AutogradFunction

COPY_TILE = 2048
"""Maximum number of elements of one row that a Triton program copies or sums."""


def permute(tokens_TH: Tensor, index: RowIndex) -> Tensor:
    return PermuteKernels(_gather, sum_rows).permute(tokens_TH, index)


def unpermute(rows_RH: Tensor, index: RowIndex, num_tokens: int) -> Tensor:
    return PermuteKernels(_gather, sum_rows).unpermute(rows_RH, index, num_tokens)


def gather_probs(probs: Tensor, index: RowIndex) -> Tensor:
    if index.rows_TK is None:
        return reference.gather_probs(probs, index)
    return _GatherProbs.apply(probs, index)


class _GatherProbs(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, probs_TK: Tensor, index: RowIndex) -> Tensor:
        ctx.rows_TK = index.rows_TK
        return _pick(probs_TK, index.choice_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _pick(grads[0], ctx.rows_TK), None


def _pick(values: Tensor, positions: Tensor) -> Tensor:
    """Gathers `values.flatten()[positions]`; the result is 0 where `positions` is -1."""
    out = torch.empty(positions.shape, device=values.device, dtype=values.dtype)
    if out.numel():
        grid = (cdiv(out.numel(), 1024),)
        _pick_values[grid](values.contiguous(), positions.contiguous(), out, out.numel(), BLOCK=1024)
    return out


def _gather(tokens_TH: Tensor, index: RowIndex) -> Tensor:
    """Gathers tokens [T, H] to rows [R, H]; padding rows are 0. Each program copies one token to all its rows."""
    assert index.rows_TK is not None, "a dense routing index has no row per choice"
    tokens_TH = rows_of(tokens_TH)
    num_rows, (num_tokens, width) = len(index.token_R), tokens_TH.shape
    rows_RH = torch.empty(num_rows, width, device=tokens_TH.device, dtype=tokens_TH.dtype)
    if rows_RH.numel():
        columns = min(power_of_two(width), COPY_TILE)
        num_programs = max(num_tokens, 1)
        each = cdiv(num_rows, num_programs)
        _copy_tokens[(num_programs, cdiv(width, columns))](
            tokens_TH, index.rows_TK.contiguous(), index.token_R, rows_RH, num_tokens, num_rows, width,
            tokens_TH.stride(0), each, EACH=power_of_two(each), TOPK=index.rows_TK.shape[1], COLUMNS=columns,
        )  # fmt: skip
    return rows_RH


def sum_rows(rows_RH: Tensor, index: RowIndex) -> Tensor:
    """Sums the rows [R, H] of each token in fp32, in the order of the token's choices -> [T, H]."""
    assert index.rows_TK is not None, "a dense routing index has no row per choice"
    rows_RH = rows_of(rows_RH)
    num_tokens, topk = index.rows_TK.shape
    width = rows_RH.shape[1]
    tokens_TH = torch.empty(num_tokens, width, device=rows_RH.device, dtype=rows_RH.dtype)
    if tokens_TH.numel():
        columns = min(power_of_two(width), COPY_TILE)
        _sum_choices[(num_tokens, cdiv(width, columns))](
            rows_RH, index.rows_TK.contiguous(), tokens_TH, width, rows_RH.stride(0), TOPK=topk, COLUMNS=columns,
            num_warps=8,
        )  # fmt: skip
    return tokens_TH


@triton.jit
def _pick_values(values_ptr, positions_ptr, out_ptr, num, BLOCK: tl.constexpr):
    each = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    positions = tl.load(positions_ptr + each, mask=each < num, other=-1)
    tl.store(out_ptr + each, tl.load(values_ptr + positions, mask=positions >= 0, other=0.0), mask=each < num)


@triton.jit
def _copy_tokens(
    tokens_ptr, positions_ptr, token_ptr, rows_ptr, num_tokens, num_rows, width, stride, rows_each,
    EACH: tl.constexpr, TOPK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    # Every program writes zeros to the padding rows in its part of the rows. It first loads the tokens of the whole
    # part at once, because most rows contain a token.
    own = token * rows_each + tl.arange(0, EACH)
    requested = (tl.arange(0, EACH) < rows_each) & (own < num_rows)
    some_empty = tl.min(tl.load(token_ptr + own, mask=requested, other=0), axis=0) < 0
    if token < num_tokens:
        values = tl.load(tokens_ptr + token * stride + columns, mask=inside, other=0.0)
        for choice in tl.static_range(TOPK):
            row = tl.load(positions_ptr + token * TOPK + choice)
            tl.store(rows_ptr + row * width + columns, values, mask=inside & (row >= 0))
    if some_empty:
        for number in range(rows_each):
            row = token * rows_each + number
            if tl.load(token_ptr + row, mask=row < num_rows, other=0) < 0:
                tl.store(rows_ptr + row * width + columns, tl.zeros((COLUMNS,), rows_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sum_choices(
    rows_ptr, positions_ptr, tokens_ptr, width, stride, TOPK: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for choice in tl.static_range(TOPK):  # unrolled, so that the loads of all choices are in flight at once
        row = tl.load(positions_ptr + token * TOPK + choice)
        mask = (columns < width) & (row >= 0)
        total += tl.load(rows_ptr + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(tokens_ptr + token * width + columns, total.to(tokens_ptr.dtype.element_ty), mask=columns < width)
