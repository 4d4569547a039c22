"""Paged stash: saves only the used rows of expert activations for backward, in pages of a shared buffer.

Row counts that are known only on the device force expert tensors to be allocated for the worst case. To save memory,
only their used rows are saved for backward, in pages shared by all layers and microbatches. Backward copies them to a
temporary worst-case tensor. None of this synchronises the host. If no device page is free, rows are saved in pages of
pinned host memory, which kernels read and write directly. If too few pages are free there, too, the restored rows are
NaN and `PagedStash.overflowed` is set, so that all ranks reject the training step and repeat it without the stash.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_moe.config.memory import PagedStashConfig
from megatron_moe.kernels.ops import Kernels
from megatron_moe.kernels.pages import Pages, make_pages
from megatron_moe.memory.output_discard import PackedTensor, storage_id
from megatron_moe.parallel.streams import HostCopies


class PagedStash:
    """Page pools of one rank, one per row width. Each pool is allocated at first use."""

    def __init__(
        self,
        config: PagedStashConfig,
        num_pages: Mapping[int, int],
        kernels: Kernels,
        copies: HostCopies,
        device: torch.device,
        num_host_pages: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """`num_pages`, `num_host_pages`: row width (elements per row) -> number of pages on the device, or on the host.
        Tensors of other widths are saved whole. `copies` allocates host memory."""
        self.config = config
        self.kernels = kernels
        self._num_pages, self._num_host_pages, self._copies = num_pages, num_host_pages, copies
        self._pages: dict[int, Pages] = {}
        self.overflowed = torch.zeros((), dtype=torch.int32, device=device)
        """int32 scalar on the device: 1 if too few pages were free at any time since `begin_step`."""
        self.is_disabled = False
        """True within `disabled`."""

    def begin_step(self) -> None:
        """Clears the flag `overflowed` before a step."""
        self.overflowed.zero_()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Context in which all rows are saved whole, for the repetition of a step in which too few pages were free."""
        self.is_disabled = True
        try:
            yield
        finally:
            self.is_disabled = False

    def new_policy(self, rows_RW: Tensor, valid: Tensor) -> "_RowsPolicy":
        """Policy for the consumers of `rows_RW`: only the first `valid` rows (int32 scalar on the device) are saved."""
        return _RowsPolicy(self, rows_RW, valid)

    def pages_for(self, rows_RW: Tensor) -> Pages | None:
        """Page pool for the row width of `rows_RW`. None if this width has no pool; the tensor is then saved whole."""
        width = rows_RW.shape[1]
        if width not in self._num_pages:
            return None
        if width not in self._pages:
            page_size, num_host = self.config.moe_paged_stash_page_size, self._num_host_pages.get(width, 0)
            self._pages[width] = make_pages(
                self._num_pages[width],
                page_size,
                width,
                dtype=rows_RW.dtype,
                device=rows_RW.device,
                host=self._copies.host_buffer((num_host + 1) * page_size * width, rows_RW.dtype) if num_host else None,
                overflowed=self.overflowed,
            )
        return self._pages[width]

    def buffers(self) -> list[Tensor]:
        """Device tensors of the stash and of the page pools allocated so far: overflow flag, pages, free lists and
        counters."""
        every = self._pages.values()
        found = [self.overflowed, *(buffer for p in every for buffer in (p.data_PLW, p.free_P, p.ends))]
        return found + [p.host_QLW for p in every if not p.num_host]


class _RowsPolicy:
    """Policy that packs one tensor of rows. All consumers of that tensor share the packed copy."""

    def __init__(self, stash: PagedStash, rows_RW: Tensor, valid: Tensor) -> None:
        self._stash = stash
        self._rows_RW: Tensor | None = rows_RW.detach()
        self._valid = valid
        self._packed: _StashedRows | None = None

    def pack(self, tensor: Tensor) -> PackedTensor | None:
        rows_RW = self._rows_RW
        assert rows_RW is not None, "rows were saved after the end of their scope"
        same = storage_id(tensor) == storage_id(rows_RW) and tensor.shape == rows_RW.shape
        if not same or tensor.stride() != rows_RW.stride() or tensor.dtype != rows_RW.dtype:
            return None
        pages = self._stash.pages_for(rows_RW)
        if pages is None:
            return None
        if self._packed is None:
            self._packed = _StashedRows(self._stash.kernels, rows_RW, self._valid, pages)
        return self._packed

    def close(self) -> None:
        """Drops the policy's references to the rows, so that only the autograd graph keeps the packed copy alive."""
        self._rows_RW = self._packed = None


class _StashedRows:
    """Packed form of saved rows. Its pages are freed when the autograd graph releases it."""

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
