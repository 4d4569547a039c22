"""Stable counting sort of the routing choices by expert, in two launches and without atomics.

The choices are divided into blocks, and consecutive blocks are grouped into segments. In the first launch, each
program counts the choices of every expert in one segment. It stores the counts before each block and at the end of the
segment. In the second launch, each program adds these counts to get each expert's first row, and sorts one block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.config.costs import most_rows
from megatron_moe.kernels.backends.triton.launch import cdiv, power_of_two
from megatron_moe.kernels.ops import RowIndex
from megatron_moe.kernels.reference import backend as reference

BLOCK = 128
"""Number of routing choices per block."""
SEGMENTS = 32
"""Maximum number of segments. It is small because every sorting program reads the counts of all segments."""


def sort_rows(ids_TK: Tensor, num_experts: int, capacity: int | None, align: int = 1, first: int = 0) -> RowIndex:
    """See `Kernels.sort_rows`. Runs on plain torch if a capacity is given or `ids_TK` is empty."""
    if capacity is not None or not ids_TK.numel():
        return reference.sort_rows(ids_TK, num_experts, capacity, align, first)
    ids, device = ids_TK.contiguous(), ids_TK.device
    before_BE, totals_SE, blocks_each = _counted(ids, num_experts, first)
    num_rows = most_rows(ids.numel(), num_experts, align)
    token_R, choice_R = (torch.empty(num_rows, device=device, dtype=torch.int64) for _ in range(2))
    if align > 1:
        token_R.fill_(-1)
        choice_R.fill_(-1)
    offsets_E = torch.empty(num_experts, device=device, dtype=torch.int32)
    rows_TK = torch.empty(ids.shape, device=device, dtype=torch.int64)
    _place_rows[(len(before_BE),)](
        ids, before_BE, totals_SE, offsets_E, token_R, choice_R, rows_TK, ids.numel(), num_experts, first,
        ids.shape[1], len(totals_SE), blocks_each, BLOCK=BLOCK, SEGMENTS=SEGMENTS, EXPERTS=_bins(num_experts),
        ALIGN=align,
    )  # fmt: skip
    return RowIndex(token_R=token_R, choice_R=choice_R, offsets_E=offsets_E, rows_TK=rows_TK)


def count_tokens(ids_TK: Tensor, num_experts: int) -> Tensor:
    if not ids_TK.numel():
        return torch.zeros(num_experts, device=ids_TK.device, dtype=torch.int64)
    return _counted(ids_TK.contiguous(), num_experts)[1].sum(dim=0)


def _counted(ids: Tensor, num_experts: int, first: int = 0) -> tuple[Tensor, Tensor, int]:
    """Counts the choices of each expert. Returns (counts between the start of a segment and the start of each of its
    blocks, int32 [blocks, E]; counts in each whole segment, int32 [segments, E]; number of blocks per segment)."""
    num_blocks = cdiv(ids.numel(), BLOCK)
    blocks_each = cdiv(num_blocks, SEGMENTS)
    before_BE = torch.empty(num_blocks, num_experts, device=ids.device, dtype=torch.int32)
    totals_SE = before_BE.new_empty(cdiv(num_blocks, blocks_each), num_experts)
    _count_experts[(len(totals_SE),)](
        ids, before_BE, totals_SE, ids.numel(), num_experts, first, num_blocks, blocks_each, BLOCK=BLOCK,
        EXPERTS=_bins(num_experts),
    )  # fmt: skip
    return before_BE, totals_SE, blocks_each


def _bins(num_experts: int) -> int:
    """Number of histogram bins: `num_experts` rounded up to a power of two, and at least 32 (the warp size)."""
    return max(power_of_two(num_experts), 32)


@triton.jit
def _local_ids(ids_ptr, choices, inside, first_expert, num_experts):
    """Expert index of each choice relative to `first_expert`; -1 for no expert or an expert of another rank."""
    ids = tl.load(ids_ptr + choices, mask=inside, other=-1).to(tl.int32) - first_expert
    return tl.where((ids >= 0) & (ids < num_experts), ids, -1)


@triton.jit(do_not_specialize=("first_expert",))
def _count_experts(
    ids_ptr, before_ptr, totals_ptr, num_choices, num_experts, first_expert, num_blocks, blocks_each,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    experts = tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), dtype=tl.int32)
    first = tl.program_id(0) * blocks_each
    for block in range(first, tl.minimum(first + blocks_each, num_blocks)):
        choices = block * BLOCK + tl.arange(0, BLOCK)
        ids = _local_ids(ids_ptr, choices, choices < num_choices, first_expert, num_experts)
        tl.store(before_ptr + block * num_experts + experts, counts, mask=experts < num_experts)
        counts += tl.histogram(tl.maximum(ids, 0), EXPERTS, mask=ids >= 0)
    tl.store(totals_ptr + tl.program_id(0) * num_experts + experts, counts, mask=experts < num_experts)


@triton.jit(do_not_specialize=("first_expert",))
def _place_rows(
    ids_ptr, before_ptr, totals_ptr, offsets_ptr, token_ptr, choice_ptr, rows_ptr, num_choices, num_experts,
    first_expert, topk, num_segments, blocks_each,
    BLOCK: tl.constexpr, SEGMENTS: tl.constexpr, EXPERTS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Sorts one block: a choice's row is its expert's first row plus the number of the expert's earlier choices."""
    block, experts = tl.program_id(0), tl.arange(0, EXPERTS)
    known = experts < num_experts
    segments = tl.arange(0, SEGMENTS)
    mask = (segments < num_segments)[:, None] & known[None, :]
    counts = tl.load(totals_ptr + segments[:, None] * num_experts + experts[None, :], mask=mask, other=0)
    totals = tl.sum(counts, axis=0)
    before = tl.load(before_ptr + block * num_experts + experts, mask=known, other=0)
    before += tl.sum(tl.where((segments < block // blocks_each)[:, None], counts, 0), axis=0)
    owned = tl.cdiv(totals, ALIGN) * ALIGN
    ends = tl.cumsum(owned, axis=0)
    if block == 0:
        tl.store(offsets_ptr + experts, ends, mask=known)
    positions = tl.arange(0, BLOCK)
    choices = block * BLOCK + positions
    inside = choices < num_choices
    ids = _local_ids(ids_ptr, choices, inside, first_expert, num_experts)
    earlier = (ids[:, None] == ids[None, :]) & (positions[None, :] < positions[:, None])
    rows = tl.gather(ends - owned + before, tl.maximum(ids, 0), axis=0) + tl.sum(earlier.to(tl.int32), axis=1)
    chosen = ids >= 0
    tl.store(rows_ptr + choices, tl.where(chosen, rows, -1).to(tl.int64), mask=inside)
    tl.store(token_ptr + rows, (choices // topk).to(tl.int64), mask=chosen)
    tl.store(choice_ptr + rows, choices.to(tl.int64), mask=chosen)
    if ALIGN == 1:  # R is the number of choices; for other alignments, the host has initialised both tensors with -1
        nothing = inside & (choices >= tl.sum(totals, axis=0))
        tl.store(token_ptr + choices, tl.full((BLOCK,), -1, tl.int64), mask=nothing)
        tl.store(choice_ptr + choices, tl.full((BLOCK,), -1, tl.int64), mask=nothing)
