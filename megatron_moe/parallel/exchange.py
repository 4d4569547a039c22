"""Differentiable collectives along the first dim: all-to-all, all-gather and reduce-scatter of rows.

The backward of an exchange is its transposed exchange. An exchange can be split into start and finish, to overlap it
with other work; its backward then overlaps with the backward of that work. Reduce-scatter sums in fp32 or fp64, and
rounds the sums to the dtype of the rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe.parallel.context import ProcessGroup

Sizes = tuple[int, ...]
Wait = Callable[[], Tensor]
"""Function that waits for a collective and returns the received rows."""


def wait_for(work: dist.Work, tensor: Tensor) -> Tensor:
    """Waits for `work` and returns `tensor`. `partial(wait_for, work, tensor)` is a `Wait` that holds `tensor`."""
    work.wait()
    return tensor


class Exchange(Protocol):
    """Collective over the ranks of a group whose result is a linear function of the rows (dim 0) of all ranks."""

    @property
    def group(self) -> ProcessGroup: ...

    @property
    def transposed(self) -> "Exchange":
        """Exchange for the backward: it computes the gradient of the input rows from that of the output rows."""
        ...

    def launch(self, rows: Tensor) -> Wait:
        """Starts the collective. Requires a group of more than one rank and contiguous `rows`."""
        ...


@dataclass(frozen=True)
class AllToAll:
    """All-to-all: this rank sends `send[j]` rows to rank j and receives `receive[j]` rows from rank j, in rank order.

    `send` and `receive` None: rows are divided equally among the ranks.
    """

    group: ProcessGroup
    send: Sizes | None = None
    receive: Sizes | None = None

    @property
    def transposed(self) -> "AllToAll":
        return AllToAll(self.group, self.receive, self.send)

    def launch(self, rows: Tensor) -> Wait:
        assert self.send is None or sum(self.send) == len(rows), f"{len(rows)} rows for sizes {self.send}"
        received = rows.new_empty(len(rows) if self.receive is None else sum(self.receive), *rows.shape[1:])
        work = dist.all_to_all_single(
            received, rows, _list(self.receive), _list(self.send), group=self.group.handle, async_op=True
        )
        return partial(wait_for, work, received)


@dataclass(frozen=True)
class AllGather:
    """All-gather of rows, in rank order. `sizes`: number of rows of each rank; None: equal on all ranks."""

    group: ProcessGroup
    sizes: Sizes | None = None

    @property
    def transposed(self) -> "ReduceScatter":
        return ReduceScatter(self.group, self.sizes)

    def launch(self, rows: Tensor) -> Wait:
        longest, even = _longest(self.sizes, len(rows))
        if not even:
            rows = _padded(rows, longest)
        gathered = rows.new_empty(self.group.size, *rows.shape)
        work = dist.all_gather_into_tensor(gathered.flatten(0, 1), rows, group=self.group.handle, async_op=True)
        wait = partial(wait_for, work, gathered)
        if even:
            return lambda: wait().flatten(0, 1)
        sizes = self.sizes or ()
        return lambda: torch.cat([part[:size] for part, size in zip(wait(), sizes, strict=True)])


@dataclass(frozen=True)
class ReduceScatter:
    """Reduce-scatter (sum) of rows. `sizes`: number of rows that each rank receives; None: equal on all ranks."""

    group: ProcessGroup
    sizes: Sizes | None = None

    @property
    def transposed(self) -> "AllGather":
        return AllGather(self.group, self.sizes)

    def launch(self, rows: Tensor) -> Wait:
        assert self.sizes is None or sum(self.sizes) == len(rows), f"{len(rows)} rows for sizes {self.sizes}"
        dtype, wide = rows.dtype, rows.to(torch.promote_types(torch.float32, rows.dtype))
        longest, even = _longest(self.sizes, len(rows) // self.group.size)
        if not even:
            wide = torch.cat([_padded(part, longest) for part in wide.split(_list(self.sizes))])
        part = wide.new_empty(longest, *wide.shape[1:])
        work = dist.reduce_scatter_tensor(part, wide, group=self.group.handle, async_op=True)
        held = longest if self.sizes is None else self.sizes[self.group.rank]
        return lambda: wait_for(work, part)[:held].to(dtype)


class PendingExchange:
    """Started exchange of rows [R, ...]. In a group of one rank, nothing is communicated or copied."""

    def __init__(self, exchange: Exchange, rows: Tensor, overlap: Callable[[], None] | None = None) -> None:
        self.exchange, self.overlap = exchange, overlap
        self.anchor: Any = None
        """Empty tensor that connects start and finish in the autograd graph. In a group of one rank, it is the
        input rows instead. `replace_boundary` can replace it temporarily by another object."""
        self._wait: Wait | None = None
        if exchange.group.size == 1:
            self.anchor = rows
        else:
            self.anchor = _Start.apply(rows, self)  # type: ignore[no-untyped-call]

    def finish(self) -> Tensor:
        """Waits for the rows that this rank receives and returns them. Can be called once."""
        anchor, self.anchor = self.anchor, None
        assert isinstance(anchor, Tensor), f"the anchor of the graph is {anchor}, not a tensor"
        if self.exchange.group.size == 1:
            return anchor
        return _Finish.apply(anchor, self)  # type: ignore[no-untyped-call,no-any-return]

    def replace_boundary(self, change: Callable[[Any], Any]) -> None:
        """Replaces `anchor` by `change(anchor)`, so that a schedule can cut the autograd graph before `finish`."""
        self.anchor = change(self.anchor)

    def launch(self, exchange: Exchange, rows: Tensor) -> None:
        assert self._wait is None, "an exchange is already pending"
        self._wait = exchange.launch(rows.contiguous())

    def wait(self) -> Tensor:
        wait, self._wait = self._wait, None
        assert wait is not None, "no exchange is pending"
        return wait()


def start(exchange: Exchange, rows: Tensor, overlap: Callable[[], None] | None = None) -> PendingExchange:
    """Starts to exchange rows [R, ...]; `finish` of the result returns the received rows. `overlap` is called in the
    backward while the gradients of the rows are exchanged."""
    return PendingExchange(exchange, rows, overlap)


def run(exchange: Exchange, rows: Tensor) -> Tensor:
    """Exchanges rows [R, ...] and returns the rows that this rank receives."""
    return start(exchange, rows).finish()


# `_Start` cannot output the received rows, which are not ready yet, so it outputs an empty anchor tensor, the input of
# `_Finish`. In backward, `_Finish` starts the exchange of the gradients and `_Start` waits for it.


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, pending: PendingExchange) -> Tensor:
        ctx.pending = pending
        pending.launch(pending.exchange, rows)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.pending.overlap is not None:
            ctx.pending.overlap()
        return ctx.pending.wait(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, pending: PendingExchange) -> Tensor:
        ctx.pending = pending
        return pending.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.pending.launch(ctx.pending.exchange.transposed, grads[0])
        return grads[0].new_empty(0), None


def _longest(sizes: Sizes | None, share: int) -> tuple[int, bool]:
    """(rows of the longest part, whether all parts have equal length). `share`: rows per part if `sizes` is None."""
    if sizes is None:
        return share, True
    return max(sizes), min(sizes) == max(sizes)


def _padded(rows: Tensor, length: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])


def _list(sizes: Sizes | None) -> list[int] | None:
    return None if sizes is None else list(sizes)
