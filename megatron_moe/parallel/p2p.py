"""Point-to-point messages between the stages of a pipeline: activations forward, their gradients backward.

Every directed edge of the ring of stages has a communicator of its own for each kind of message, so that messages on it
arrive in the order in which they were sent and never wait behind those of another edge. A pipeline therefore cannot
deadlock unless its schedule does, which `pipeline/simulator.py` excludes. Shapes are known on both sides
beforehand.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.grid import all_groups
from megatron_moe.parallel.mailbox import Letter, Mailbox

Kind = Literal["activation", "gradient"]
KINDS: tuple[Kind, Kind] = ("activation", "gradient")
Edge = tuple[int, int]
"""(from, to), as indices in the pipeline group."""


class Links(Protocol):
    """How a pipeline rank reaches its neighbours. Ranks are indices in the group "pp"; messages of one kind arrive in
    the order in which they were sent."""

    rank: int
    """Of this rank in the pipeline."""

    def send(self, kind: Kind, tensor: Tensor, to: int, label: str) -> Callable[[], object]:
        """Sends without waiting. The tensor must not change until the returned function, which waits, has been
        called. `label` says what it is, for error messages."""
        ...

    def receive(self, kind: Kind, shape: tuple[int, ...], source: int, label: str) -> Callable[[], Tensor]:
        """Asks for the next message, in the params dtype, without waiting; the returned function waits for it."""
        ...


def connect(context: ParallelContext) -> Links:
    """The links of this rank. Every rank of the world must call it together."""
    if context.group("pp").size == 1:
        return NoLinks()
    if context.mailbox is not None:
        return MailLinks(context, context.mailbox)
    return ProcessLinks(context)


class NoLinks:
    """A pipeline of one rank has no neighbours."""

    rank = 0

    def send(self, kind: Kind, tensor: Tensor, to: int, label: str) -> Callable[[], object]:
        raise AssertionError(f"{label} to rank {to} of a pipeline of one")

    def receive(self, kind: Kind, shape: tuple[int, ...], source: int, label: str) -> Callable[[], Tensor]:
        raise AssertionError(f"{label} from rank {source} of a pipeline of one")


class MailLinks:
    """Links between ranks that are threads. Checks that what arrives is what was expected."""

    def __init__(self, context: ParallelContext, mailbox: Mailbox) -> None:
        self._group = context.group("pp")
        self.rank = self._group.rank
        self._mailbox = mailbox

    def send(self, kind: Kind, tensor: Tensor, to: int, label: str) -> Callable[[], object]:
        here, there = self._group.ranks[self.rank], self._group.ranks[to]
        self._mailbox.post((here, there, kind), Letter(label, tensor.detach().clone()))
        return lambda: None

    def receive(self, kind: Kind, shape: tuple[int, ...], source: int, label: str) -> Callable[[], Tensor]:
        here, there = self._group.ranks[self.rank], self._group.ranks[source]

        def wait() -> Tensor:
            tensor = self._mailbox.take((there, here, kind), label)
            assert tuple(tensor.shape) == shape, f"{label}: {tuple(tensor.shape)} came, {shape} was expected"
            return tensor

        return wait


class ProcessLinks:
    """Links between processes, through torch.distributed."""

    def __init__(self, context: ParallelContext) -> None:
        self._context = context
        self._group = context.group("pp")
        self.rank = self._group.rank
        # One communicator per kind and colour spans the pipeline; each rank uses it for one edge only. All ranks of the
        # world take part in making all of them, in the same order.
        size = self._group.size
        colours = sorted({edge_colour(edge, size) for edge in ring(size)})
        self._handles: dict[tuple[Kind, int], dist.ProcessGroup] = {}
        for ranks in all_groups(context.config)["pp"]:
            for kind in KINDS:
                for colour in colours:
                    handle = context.communicator(ranks, f"{kind} {colour}")
                    if context.rank in ranks:
                        self._handles[kind, colour] = handle

    def send(self, kind: Kind, tensor: Tensor, to: int, label: str) -> Callable[[], object]:
        handle = self._handle(kind, (self.rank, to))
        work = dist.isend(tensor, self._group.ranks[to], group=handle)
        assert work is not None, f"{label}: this rank is not in the pipeline of rank {to}"
        return partial(_finish, work, tensor)

    def receive(self, kind: Kind, shape: tuple[int, ...], source: int, label: str) -> Callable[[], Tensor]:
        handle = self._handle(kind, (source, self.rank))
        tensor = torch.empty(shape, dtype=self._context.dtype, device=self._context.device)
        work = dist.irecv(tensor, self._group.ranks[source], group=handle)
        assert work is not None, f"{label}: this rank is not in the pipeline of rank {source}"
        return partial(_finish, work, tensor)

    def _handle(self, kind: Kind, edge: Edge) -> dist.ProcessGroup:
        forward = edge if kind == "activation" else edge[::-1]
        return self._handles[kind, edge_colour(forward, self._group.size)]


def _finish(work: dist.Work, tensor: Tensor) -> Tensor:
    """Waits until the tensor, kept alive till then, has left or come."""
    work.wait()
    return tensor


def ring(size: int) -> list[Edge]:
    """The edges that activations travel: from every stage to the next, and from the last rank to the first."""
    return [(index, (index + 1) % size) for index in range(size)]


def edge_colour(edge: Edge, size: int) -> int:
    """A number per edge of the ring, different for the two edges of every rank: 0 and 1, and 2 to close an odd ring."""
    source, destination = edge
    assert destination == (source + 1) % size, f"stages {source} and {destination} of {size} are not neighbours"
    return 2 if destination == 0 and size % 2 else source % 2
