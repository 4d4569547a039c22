"""Point-to-point communication between pipeline stages: activations forward, gradients backward.

The stages form a ring. Each directed edge has one communicator per kind of message, so messages arrive in the order in
which they were sent, independently of other edges. A pipeline can therefore deadlock only if its schedule has a cyclic
dependency, which `pipeline/simulator.py` excludes. Shapes are not sent; sender and receiver compute them.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.exchange import wait_for
from megatron_moe.parallel.grid import all_groups

Kind = Literal["activation", "gradient"]
KINDS: tuple[Kind, Kind] = ("activation", "gradient")
Edge = tuple[int, int]
"""(source, destination), as indices in the pipeline group."""


def connect(context: ParallelContext) -> "Links":
    """Creates the pipeline links of this rank. All ranks of the world must call it."""
    return (context.make_links or Links)(context)


class Links:
    """Point-to-point links of this rank to its pipeline neighbours, which are given as indices in the group "pp"."""

    def __init__(self, context: ParallelContext) -> None:
        self._context = context
        self._group = context.group("pp")
        self.rank = self._group.rank
        """Index of this rank in the pipeline group."""
        # Each communicator, one per kind and edge color, spans the pipeline, but a rank uses it for one edge only. All
        # ranks of the world create all communicators in the same order.
        size = self._group.size
        num_colors = 0 if size == 1 else 2 + size % 2
        self._handles: dict[tuple[Kind, int], dist.ProcessGroup] = {}
        for ranks in all_groups(context.config)["pp"]:
            for kind in KINDS:
                for color in range(num_colors):
                    handle = context.communicator(ranks, f"{kind} {color}")
                    if context.rank in ranks:
                        self._handles[kind, color] = handle

    def send(self, kind: Kind, tensor: Tensor, to: int, label: str) -> Callable[[], object]:
        """Starts to send `tensor`; the returned function waits for the end of the send. Until then `tensor` must not
        be modified. `label` names the message in errors."""
        handle = self._handle(kind, (self.rank, to))
        work = dist.isend(tensor, self._group.ranks[to], group=handle)
        assert work is not None, f"{label}: this rank is not in the pipeline of rank {to}"
        return partial(wait_for, work, tensor)

    def receive(self, kind: Kind, shape: tuple[int, ...], source: int, label: str) -> Callable[[], Tensor]:
        """Starts to receive a tensor in the dtype of the parameters; the returned function waits for and returns it."""
        handle = self._handle(kind, (source, self.rank))
        tensor = torch.empty(shape, dtype=self._context.dtype, device=self._context.device)
        work = dist.irecv(tensor, self._group.ranks[source], group=handle)
        assert work is not None, f"{label}: this rank is not in the pipeline of rank {source}"
        return partial(wait_for, work, tensor)

    def _handle(self, kind: Kind, edge: Edge) -> dist.ProcessGroup:
        forward = edge if kind == "activation" else edge[::-1]
        return self._handles[kind, edge_color(forward, self._group.size)]


def edge_color(edge: Edge, size: int) -> int:
    """Color of an edge in a ring of `size` ranks. The color selects the communicator of the edge. A rank's two edges
    have different colors: 0 and 1 alternate along the ring, and the last edge of an odd ring has color 2."""
    source, destination = edge
    assert destination == (source + 1) % size, f"stages {source} and {destination} of {size} are not neighbours"
    return 2 if destination == 0 and size % 2 else source % 2
