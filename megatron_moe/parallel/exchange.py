"""Differentiable collectives along the first dim: all-to-all, all-gather and reduce-scatter of rows.

The backward of an exchange is its transposed exchange. An exchange can be split into start and finish, to overlap it
with other work; its backward then overlaps with the backward of that work. Reduce-scatter sums in fp32 or fp64, and
rounds the sums to the dtype of the rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe.parallel.autograd_function import AutogradFunction
from megatron_moe.parallel.context import ProcessGroup

Sizes = tuple[int, ...]
Wait = Callable[[], Tensor]
"""Function that waits for a collective and returns the received rows."""


def wait_for(work: dist.Work, tensor: Tensor) -> Tensor:
    """Waits for `work` and returns `tensor`. `partial(wait_for, work, tensor)` is a `Wait` that keeps `tensor`
    alive."""
    work.wait()
    return tensor


class Exchange(Protocol):
    """Collective over the ranks of a group whose result is a linear function of the rows (dim 0) of all ranks."""

    @property
    def group(self) -> ProcessGroup: ...

    @property
    def transposed(self) -> "Exchange":
        """Exchange for the backward: it computes the gradient of the input rows from that of the output rows."""

    def launch(self, rows: Tensor) -> Wait:
        """Starts the collective. Requires a group of more than one rank and contiguous `rows`."""


@dataclass(frozen=True)
class AllToAll:
    """All-to-all: this rank sends `send[j]` rows to rank j and receives `receive[j]` rows from rank j, in rank order.

    Without `send` and `receive`, rows are divided equally among the ranks.
    """

    group: ProcessGroup
    send: Sizes | None = None
    receive: Sizes | None = None

    @property
    def transposed(self) -> "AllToAll":
        return AllToAll(self.group, self.receive, self.send)

    def launch(self, rows: Tensor) -> Wait:
        assert self.send is None or sum(self.send) == len(rows), f"got {len(rows)} rows, but the sizes are {self.send}"
        received = rows.new_empty(len(rows) if self.receive is None else sum(self.receive), *rows.shape[1:])
        work = dist.all_to_all_single(
            received, rows, _list(self.receive), _list(self.send), group=self.group.handle, async_op=True
        )
        return partial(wait_for, work, received)


@dataclass(frozen=True)
class AllGather:
    """All-gather of rows, in rank order. `sizes`: number of rows of each rank; None means that it is equal on all
    ranks."""

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
    """Reduce-scatter (sum) of rows. `sizes`: number of rows that each rank receives; None means that it is equal on all
    ranks."""

    group: ProcessGroup
    sizes: Sizes | None = None

    @property
    def transposed(self) -> "AllGather":
        return AllGather(self.group, self.sizes)

    def launch(self, rows: Tensor) -> Wait:
        assert self.sizes is None or sum(self.sizes) == len(rows), (
            f"got {len(rows)} rows, but the sizes are {self.sizes}"
        )
        dtype, wide = rows.dtype, rows.to(torch.promote_types(torch.float32, rows.dtype))
        longest, even = _longest(self.sizes, len(rows) // self.group.size)
        if not even:
            wide = torch.cat([_padded(part, longest) for part in wide.split(_list(self.sizes))])
        part = wide.new_empty(longest, *wide.shape[1:])
        work = dist.reduce_scatter_tensor(part, wide, group=self.group.handle, async_op=True)
        held = longest if self.sizes is None else self.sizes[self.group.rank]
        return lambda: wait_for(work, part)[:held].to(dtype)


class SplitExchange(ABC):
    """Differentiable exchange in two halves, so that a schedule can launch other work in between.

    `start` sends and `finish` returns what was received. In the backward, `finish` sends the gradients of what was
    received, and `start` returns those of its inputs. An object is used for one exchange.
    """

    def __init__(self, overlap: Callable[[], None] | None = None) -> None:
        """`overlap`: called in the backward while gradients are exchanged."""
        self._overlap = overlap
        self._boundary: Any = None
        """Tensor that connects both halves in the autograd graph. `replace_boundary` can replace it temporarily by
        another object."""
        self._work: Any = None

    @abstractmethod
    def send(self, *inputs: Tensor) -> Any:
        """Starts to send the inputs, and returns the work to pass to `receive`."""

    @abstractmethod
    def receive(self, work: Any) -> Any:
        """Waits for the received data: a tensor or a tuple of tensors."""

    @abstractmethod
    def send_grads(self, *grads: Tensor) -> Any:
        """Starts to send the gradients of what was received."""

    @abstractmethod
    def receive_grads(self, work: Any) -> tuple[Tensor | None, ...]:
        """Waits for the gradients of the inputs."""

    def start(self, *inputs: Tensor) -> Self:
        self._boundary = _Start.apply(self, *inputs)
        return self

    def finish(self) -> Any:
        """Finishes the exchange and returns what was received. Can be called once."""
        return _Finish.apply(self._take_boundary(), self)

    def replace_boundary(self, change: Callable[[Any], Any]) -> None:
        """Replaces the boundary tensor by `change(tensor)`, so that a schedule can cut the autograd graph between start
        and finish."""
        self._boundary = change(self._boundary)

    def _take_boundary(self) -> Tensor:
        boundary, self._boundary = self._boundary, None
        assert isinstance(boundary, Tensor), f"finish was called while {boundary} replaced the boundary tensor"
        return boundary

    def _take_work(self) -> Any:
        work, self._work = self._work, None
        assert work is not None, "no exchange is in progress"
        return work


# The received tensor does not exist yet when `_Start` returns. `_Start` therefore outputs an empty boundary tensor,
# which is the input of `_Finish`.


class _Start(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, exchange: SplitExchange, *inputs: Tensor) -> Tensor:
        ctx.exchange = exchange
        assert exchange._work is None, "an exchange is already in progress"
        exchange._work = exchange.send(*inputs)
        return inputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.exchange._overlap is not None:
            ctx.exchange._overlap()
        return None, *ctx.exchange.receive_grads(ctx.exchange._take_work())


class _Finish(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, boundary: Tensor, exchange: SplitExchange) -> Any:
        ctx.exchange = exchange
        return exchange.receive(exchange._take_work())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.exchange._work is None, "an exchange is already in progress"
        ctx.exchange._work = ctx.exchange.send_grads(*grads)
        return grads[0].new_empty(0), None


class CollectiveExchange(SplitExchange):
    """Exchange of rows [R, ...] by a collective. In a group of one rank, nothing is communicated or copied."""

    def __init__(self, collective: Exchange, overlap: Callable[[], None] | None = None) -> None:
        super().__init__(overlap)
        self._collective = collective

    def start(self, *inputs: Tensor) -> Self:
        if self._collective.group.size > 1:
            return super().start(*inputs)
        (self._boundary,) = inputs
        return self

    def finish(self) -> Tensor:
        return super().finish() if self._collective.group.size > 1 else self._take_boundary()

    def send(self, *inputs: Tensor) -> Wait:
        return self._collective.launch(inputs[0].contiguous())

    def receive(self, work: Wait) -> Tensor:
        return work()

    def send_grads(self, *grads: Tensor) -> Wait:
        return self._collective.transposed.launch(grads[0].contiguous())

    def receive_grads(self, work: Wait) -> tuple[Tensor | None, ...]:
        return (work(),)


def start_exchange(collective: Exchange, rows: Tensor, overlap: Callable[[], None] | None = None) -> CollectiveExchange:
    """Starts to exchange rows [R, ...]. Call `finish` of the returned object to get the received rows. `overlap`: see
    `SplitExchange`."""
    return CollectiveExchange(collective, overlap).start(rows)


def run_exchange(collective: Exchange, rows: Tensor) -> Tensor:
    """Exchanges rows [R, ...] and returns the rows that this rank receives."""
    return start_exchange(collective, rows).finish()


def _longest(sizes: Sizes | None, share: int) -> tuple[int, bool]:
    """Returns (rows of the longest part, whether all parts have equal length). `share`: rows per part if `sizes` is
    None."""
    if sizes is None:
        return share, True
    return max(sizes), min(sizes) == max(sizes)


def _padded(rows: Tensor, length: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])


def _list(sizes: Sizes | None) -> list[int] | None:
    return None if sizes is None else list(sizes)
