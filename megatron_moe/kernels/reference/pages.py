"""Reference implementation of paged row storage in plain torch. See `reference.py` and `pages.py`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.kernels.pages import NO_ROOM, NONE, Pages


def pack_rows(rows_RW: Tensor, valid: Tensor, pages: Pages) -> Tensor:
    """See `Kernels.pack_rows`."""
    size, number = pages.page_size, pages.num_pages_for(len(rows_RW))
    taken, given = pages.ends.unbind()
    wanted = (valid.long() + size - 1) // size
    fits = wanted <= given - taken
    positions = torch.arange(number, device=rows_RW.device)
    free = pages.free_P[(taken + positions) % pages.num]
    table = torch.where(positions < wanted, torch.where(fits, free, NO_ROOM), NONE).to(torch.int32)
    padded_RW = F.pad(rows_RW, (0, 0, 0, number * size - len(rows_RW)))
    pages.data_PLW.index_copy_(0, _somewhere(table, pages), padded_RW.view(number, size, rows_RW.shape[1]))
    pages.ends[0] += torch.where(fits, wanted, 0)
    pages.overflowed.copy_(pages.overflowed | ~fits)
    return table


def unpack_rows(table: Tensor, num_rows: int, pages: Pages) -> Tensor:
    """See `Kernels.unpack_rows`."""
    found_PLW = pages.data_PLW.index_select(0, _somewhere(table, pages))
    lost = (table == NO_ROOM)[:, None, None]
    return found_PLW.masked_fill(lost, torch.nan).flatten(0, 1)[:num_rows]


def free_pages(table: Tensor, pages: Pages) -> None:
    """See `Kernels.free_pages`."""
    mask = table >= 0
    positions = (pages.ends[1] + torch.arange(len(table), device=table.device)) % pages.num
    pages.free_P.index_copy_(0, torch.where(mask, positions, pages.num), table)
    pages.ends[1] += mask.sum()


def _somewhere(table: Tensor, pages: Pages) -> Tensor:
    """Page index of every table entry, int64; the index of the dummy page for entries without a page."""
    return torch.where(table >= 0, table, pages.num).long()
