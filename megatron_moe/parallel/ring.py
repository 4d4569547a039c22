"""How context-parallel ranks exchange what they hold: around a ring, or heads against places.

The ring sends to one neighbour only, as an all-to-all in which all other shares are empty. That is a plain send and
receive on every backend, needs no matching of calls, and gives ranks as threads the same code.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_moe.parallel import alltoall
from megatron_moe.parallel.alltoall import AllToAll, Landing
from megatron_moe.parallel.context import Group


class Ring:
    """The ranks of a group in a circle: what a rank sends goes to the next, what it receives comes from the one before.

    No gradient flows: forward and backward of ring attention each turn the ring themselves. Without a group the rank is
    alone.
    """

    def __init__(self, group: Group | None) -> None:
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank, group.size)

    def circulate(self, tensors: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """(rank, its tensors) of every rank, the own first; the next are on their way while these are worked on.

        All ranks hold tensors of the same shapes and of one dtype.
        """
        if self.size == 1:
            yield 0, list(tensors)
            return
        flat = pack(tensors)
        for step in range(self.size):
            landing = self.pass_on(flat) if step + 1 < self.size else None
            yield (self.rank - step) % self.size, unpack(flat, tensors)
            if landing is not None:
                flat = landing()

    def pass_on(self, flat: Tensor) -> Landing:
        """Sends a vector to the next rank, and gives the one from the rank before."""
        if self.group is None or self.size == 1:
            return lambda: flat
        send, receive = [0] * self.size, [0] * self.size
        send[(self.rank + 1) % self.size] = receive[(self.rank - 1) % self.size] = len(flat)
        return AllToAll(self.group, tuple(send), tuple(receive)).launch(flat)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """All elements in one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def unpack(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a vector that `pack` made of tensors of these shapes."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def scatter_heads(x_SBND: Tensor, group: Group) -> Tensor:
    """All heads of this rank's places -> this rank's share of the heads at the places of all ranks, rank by rank:
    [S, B, N, D] -> [size * S, B, N / size, D]. Backward: `gather_heads` of the gradient."""
    heads = x_SBND.shape[2]
    assert heads % group.size == 0, f"{heads} heads do not divide among {group.size} ranks"
    parts = x_SBND.unflatten(2, (group.size, -1)).movedim(2, 0)
    return alltoall.run(AllToAll(group), parts).flatten(0, 1)


def gather_heads(x_SBND: Tensor, group: Group) -> Tensor:
    """Undoes `scatter_heads`: [size * S, B, N / size, D] -> [S, B, N, D]. Backward: `scatter_heads` of the gradient."""
    parts = alltoall.run(AllToAll(group), x_SBND.unflatten(0, (group.size, -1)))
    return parts.movedim(0, 2).flatten(2, 3)
