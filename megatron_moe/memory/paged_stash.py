"""Rows of experts wait for the backward in pages of one buffer, as far as they are used.

Where the host does not know how many rows the experts of a rank get, tensors of rows have the size of the worst case.
Only while a layer is at work: what its backward needs is copied to pages that all layers and microbatches share, as
many as there are used rows, and comes back into a tensor of the worst case when the backward gets there. The allocator
gives that tensor the memory of the layer before. The host learns nothing of all this; if pages run out, what comes back
is not a number, so no gradient is, and the verdict of the step refuses it on every rank.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_moe.config.memory import PagedStashConfig
from megatron_moe.kernels.ops import Kernels
from megatron_moe.kernels.pages import Pages, make_pages
from megatron_moe.memory.output_discard import PackedTensor, storage_of


class PagedStash:
    """The pages of one rank: a buffer for each width of rows, made when it is first needed."""

    def __init__(self, config: PagedStashConfig, num_pages: Mapping[int, int], kernels: Kernels) -> None:
        """`num_pages`: by width of the rows; those of other widths are kept whole."""
        self.config = config
        self.kernels = kernels
        self._num_pages = num_pages
        self._pages: dict[int, Pages] = {}

    def open(self, rows_RW: Tensor, valid: Tensor) -> "_Rows":
        """The policy of the scope of the consumers of these rows."""
        return _Rows(self, rows_RW, valid)

    def pages_for(self, rows_RW: Tensor) -> Pages | None:
        """None: such rows are kept whole."""
        width = rows_RW.shape[1]
        if width not in self._num_pages:
            return None
        if width not in self._pages:
            self._pages[width] = make_pages(
                self._num_pages[width],
                self.config.moe_paged_stash_page_size,
                width,
                dtype=rows_RW.dtype,
                device=rows_RW.device,
            )
        return self._pages[width]

    def buffers(self) -> list[Tensor]:
        """All pages that were needed so far, and their free lists."""
        every = self._pages.values()
        return [each for pages in every for each in (pages.data_PLW, pages.free_P, pages.ends, pages.overflowed)]

    def overflowed(self) -> bool:
        """Whether there ever was no room since the last question. Waits for the device."""
        found = False
        for pages in self._pages.values():
            found |= bool(pages.overflowed)
            pages.overflowed.zero_()
        return found


class _Rows:
    """Takes one tensor, whoever saves it, once."""

    def __init__(self, stash: PagedStash, rows_RW: Tensor, valid: Tensor) -> None:
        self._stash = stash
        self._rows_RW: Tensor | None = rows_RW.detach()
        self._valid = valid
        self._note: _Note | None = None

    def pack(self, tensor: Tensor) -> PackedTensor | None:
        rows_RW = self._rows_RW
        assert rows_RW is not None, "rows are saved after their scope was left"
        same = storage_of(tensor) == storage_of(rows_RW) and tensor.shape == rows_RW.shape
        if not same or tensor.stride() != rows_RW.stride() or tensor.dtype != rows_RW.dtype:
            return None
        pages = self._stash.pages_for(rows_RW)
        if pages is None:
            return None
        if self._note is None:
            self._note = _Note(self._stash.kernels, rows_RW, self._valid, pages)
        return self._note

    def close(self) -> None:
        """What was saved lives on in the graph alone."""
        self._rows_RW = self._note = None


class _Note:
    """Instead of a saved tensor: its pages, which are free when nobody needs it any more."""

    def __init__(self, kernels: Kernels, rows_RW: Tensor, valid: Tensor, pages: Pages) -> None:
        self._kernels = kernels
        self._num_rows = len(rows_RW)
        self._pages = pages
        with torch.no_grad():
            self._table = kernels.pack_rows(rows_RW, valid, pages)

    def __call__(self) -> Tensor:
        return self._kernels.unpack_rows(self._table, self._num_rows, self._pages)

    def __del__(self) -> None:
        with torch.no_grad():
            self._kernels.free_pages(self._table, self._pages)
