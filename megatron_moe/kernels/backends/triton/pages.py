"""Paged row storage: copies valid rows to free pages and back. The list of free pages is on the device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends.triton.launch import cdiv, power_of_two, rows_of
from megatron_moe.kernels.pages import NO_ROOM, NONE, Pages

TILE = (8, 512)
"""Maximum (rows, columns) that are copied at a time."""
BLOCK = 1024
"""Page table entries that are processed at a time."""


def pack_rows(rows_RW: Tensor, valid: Tensor, pages: Pages) -> Tensor:
    """See `Kernels.pack_rows`."""
    rows_RW = rows_of(rows_RW)
    num_rows, width = rows_RW.shape
    number = pages.num_pages_for(num_rows)
    table = torch.empty(number, device=rows_RW.device, dtype=torch.int32)
    # one warp, so that all threads have read both ends of the free list before a thread updates them
    _take_pages[(1,)](
        valid, pages.free_P, pages.ends, pages.overflowed, table, number, pages.num, pages.page_size,
        NONE=NONE, NO_ROOM=NO_ROOM, BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip
    if rows_RW.numel():
        rows, columns = _tile(pages.page_size, width)
        _copy_to_pages[(number, cdiv(width, columns))](
            rows_RW, table, pages.data_PLW, num_rows, width, rows_RW.stride(0), pages.page_size,
            ROWS=rows, COLUMNS=columns,
        )  # fmt: skip
    return table


def unpack_rows(table: Tensor, num_rows: int, pages: Pages) -> Tensor:
    """See `Kernels.unpack_rows`."""
    width = pages.data_PLW.shape[2]
    rows_RW = torch.empty(num_rows, width, device=table.device, dtype=pages.data_PLW.dtype)
    if rows_RW.numel():
        rows, columns = _tile(pages.page_size, width)
        _copy_from_pages[(len(table), cdiv(width, columns))](
            rows_RW, table, pages.data_PLW, num_rows, width, pages.page_size,
            NO_ROOM=NO_ROOM, ROWS=rows, COLUMNS=columns,
        )  # fmt: skip
    return rows_RW


def free_pages(table: Tensor, pages: Pages) -> None:
    """See `Kernels.free_pages`."""
    _give_pages[(1,)](table, pages.free_P, pages.ends, len(table), pages.num, BLOCK=BLOCK, num_warps=1)


def _tile(page_size: int, width: int) -> tuple[int, int]:
    return min(power_of_two(page_size), TILE[0]), min(power_of_two(width), TILE[1])


@triton.jit
def _take_pages(
    valid_ptr, free_ptr, ends_ptr, overflowed_ptr, table_ptr, number, num_pages, page_size,
    NONE: tl.constexpr, NO_ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wanted = (tl.load(valid_ptr).to(tl.int64) + page_size - 1) // page_size
    taken = tl.load(ends_ptr)
    fits = wanted <= tl.load(ends_ptr + 1) - taken
    for start in range(0, number, BLOCK):
        positions = start + tl.arange(0, BLOCK)
        used = positions < wanted
        free = tl.load(free_ptr + (taken + positions) % num_pages, mask=used & fits, other=NO_ROOM)
        tl.store(table_ptr + positions, tl.where(used, free, NONE), mask=positions < number)
    tl.store(ends_ptr, taken + tl.where(fits, wanted, 0))
    tl.store(overflowed_ptr, 1, mask=~fits)


@triton.jit
def _copy_to_pages(
    rows_ptr, table_ptr, data_ptr, num_rows, width, stride, page_size, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    offsets = tl.program_id(0).to(tl.int64)
    page = tl.load(table_ptr + offsets).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if page >= 0:
        for start in range(0, page_size, ROWS):
            inside = start + tl.arange(0, ROWS)
            rows = offsets * page_size + inside
            mask = ((inside < page_size) & (rows < num_rows))[:, None] & (columns < width)[None, :]
            values = tl.load(rows_ptr + rows[:, None] * stride + columns[None, :], mask=mask)
            to = data_ptr + (page * page_size + inside)[:, None] * width + columns[None, :]
            tl.store(to, values, mask=mask)


@triton.jit
def _copy_from_pages(
    rows_ptr, table_ptr, data_ptr, num_rows, width, page_size,
    NO_ROOM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64)
    page = tl.load(table_ptr + offsets).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if page >= 0 or page == NO_ROOM:
        for start in range(0, page_size, ROWS):
            inside = start + tl.arange(0, ROWS)
            rows = offsets * page_size + inside
            wanted = ((inside < page_size) & (rows < num_rows))[:, None] & (columns < width)[None, :]
            source = data_ptr + (page * page_size + inside)[:, None] * width + columns[None, :]
            values = tl.load(source, mask=wanted & (page >= 0), other=float("nan"))
            tl.store(rows_ptr + rows[:, None] * width + columns[None, :], values, mask=wanted)


@triton.jit
def _give_pages(table_ptr, free_ptr, ends_ptr, number, num_pages, BLOCK: tl.constexpr):
    given = tl.load(ends_ptr + 1)
    total = tl.zeros((), dtype=tl.int64)
    for start in range(0, number, BLOCK):
        positions = start + tl.arange(0, BLOCK)
        pages = tl.load(table_ptr + positions, mask=positions < number, other=-1)
        mask = pages >= 0
        tl.store(free_ptr + (given + positions) % num_pages, pages, mask=mask)
        total += tl.sum(mask.to(tl.int64), axis=0)
    tl.store(ends_ptr + 1, given + total)
