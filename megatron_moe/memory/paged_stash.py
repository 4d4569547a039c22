"""Paged stash: saves only the used rows of expert activations for backward, in pages of a shared buffer.

If only the device has the number of rows per rank, row tensors have worst-case size while their layer runs. The used
rows are copied to pages shared by all layers and microbatches, and in backward into a worst-case tensor, for which the
allocator reuses the memory of the previous layer. The host does not synchronise. If pages run out, unpacked rows are
NaN, so gradients are non-finite and every rank rejects the step.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_moe.config.memory import PagedStashConfig
from megatron_moe.kernels.ops import Kernels
from megatron_moe.kernels.pages import Pages, make_pages
from megatron_moe.memory.output_discard import PackedTensor, storage_of


class PagedStash:
    """Pages of one rank: one buffer per row width, allocated at first use."""

    def __init__(self, config: PagedStashConfig, num_pages: Mapping[int, int], kernels: Kernels) -> None:
        """`num_pages`: row width -> number of pages. Tensors with rows of other widths are saved whole."""
        self.config = config
        self.kernels = kernels
        self._num_pages = num_pages
        self._pages: dict[int, Pages] = {}

    def open(self, rows_RW: Tensor, valid: Tensor) -> "_RowsPolicy":
        """Policy for the consumers of `rows_RW`, of which the first `valid` rows are used."""
        return _RowsPolicy(self, rows_RW, valid)

    def pages_for(self, rows_RW: Tensor) -> Pages | None:
        """Pages for rows of this width; None: the tensor is saved whole."""
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
        """Tensors of all pages allocated so far, with their free lists."""
        every = self._pages.values()
        return [buffer for p in every for buffer in (p.data_PLW, p.free_P, p.ends, p.overflowed)]

    def overflowed(self) -> bool:
        """True if pages ran out since the last call. Synchronises with the device."""
        found = False
        for pages in self._pages.values():
            found |= bool(pages.overflowed)
            pages.overflowed.zero_()
        return found


class _RowsPolicy:
    """Policy that packs one tensor of rows, once for all its consumers."""

    def __init__(self, stash: PagedStash, rows_RW: Tensor, valid: Tensor) -> None:
        self._stash = stash
        self._rows_RW: Tensor | None = rows_RW.detach()
        self._valid = valid
        self._packed: _StashedRows | None = None

    def pack(self, tensor: Tensor) -> PackedTensor | None:
        rows_RW = self._rows_RW
        assert rows_RW is not None, "rows are saved after the end of their scope"
        same = storage_of(tensor) == storage_of(rows_RW) and tensor.shape == rows_RW.shape
        if not same or tensor.stride() != rows_RW.stride() or tensor.dtype != rows_RW.dtype:
            return None
        pages = self._stash.pages_for(rows_RW)
        if pages is None:
            return None
        if self._packed is None:
            self._packed = _StashedRows(self._stash.kernels, rows_RW, self._valid, pages)
        return self._packed

    def close(self) -> None:
        """Drops the references, so that only the autograd graph owns the packed rows."""
        self._rows_RW = self._packed = None


class _StashedRows:
    """Packed form of saved rows; frees its pages when the graph drops it."""

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
