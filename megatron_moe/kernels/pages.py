"""Page pool for tensors whose number of valid rows is known only on the device. The free list is on the device too."""

from dataclasses import dataclass

import torch
from torch import Tensor

NONE, NO_ROOM = -1, -2
"""Page table entries of row blocks without a page: NONE if the rows are not valid, NO_ROOM if too few pages were
free."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Pages:
    """Pool of P pages of equal size in device memory and Q pages in host memory, with the indices P to P + Q - 1. An
    allocation takes device pages first. Both have a free list, which is a ring buffer of page indices: allocation reads
    at one end, and freeing writes at the other, modulo the number of pages. Pages may therefore be freed in any order.
    """

    data_PLW: Tensor
    """Contents of the device pages [P + 1, page size, W]; the last page is a dummy that receives discarded rows."""
    host_QLW: Tensor
    """Contents of the host pages [Q + 1, page size, W], in pinned memory, which kernels read and write directly; the
    last page is a dummy. Without host pages it is in device memory."""
    free_P: Tensor
    """Free lists of page indices, int32 [P + Q + 1]: device pages, then host pages; the last element is a dummy for
    table entries without a page."""
    ends: Tensor
    """int64 [4]: number of device pages allocated so far, P plus the number of device pages freed so far, and the same
    for host pages and Q."""
    overflowed: Tensor
    """int32 scalar: 1 once an allocation has failed. Pools may share it."""

    @property
    def num(self) -> int:
        """Number P of pages in device memory."""
        return len(self.data_PLW) - 1

    @property
    def num_host(self) -> int:
        """Number Q of pages in host memory."""
        return len(self.host_QLW) - 1

    @property
    def page_size(self) -> int:
        """Number of rows per page."""
        return self.data_PLW.shape[1]

    def num_pages_for(self, num_rows: int) -> int:
        """Number of pages needed for `num_rows` rows."""
        return -(-num_rows // self.page_size)


def make_pages(
    num: int,
    page_size: int,
    width: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    host: Tensor | None = None,
    overflowed: Tensor | None = None,
) -> Pages:
    """Allocates a pool of `num` free device pages. `host`: memory of the host pages and of one more page, a flat pinned
    tensor; None for no host pages. `overflowed`: flag to share with other pools; None allocates one."""
    if host is None:
        host = torch.empty(page_size * width, dtype=dtype, device=device)
    host_QLW = host.view(-1, page_size, width)
    num_host = len(host_QLW) - 1
    return Pages(
        data_PLW=torch.empty(num + 1, page_size, width, dtype=dtype, device=device),
        host_QLW=host_QLW,
        free_P=torch.arange(num + num_host + 1, dtype=torch.int32, device=device),
        ends=torch.tensor([0, num, 0, num_host], dtype=torch.int64, device=device),
        overflowed=torch.zeros((), dtype=torch.int32, device=device) if overflowed is None else overflowed,
    )
