"""Fakes of the kernels for routing and rows. See `fakes.py`."""

from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.moe import RouterConfig
from megatron_moe.kernels import reference
from megatron_moe.kernels.backends.torch_native import fakes as torch_native_fakes
from megatron_moe.kernels.backends.triton.sizes import (
    GATE_COLUMNS,
    GATE_EXPERTS,
    HOPPER_MULTIPROCESSORS,
    ROUTE_TILE,
    gate_stretches,
    power_of_two,
    route_programs,
    rows_of,
    sort_blocks,
)
from megatron_moe.kernels.ops import BalanceSums, RoutedTokens, RowIndex, internal_dtype, most_rows
from megatron_moe.kernels.pages import Pages
from megatron_moe.kernels.permute import RowCopies

# routing


def gate_product(hidden_TH: Tensor, weight_EH: Tensor, dtype: torch.dtype) -> Tensor:
    ours = hidden_TH.dtype is weight_EH.dtype is torch.bfloat16 and dtype is torch.float32
    if not ours or len(weight_EH) > GATE_EXPERTS:
        return torch_native_fakes.gate_product(hidden_TH, weight_EH, dtype)
    return _GateProduct.apply(hidden_TH, weight_EH)  # type: ignore[no-untyped-call,no-any-return]


class _GateProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_EH: Tensor) -> Tensor:
        hidden_TH, weight_EH = rows_of(hidden_TH), rows_of(weight_EH)
        ctx.save_for_backward(hidden_TH, weight_EH)
        return hidden_TH.new_empty(hidden_TH.shape[0], weight_EH.shape[0], dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_EH = ctx.saved_tensors
        rows_of(grads[0])
        grad_hidden_TH = torch.empty_like(hidden_TH, memory_format=torch.contiguous_format)
        num_tokens, width = hidden_TH.shape
        column_tiles = -(-width // min(GATE_COLUMNS, power_of_two(width)))
        stretches = gate_stretches(num_tokens, column_tiles, HOPPER_MULTIPROCESSORS)
        shares_PEH = weight_EH.new_empty(stretches, *weight_EH.shape, dtype=torch.float32)
        return grad_hidden_TH, shares_PEH.new_empty(weight_EH.shape, dtype=weight_EH.dtype)


def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    config: RouterConfig,
    *,
    given_ids_TK: Tensor | None = None,
    valid_T: Tensor | None = None,
    balance_sets: int = 0,
    z: bool = False,
) -> RoutedTokens:
    if not len(logits_TE):
        return reference.route(
            logits_TE, bias_E, config, given_ids_TK=given_ids_TK, valid_T=valid_T, balance_sets=balance_sets, z=z
        )
    probs_TK, scores_GE, z_sum, ids_TK, counts = _Route.apply(  # type: ignore[no-untyped-call]
        logits_TE, valid_T, config, balance_sets, z
    )
    num_experts = config.num_experts
    balance = None
    if balance_sets:
        balance = BalanceSums(scores_GE, counts[num_experts:-1].view(balance_sets, num_experts))
    return RoutedTokens(ids_TK, probs_TK, counts[:num_experts], balance, z_sum)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, valid_T: Tensor | None, config: RouterConfig, balance_sets: int, z: bool
    ) -> tuple[Tensor | None, ...]:
        logits_TE, (num_tokens, num_experts) = logits_TE.contiguous(), logits_TE.shape
        wide = internal_dtype(logits_TE.dtype)
        counts = torch.zeros((1 + balance_sets) * num_experts + 1, device=logits_TE.device, dtype=torch.int64)
        ids_TK = counts.new_empty(num_tokens, config.topk)
        probs_TK = logits_TE.new_empty(num_tokens, config.topk)
        scores_GE = logits_TE.new_empty(balance_sets, num_experts, dtype=wide) if balance_sets else None
        z_sum = logits_TE.new_empty((), dtype=wide) if z else None
        shares = None
        if balance_sets or z:
            programs = _num_programs(num_tokens, config, balance_sets, wide)
            shares = logits_TE.new_empty(programs * (num_experts + 1), dtype=wide)
        del shares
        ctx.save_for_backward(logits_TE, ids_TK, valid_T)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(ids_TK, counts)
        return probs_TK, scores_GE, z_sum, ids_TK, counts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_TE = torch.empty_like(ctx.saved_tensors[0])
        return grad_TE, None, None, None, None


def _num_programs(num_tokens: int, config: RouterConfig, balance_sets: int, wide: torch.dtype) -> int:
    groups, sets = config.num_groups or 1 if config.group_topk else 1, max(balance_sets, 1)
    columns = power_of_two(groups) * power_of_two(config.num_experts // groups)
    tile_tokens = max(ROUTE_TILE * torch.float32.itemsize // wide.itemsize // columns, 1)
    return route_programs(num_tokens, sets, tile_tokens, HOPPER_MULTIPROCESSORS)


def count_tokens(ids_TK: Tensor, num_experts: int) -> Tensor:
    return _counted(ids_TK.contiguous(), num_experts)[1].sum(dim=0)


def _counted(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """A row for every block of choices, and one for every stretch of blocks."""
    num_blocks, blocks_each = sort_blocks(ids.numel())
    before_BE = torch.empty(num_blocks, num_experts, device=ids.device, dtype=torch.int32)
    return before_BE, before_BE.new_empty(-(-num_blocks // max(blocks_each, 1)), num_experts)


# rows


def sort_rows(ids_TK: Tensor, num_experts: int, capacity: int | None, align: int = 1) -> RowIndex:
    if capacity is not None or not ids_TK.numel():
        return reference.sort_rows(ids_TK, num_experts, capacity, align)
    ids = ids_TK.contiguous()
    counted = _counted(ids, num_experts)
    num_rows = most_rows(ids.numel(), num_experts, align)
    token_R, choice_R = (torch.empty(num_rows, device=ids.device, dtype=torch.int64) for _ in range(2))
    offsets_E = torch.empty(num_experts, device=ids.device, dtype=torch.int32)
    rows_TK = torch.empty_like(ids)
    del counted
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
