"""Page pool for tensors whose number of valid rows is known only on the device. The free list is on the device too."""

from dataclasses import dataclass

import torch
from torch import Tensor

NONE, NO_ROOM = -1, -2
"""Page table entries of row blocks without a page: NONE if the rows are not valid, NO_ROOM if too few pages were
free."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Pages:
    """Pool of P pages of equal size. The free list is a ring buffer of page indices: allocation reads at `ends[0]`, and
    freeing writes at `ends[1]`, both modulo P. Pages may therefore be freed in any order."""

    data_PLW: Tensor
    """Page contents [P + 1, page size, W]; the last page is a dummy that receives discarded rows."""
    free_P: Tensor
    """Free list of page indices, int32 [P + 1]; the last element is a dummy for table entries without a page."""
    ends: Tensor
    """int64 [2]: number of pages allocated so far, and P plus the number of pages freed so far."""
    overflowed: Tensor
    """int32 scalar: 1 once an allocation has failed."""

    @property
    def num(self) -> int:
        """Number of pages, P."""
        return len(self.free_P) - 1

    @property
    def page_size(self) -> int:
        """Rows per page."""
        return self.data_PLW.shape[1]

    def num_pages_for(self, num_rows: int) -> int:
        """Number of pages needed for `num_rows` rows."""
        return -(-num_rows // self.page_size)


def make_pages(num: int, page_size: int, width: int, *, dtype: torch.dtype, device: torch.device) -> Pages:
    """Allocates a pool of `num` free pages."""
    return Pages(
        data_PLW=torch.empty(num + 1, page_size, width, dtype=dtype, device=device),
        free_P=torch.arange(num + 1, dtype=torch.int32, device=device),
        ends=torch.tensor([0, num], dtype=torch.int64, device=device),
        overflowed=torch.zeros((), dtype=torch.int32, device=device),
    )
