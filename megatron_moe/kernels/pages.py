"""Page pool for tensors of rows whose number of valid rows is on the device. The free list is on the device too."""

from dataclasses import dataclass

import torch
from torch import Tensor

NONE, NO_ROOM = -1, -2
"""Table entries without a page: no row of the stretch is valid; no page was free."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Pages:
    """P pages of equal size. The free list is a ring buffer: pages are allocated at `ends[0]` and freed at `ends[1]`,
    both modulo P, so pages may be freed in any order."""

    data_PLW: Tensor
    """[P + 1, rows of a page, W]; the last page receives rows that are discarded."""
    free_P: Tensor
    """int32 [P + 1] numbers of free pages; the last entry is a dummy for entries without a page."""
    ends: Tensor
    """int64 [2]: pages allocated so far, and P plus pages freed so far."""
    overflowed: Tensor
    """int32 scalar: 1 after an allocation failed."""

    @property
    def num(self) -> int:
        """P."""
        return len(self.free_P) - 1

    @property
    def page_size(self) -> int:
        """Rows of a page."""
        return self.data_PLW.shape[1]

    def stretches(self, num_rows: int) -> int:
        """Pages of `num_rows` valid rows."""
        return -(-num_rows // self.page_size)


def make_pages(num: int, page_size: int, width: int, *, dtype: torch.dtype, device: torch.device) -> Pages:
    """Allocates a pool of `num` free pages."""
    return Pages(
        data_PLW=torch.empty(num + 1, page_size, width, dtype=dtype, device=device),
        free_P=torch.arange(num + 1, dtype=torch.int32, device=device),
        ends=torch.tensor([0, num], dtype=torch.int64, device=device),
        overflowed=torch.zeros((), dtype=torch.int32, device=device),
    )
