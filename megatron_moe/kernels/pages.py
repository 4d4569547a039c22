"""Pages: a buffer in which tensors of rows are kept as far as their rows are used, and its free list.

How many rows are used is known to the device alone, so the free list is on the device too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NONE, NO_ROOM = -1, -2
"""Instead of a page's number: no row of the stretch is used; there was no page for it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Pages:
    """P pages of equally many rows. The free list is a ring: its first free page stands at `ends[0]`, and pages that
    come back are written at `ends[1]`, both modulo P; so pages may come back in any order."""

    data_PLW: Tensor
    """[P + 1, rows of a page, W]; the last page takes what is written nowhere."""
    free_P: Tensor
    """int32 [P + 1] numbers of free pages; the last place takes what is written nowhere."""
    ends: Tensor
    """int64 [2]: pages ever taken, and P plus pages ever given back."""
    overflowed: Tensor
    """int32 scalar: 1 since pages were wanted that were not there."""

    @property
    def num(self) -> int:
        """P."""
        return len(self.free_P) - 1

    @property
    def page_size(self) -> int:
        """Rows of a page."""
        return self.data_PLW.shape[1]

    def stretches(self, num_rows: int) -> int:
        """Pages of so many rows, if all of them are used."""
        return -(-num_rows // self.page_size)


def make_pages(num: int, page_size: int, width: int, *, dtype: torch.dtype, device: torch.device) -> Pages:
    """All of them free."""
    return Pages(
        data_PLW=torch.empty(num + 1, page_size, width, dtype=dtype, device=device),
        free_P=torch.arange(num + 1, dtype=torch.int32, device=device),
        ends=torch.tensor([0, num], dtype=torch.int64, device=device),
        overflowed=torch.zeros((), dtype=torch.int32, device=device),
    )
