"""Where every choice goes: a stable counting sort by expert, in two launches and without atomics.

Every program has a stretch of the choices. The first launch counts each program's choices of every expert; in the
second every program reads all counts, which tells where its own choices of an expert start, and places them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels import reference
from megatron_moe.kernels.backends.triton.launch import num_multiprocessors, power_of_two
from megatron_moe.kernels.ops import RowIndex

TILE = 8192
"""Choices times experts that a program compares at a time."""


def sort_rows(ids_TK: Tensor, num_experts: int, capacity: int | None) -> RowIndex:
    """See `Kernels.sort_rows`. Experts padded to a capacity are left to plain torch."""
    if capacity is not None or not ids_TK.numel():
        return reference.sort_rows(ids_TK, num_experts, capacity)
    ids, device = ids_TK.contiguous(), ids_TK.device
    counts_PE, sizes = _counts(ids, num_experts)
    token_R, choice_R = (torch.empty(ids.numel(), device=device, dtype=torch.int64) for _ in range(2))
    offsets_E = torch.empty(num_experts, device=device, dtype=torch.int32)
    rows_TK = torch.empty_like(ids)
    _place_rows[(len(counts_PE),)](
        ids, counts_PE, offsets_E, token_R, choice_R, rows_TK, ids.numel(), num_experts, ids.shape[1], **sizes
    )
    return RowIndex(token_R=token_R, choice_R=choice_R, offsets_E=offsets_E, rows_TK=rows_TK)


def count_tokens(ids_TK: Tensor, num_experts: int) -> Tensor:
    """See `Kernels.count_tokens`."""
    if not ids_TK.numel():
        return torch.zeros(num_experts, device=ids_TK.device, dtype=torch.int64)
    return _counts(ids_TK.contiguous(), num_experts)[0].sum(dim=0)


def _counts(ids: Tensor, num_experts: int) -> tuple[Tensor, dict[str, int]]:
    """Choices of every program and expert, int32 [P, E], and the sizes of the kernels."""
    experts = power_of_two(num_experts)
    block = max(TILE // experts, 16)
    num_blocks = triton.cdiv(ids.numel(), block)
    # few programs, since each reads the counts of all
    blocks_each = triton.cdiv(num_blocks, num_multiprocessors(ids.device))
    counts_PE = torch.empty(triton.cdiv(num_blocks, blocks_each), num_experts, device=ids.device, dtype=torch.int32)
    sizes = {"blocks_each": blocks_each, "BLOCK": block, "EXPERTS": experts}
    _count_experts[(len(counts_PE),)](ids, counts_PE, ids.numel(), num_experts, **sizes)
    return counts_PE, sizes


@triton.jit
def _count_experts(
    ids_ptr, counts_ptr, num_choices, num_experts, blocks_each, BLOCK: tl.constexpr, EXPERTS: tl.constexpr
):  # fmt: skip
    experts = tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), dtype=tl.int32)
    for block in range(blocks_each):
        choices = (tl.program_id(0) * blocks_each + block) * BLOCK + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + choices, mask=choices < num_choices, other=-1)
        counts += tl.sum((ids[:, None] == experts[None, :]).to(tl.int32), axis=0)
    tl.store(counts_ptr + tl.program_id(0) * num_experts + experts, counts, mask=experts < num_experts)


@triton.jit
def _place_rows(
    ids_ptr, counts_ptr, offsets_ptr, token_ptr, choice_ptr, rows_ptr, num_choices, num_experts, topk, blocks_each,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Row of a choice: where the expert's rows start, plus how many of its choices stand before this one."""
    program, experts = tl.program_id(0), tl.arange(0, EXPERTS)
    totals, before = tl.zeros((EXPERTS,), dtype=tl.int32), tl.zeros((EXPERTS,), dtype=tl.int32)
    for first in range(0, tl.num_programs(0), 16):
        programs = first + tl.arange(0, 16)
        held = (programs < tl.num_programs(0))[:, None] & (experts < num_experts)[None, :]
        counts = tl.load(counts_ptr + programs[:, None] * num_experts + experts[None, :], mask=held, other=0)
        totals += tl.sum(counts, axis=0)
        before += tl.sum(tl.where((programs < program)[:, None], counts, 0), axis=0)
    ends = tl.cumsum(totals, axis=0)
    if program == 0:
        tl.store(offsets_ptr + experts, ends, mask=experts < num_experts)
    num_rows = tl.sum(totals, axis=0)
    starts = ends - totals + before
    for block in range(blocks_each):
        choices = (program * blocks_each + block) * BLOCK + tl.arange(0, BLOCK)
        inside = choices < num_choices
        ids = tl.load(ids_ptr + choices, mask=inside, other=-1)
        hits = ids[:, None] == experts[None, :]
        upto = tl.cumsum(hits.to(tl.int32), axis=0)
        rows = tl.sum(tl.where(hits, starts[None, :] + upto - 1, 0), axis=1)
        starts += tl.sum(hits.to(tl.int32), axis=0)
        chosen = inside & (ids >= 0)
        tl.store(rows_ptr + choices, tl.where(chosen, rows, -1).to(tl.int64), mask=inside)
        tl.store(token_ptr + rows, (choices // topk).to(tl.int64), mask=chosen)
        tl.store(choice_ptr + rows, choices.to(tl.int64), mask=chosen)
        # there are as many rows as choices; the last ones hold nothing if some choices are none
        nothing = inside & (choices >= num_rows)
        tl.store(token_ptr + choices, tl.full((BLOCK,), -1, tl.int64), mask=nothing)
        tl.store(choice_ptr + choices, tl.full((BLOCK,), -1, tl.int64), mask=nothing)
