"""Reference implementation of the ops of paged row storage (`kernels/pages.py`), in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.kernels.pages import NO_ROOM, NONE, Pages


def pack_rows(rows_RW: Tensor, valid: Tensor, pages: Pages) -> Tensor:
    size, number = pages.page_size, pages.num_pages_for(len(rows_RW))
    taken, given, host_taken, host_given = pages.ends.unbind()
    wanted = (valid.long() + size - 1) // size
    fits = wanted <= given - taken + host_given - host_taken
    on_device = torch.minimum(wanted, given - taken)
    positions = torch.arange(number, device=rows_RW.device)
    host_slots = pages.num + (host_taken + positions - on_device) % max(pages.num_host, 1)
    free = pages.free_P[torch.where(positions < on_device, (taken + positions) % max(pages.num, 1), host_slots)]
    table = torch.where(positions < wanted, torch.where(fits, free, NO_ROOM), NONE).to(torch.int32)
    padded_RW = F.pad(rows_RW, (0, 0, 0, number * size - len(rows_RW)))
    blocks_NLW = padded_RW.view(number, size, rows_RW.shape[1])
    pages.data_PLW.index_copy_(0, _on_device(table, pages), blocks_NLW)
    pages.host_QLW.index_copy_(0, _on_host(table, pages), blocks_NLW.to(pages.host_QLW.device))
    pages.ends[0] += torch.where(fits, on_device, 0)
    pages.ends[2] += torch.where(fits, wanted - on_device, 0)
    pages.overflowed.copy_(pages.overflowed | ~fits)
    return table


def unpack_rows(table: Tensor, num_rows: int, pages: Pages) -> Tensor:
    found_NLW = pages.data_PLW.index_select(0, _on_device(table, pages))
    moved_NLW = pages.host_QLW.index_select(0, _on_host(table, pages)).to(table.device)
    found_NLW = torch.where((table >= pages.num)[:, None, None], moved_NLW, found_NLW)
    lost = (table == NO_ROOM)[:, None, None]
    return found_NLW.masked_fill(lost, torch.nan).flatten(0, 1)[:num_rows]


def free_pages(table: Tensor, pages: Pages) -> None:
    dummy = pages.num + pages.num_host
    kinds = ((1, 0, pages.num, (table >= 0) & (table < pages.num)), (3, pages.num, pages.num_host, table >= pages.num))
    for end, start, num, mask in kinds:
        slots = start + (pages.ends[end] + mask.cumsum(0) - 1) % max(num, 1)
        pages.free_P.index_copy_(0, torch.where(mask, slots, dummy), table)
        pages.ends[end] += mask.sum()


def _on_device(table: Tensor, pages: Pages) -> Tensor:
    """Index of the device page of every table entry, int64; the index of the dummy page for other entries."""
    return torch.where((table >= 0) & (table < pages.num), table, pages.num).long()


def _on_host(table: Tensor, pages: Pages) -> Tensor:
    """Index of the host page of every table entry, int64; the index of the dummy page for other entries."""
    indices = torch.where(table >= pages.num, table - pages.num, pages.num_host).long()
    return indices.to(pages.host_QLW.device)
