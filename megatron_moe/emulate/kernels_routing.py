"""Routing and rows: what their kernels on a GPU take and keep. See `kernels.py`."""

from typing import Any

import torch
from torch import Tensor

from megatron_moe.emulate.kernel_shapes import MOST_PROGRAMS, power_of_two, rows_of
from megatron_moe.kernels import reference
from megatron_moe.kernels.backends import torch_native
from megatron_moe.kernels.ops import RowIndex
from megatron_moe.kernels.pages import Pages
from megatron_moe.kernels.row_copies import RowCopies
from megatron_moe.specs.moe import RouterSpec

_SORT_TILE = 8192
"""Choices times experts that a program of the sort compares."""


# routing


def gate_product(hidden_TH: Tensor, weight_EH: Tensor, dtype: torch.dtype) -> Tensor:
    if not hidden_TH.dtype is weight_EH.dtype is torch.bfloat16 or dtype is not torch.float32:
        return reference.gate_product(hidden_TH, weight_EH, dtype)
    return _GateProduct.apply(hidden_TH, weight_EH)  # type: ignore[no-untyped-call,no-any-return]


class _GateProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_EH: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_TH, weight_EH)
        return hidden_TH.new_empty(hidden_TH.shape[0], weight_EH.shape[0], dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_EH = ctx.saved_tensors
        parts_T3E = torch_native.bf16_parts(grads[0])
        grad_hidden_TH = parts_T3E @ weight_EH.repeat(3, 1)
        grad_3EH = hidden_TH.new_empty(3, *weight_EH.shape, dtype=torch.float32)
        return grad_hidden_TH, grad_3EH.sum(dim=0).to(weight_EH.dtype)


def select_experts(
    logits_TE: Tensor, bias_E: Tensor | None, spec: RouterSpec, given_ids_TK: Tensor | None
) -> tuple[Tensor, Tensor]:
    if given_ids_TK is not None or not _groups_fit(spec):
        return reference.select_experts(logits_TE, bias_E, spec, given_ids_TK)
    ids_TK, probs_TK = _SelectExperts.apply(logits_TE, spec)  # type: ignore[no-untyped-call]
    return ids_TK, probs_TK


def _groups_fit(spec: RouterSpec) -> bool:
    sizes = (spec.num_groups or 1, spec.num_experts)
    return spec.group_topk is None or all(power_of_two(size) == size for size in sizes)


class _SelectExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
        logits_TE = logits_TE.contiguous()
        ids_TK = torch.empty(logits_TE.shape[0], spec.topk, device=logits_TE.device, dtype=torch.int64)
        probs_TK = torch.empty(logits_TE.shape[0], spec.topk, device=logits_TE.device, dtype=logits_TE.dtype)
        ctx.save_for_backward(logits_TE, ids_TK)
        ctx.mark_non_differentiable(ids_TK)
        return ids_TK, probs_TK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_TE, _ = ctx.saved_tensors
        return torch.empty_like(logits_TE), None


def balance_scores(logits_TE: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    scores_TE, ids_TK = _BalanceScores.apply(logits_TE, spec)  # type: ignore[no-untyped-call]
    return scores_TE, ids_TK


class _BalanceScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
        logits_TE = logits_TE.contiguous()
        ids_TK = torch.empty(logits_TE.shape[0], spec.topk, device=logits_TE.device, dtype=torch.int64)
        scores_TE = torch.empty(logits_TE.shape, device=logits_TE.device, dtype=torch.float32)
        ctx.save_for_backward(logits_TE)
        ctx.mark_non_differentiable(ids_TK)
        return scores_TE, ids_TK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (logits_TE,) = ctx.saved_tensors
        return torch.empty_like(logits_TE), None


def count_tokens(ids_TK: Tensor, num_experts: int) -> Tensor:
    return _counts(ids_TK.contiguous(), num_experts).sum(dim=0)


def _counts(ids: Tensor, num_experts: int) -> Tensor:
    """One row per program, of which each multiprocessor has one."""
    block = max(_SORT_TILE // power_of_two(num_experts), 16)
    num_programs = min(-(-ids.numel() // block), MOST_PROGRAMS // 4)
    return torch.empty(num_programs, num_experts, device=ids.device, dtype=torch.int32)


# rows


def sort_rows(ids_TK: Tensor, num_experts: int, capacity: int | None) -> RowIndex:
    if capacity is not None or not ids_TK.numel():
        return reference.sort_rows(ids_TK, num_experts, capacity)
    ids = ids_TK.contiguous()
    counts_PE = _counts(ids, num_experts)
    token_R, choice_R = (torch.empty(ids.numel(), device=ids.device, dtype=torch.int64) for _ in range(2))
    offsets_E = torch.empty(num_experts, device=ids.device, dtype=torch.int32)
    rows_TK = torch.empty_like(ids)
    del counts_PE
    return RowIndex(token_R=token_R, choice_R=choice_R, offsets_E=offsets_E, rows_TK=rows_TK)


def permute(tokens_TH: Tensor, index: RowIndex) -> Tensor:
    return RowCopies(_gather, _sum).permute(tokens_TH, index)


def unpermute(rows_RH: Tensor, index: RowIndex, num_tokens: int) -> Tensor:
    return RowCopies(_gather, _sum).unpermute(rows_RH, index, num_tokens)


def _gather(tokens_TH: Tensor, index: RowIndex) -> Tensor:
    tokens_TH = rows_of(tokens_TH)
    return tokens_TH.new_empty(len(index.token_R), tokens_TH.shape[1])


def _sum(rows_RH: Tensor, index: RowIndex) -> Tensor:
    assert index.rows_TK is not None, "a dense form has no rows per choice"
    rows_RH = rows_of(rows_RH)
    return rows_RH.new_empty(index.rows_TK.shape[0], rows_RH.shape[1])


def gather_probs(probs: Tensor, index: RowIndex) -> Tensor:
    if index.rows_TK is None:
        return reference.gather_probs(probs, index)
    return _GatherProbs.apply(probs, index)  # type: ignore[no-untyped-call,no-any-return]


class _GatherProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs_TK: Tensor, index: RowIndex) -> Tensor:
        ctx.rows_TK = index.rows_TK
        probs_TK.contiguous()
        return probs_TK.new_empty(index.choice_R.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].contiguous().new_empty(ctx.rows_TK.shape), None


# rows in pages


def pack_rows(rows_RW: Tensor, valid: Tensor, pages: Pages) -> Tensor:
    rows_RW = rows_of(rows_RW)
    return torch.empty(pages.stretches(len(rows_RW)), device=rows_RW.device, dtype=torch.int32)


def unpack_rows(table: Tensor, num_rows: int, pages: Pages) -> Tensor:
    return pages.data_PLW.new_empty(num_rows, pages.data_PLW.shape[2])


def free_pages(table: Tensor, pages: Pages) -> None:
    """In place."""
