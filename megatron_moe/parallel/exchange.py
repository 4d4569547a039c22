"""Rows that move between ranks, with gradients: all-to-all, all-gather and reduce-scatter along the first dim.

Every exchange knows its transpose, and its backward is the transpose. An exchange can be split into start and finish,
so that other work runs while rows travel; in the backward the gradients of that work are computed while the gradient of
the rows travels. Sums over ranks are made in promote(fp32, dtype).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe.parallel.context import ProcessGroup

Sizes = tuple[int, ...]
Landing = Callable[[], Tensor]
"""Waits for what was launched, and gives the rows that came."""


class Exchange(Protocol):
    """A linear map from the rows of all ranks of a group to the rows of all ranks."""

    @property
    def group(self) -> ProcessGroup: ...

    @property
    def transposed(self) -> "Exchange":
        """What carries gradients back."""
        ...

    def launch(self, rows: Tensor) -> Landing:
        """Sends the rows off without waiting. The group has more than one rank, and `rows` is contiguous."""
        ...


@dataclass(frozen=True)
class AllToAll:
    """Rank j gets the next `send[j]` rows of this rank, which gets `receive[j]` rows of rank j, in rank order.

    None: the same number for every rank.
    """

    group: ProcessGroup
    send: Sizes | None = None
    receive: Sizes | None = None

    @property
    def transposed(self) -> "AllToAll":
        return AllToAll(self.group, self.receive, self.send)

    def launch(self, rows: Tensor) -> Landing:
        assert self.send is None or sum(self.send) == len(rows), f"{len(rows)} rows, to be sent {self.send}"
        received = rows.new_empty(len(rows) if self.receive is None else sum(self.receive), *rows.shape[1:])
        work = dist.all_to_all_single(
            received, rows, _list(self.receive), _list(self.send), group=self.group.handle, async_op=True
        )
        return _landing(work, received)


@dataclass(frozen=True)
class AllGather:
    """Every rank gets the rows of all ranks, in rank order. `sizes`: rows of every rank; None: all have as many."""

    group: ProcessGroup
    sizes: Sizes | None = None

    @property
    def transposed(self) -> "ReduceScatter":
        return ReduceScatter(self.group, self.sizes)

    def launch(self, rows: Tensor) -> Landing:
        longest, even = _longest(self.sizes, len(rows))
        if not even:
            rows = _padded(rows, longest)
        gathered = rows.new_empty(self.group.size, *rows.shape)
        work = dist.all_gather_into_tensor(gathered.flatten(0, 1), rows, group=self.group.handle, async_op=True)
        land = _landing(work, gathered)
        if even:
            return lambda: land().flatten(0, 1)
        sizes = self.sizes or ()
        return lambda: torch.cat([part[:size] for part, size in zip(land(), sizes, strict=True)])


@dataclass(frozen=True)
class ReduceScatter:
    """Every rank gets its part of the sum over ranks; the parts stand one behind the other, `sizes` rows each.

    None: equal parts.
    """

    group: ProcessGroup
    sizes: Sizes | None = None

    @property
    def transposed(self) -> "AllGather":
        return AllGather(self.group, self.sizes)

    def launch(self, rows: Tensor) -> Landing:
        assert self.sizes is None or sum(self.sizes) == len(rows), f"{len(rows)} rows, to be scattered {self.sizes}"
        dtype, wide = rows.dtype, rows.to(torch.promote_types(torch.float32, rows.dtype))
        longest, even = _longest(self.sizes, len(rows) // self.group.size)
        if not even:
            wide = torch.cat([_padded(part, longest) for part in wide.split(_list(self.sizes))])
        part = wide.new_empty(longest, *wide.shape[1:])
        work = dist.reduce_scatter_tensor(part, wide, group=self.group.handle, async_op=True)
        land = _landing(work, part)
        held = longest if self.sizes is None else self.sizes[self.group.rank]
        return lambda: land()[:held].to(dtype)


class PendingExchange:
    """Rows on their way."""

    def __init__(self, exchange: Exchange, rows: Tensor) -> None:
        self.exchange = exchange
        self.anchor: Any = None
        """Tensor that connects the graphs of both halves; over one rank the rows themselves. Another object between two
        calls of `replace_boundary`."""
        self._landing: Landing | None = None
        if exchange.group.size == 1:
            self.anchor = rows
        else:
            self.anchor = _Start.apply(rows, self)  # type: ignore[no-untyped-call]

    def finish(self) -> Tensor:
        """The rows that came to this rank; to be called once."""
        anchor, self.anchor = self.anchor, None
        assert isinstance(anchor, Tensor), f"finished with {anchor} in the place of what holds the graph together"
        if self.exchange.group.size == 1:
            return anchor
        return _Finish.apply(anchor, self)  # type: ignore[no-untyped-call,no-any-return]

    def replace_boundary(self, change: Callable[[Any], Any]) -> None:
        """Applies `change` to the tensor that connects the graphs of both halves, for a schedule that cuts there."""
        self.anchor = change(self.anchor)

    def launch(self, exchange: Exchange, rows: Tensor) -> None:
        assert self._landing is None, "rows are already on their way"
        self._landing = exchange.launch(rows.contiguous())

    def land(self) -> Tensor:
        landing, self._landing = self._landing, None
        assert landing is not None, "nothing is on its way"
        return landing()


def start(exchange: Exchange, rows: Tensor) -> PendingExchange:
    """Sends rows [R, ...] off. Over one rank nothing moves and nothing is copied."""
    return PendingExchange(exchange, rows)


def run(exchange: Exchange, rows: Tensor) -> Tensor:
    """Sends rows [R, ...] and waits for those that come."""
    return start(exchange, rows).finish()


# Rows do not pass between the two halves as an output of the first, which would not be ready; an empty tensor does, to
# hold the graph together. The gradient crosses in the same way, in the other direction.


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: PendingExchange) -> Tensor:
        ctx.flight = flight
        flight.launch(flight.exchange, rows)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.flight.land(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, flight: PendingExchange) -> Tensor:
        ctx.flight = flight
        return flight.land()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.flight.launch(ctx.flight.exchange.transposed, grads[0])
        return grads[0].new_empty(0), None


def _landing(work: Any, arrived: Tensor) -> Landing:
    def land() -> Tensor:
        work.wait()
        return arrived

    return land


def _longest(sizes: Sizes | None, share: int) -> tuple[int, bool]:
    """(rows of the longest part, whether all are as long)."""
    if sizes is None:
        return share, True
    return max(sizes), min(sizes) == max(sizes)


def _padded(rows: Tensor, length: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])


def _list(sizes: Sizes | None) -> list[int] | None:
    return None if sizes is None else list(sizes)
