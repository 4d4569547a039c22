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
    rows_RW = rows_of(rows_RW)
    num_rows, width = rows_RW.shape
    number = pages.num_pages_for(num_rows)
    table = torch.empty(number, device=rows_RW.device, dtype=torch.int32)
    # one warp, so that all threads have read both ends of the free list before a thread updates them
    _take_pages[(1,)](
        valid, pages.free_P, pages.ends, pages.overflowed, table, number, pages.num, pages.num_host, pages.page_size,
        NONE=NONE, NO_ROOM=NO_ROOM, BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip
    if rows_RW.numel():
        rows, columns = _tile(pages.page_size, width)
        _copy_to_pages[(number, cdiv(width, columns))](
            rows_RW, table, pages.data_PLW, pages.host_QLW, num_rows, width, rows_RW.stride(0), pages.num,
            pages.page_size, ROWS=rows, COLUMNS=columns,
        )  # fmt: skip
    return table


def unpack_rows(table: Tensor, num_rows: int, pages: Pages) -> Tensor:
    width = pages.data_PLW.shape[2]
    rows_RW = torch.empty(num_rows, width, device=table.device, dtype=pages.data_PLW.dtype)
    if rows_RW.numel():
        rows, columns = _tile(pages.page_size, width)
        _copy_from_pages[(len(table), cdiv(width, columns))](
            rows_RW, table, pages.data_PLW, pages.host_QLW, num_rows, width, pages.num, pages.page_size,
            NO_ROOM=NO_ROOM, ROWS=rows, COLUMNS=columns,
        )  # fmt: skip
    return rows_RW


def free_pages(table: Tensor, pages: Pages) -> None:
    _give_pages[(1,)](table, pages.free_P, pages.ends, len(table), pages.num, pages.num_host, BLOCK=BLOCK, num_warps=1)


def _tile(page_size: int, width: int) -> tuple[int, int]:
    return min(power_of_two(page_size), TILE[0]), min(power_of_two(width), TILE[1])


@triton.jit
def _take_pages(
    valid_ptr, free_ptr, ends_ptr, overflowed_ptr, table_ptr, number, num_pages, num_host, page_size,
    NONE: tl.constexpr, NO_ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wanted = (tl.load(valid_ptr).to(tl.int64) + page_size - 1) // page_size
    taken = tl.load(ends_ptr)
    host_taken = tl.load(ends_ptr + 2)
    room = tl.load(ends_ptr + 1) - taken
    fits = wanted <= room + tl.load(ends_ptr + 3) - host_taken
    on_device = tl.minimum(wanted, room)
    for start in range(0, number, BLOCK):
        positions = start + tl.arange(0, BLOCK)
        used = positions < wanted
        is_device = positions < on_device
        slots = (taken + positions) % tl.maximum(num_pages, 1)
        # positions of device pages would give negative remainders
        host_slots = num_pages + (host_taken + tl.maximum(positions - on_device, 0)) % tl.maximum(num_host, 1)
        slots = tl.where(is_device, slots, host_slots)
        free = tl.load(free_ptr + slots, mask=used & fits, other=NO_ROOM)
        tl.store(table_ptr + positions, tl.where(used, free, NONE), mask=positions < number)
    tl.store(ends_ptr, taken + tl.where(fits, on_device, 0))
    tl.store(ends_ptr + 2, host_taken + tl.where(fits, wanted - on_device, 0))
    tl.store(overflowed_ptr, 1, mask=~fits)


@triton.jit
def _copy_to_pages(
    rows_ptr, table_ptr, data_ptr, host_ptr, num_rows, width, stride, num_pages, page_size,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64)
    page = tl.load(table_ptr + offsets).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if page >= 0:
        for start in range(0, page_size, ROWS):
            inside = start + tl.arange(0, ROWS)
            rows = offsets * page_size + inside
            mask = ((inside < page_size) & (rows < num_rows))[:, None] & (columns < width)[None, :]
            values = tl.load(rows_ptr + rows[:, None] * stride + columns[None, :], mask=mask)
            if page < num_pages:
                to = data_ptr + (page * page_size + inside)[:, None] * width + columns[None, :]
                tl.store(to, values, mask=mask)
            else:
                to = host_ptr + ((page - num_pages) * page_size + inside)[:, None] * width + columns[None, :]
                tl.store(to, values, mask=mask)


@triton.jit
def _copy_from_pages(
    rows_ptr, table_ptr, data_ptr, host_ptr, num_rows, width, num_pages, page_size,
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
            to = rows_ptr + rows[:, None] * width + columns[None, :]
            if page < num_pages:
                source = data_ptr + (page * page_size + inside)[:, None] * width + columns[None, :]
                tl.store(to, tl.load(source, mask=wanted & (page >= 0), other=float("nan")), mask=wanted)
            else:
                source = host_ptr + ((page - num_pages) * page_size + inside)[:, None] * width + columns[None, :]
                tl.store(to, tl.load(source, mask=wanted), mask=wanted)


@triton.jit
def _give_pages(table_ptr, free_ptr, ends_ptr, number, num_pages, num_host, BLOCK: tl.constexpr):
    given, host_given = tl.load(ends_ptr + 1), tl.load(ends_ptr + 3)
    total, host_total = tl.zeros((), dtype=tl.int64), tl.zeros((), dtype=tl.int64)
    for start in range(0, number, BLOCK):
        positions = start + tl.arange(0, BLOCK)
        pages = tl.load(table_ptr + positions, mask=positions < number, other=-1)
        mask, host_mask = (pages >= 0) & (pages < num_pages), pages >= num_pages
        total += tl.sum(mask.to(tl.int64), axis=0)
        tl.store(free_ptr + (given + positions) % tl.maximum(num_pages, 1), pages, mask=mask)
        # the device pages of a table are in front of its host pages
        host_slots = (host_given + tl.maximum(positions - total, 0)) % tl.maximum(num_host, 1)
        tl.store(free_ptr + num_pages + host_slots, pages, mask=host_mask)
        host_total += tl.sum(host_mask.to(tl.int64), axis=0)
    tl.store(ends_ptr + 1, given + total)
    tl.store(ends_ptr + 3, host_given + host_total)
