"""Context parallelism: which positions of a sequence a rank holds, and the ring and all-to-all exchanges of
attention."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_moe.parallel import exchange
from megatron_moe.parallel.context import ProcessGroup
from megatron_moe.parallel.exchange import AllToAll, Landing

Split = Literal["zigzag", "contiguous"]
Chunks = tuple[range, ...]


def split_places(split: Split, seq: int, num_ranks: int) -> tuple[Chunks, ...]:
    """The chunks of every rank.

    zigzag: of 2n equal chunks rank i holds chunks i and 2n - 1 - i, which under a causal mask gives every rank the same
    work. contiguous: rank i holds the i-th of n equal chunks. One rank holds everything.
    """
    if num_ranks == 1:
        return ((range(seq),),)
    num_chunks = 2 * num_ranks if split == "zigzag" else num_ranks
    assert seq % num_chunks == 0, f"a sequence of {seq} tokens is not {num_chunks} equal chunks"
    size = seq // num_chunks
    chunks = [range(start, start + size) for start in range(0, seq, size)]
    if split == "contiguous":
        return tuple((chunk,) for chunk in chunks)
    return tuple((chunks[i], chunks[-1 - i]) for i in range(num_ranks))


def fewest_ranks(longest: int, limit: int, num_sequences: int, num_ranks: int) -> int:
    """The smallest power of two of ranks to split sequences over.

    Each then holds at most `limit` tokens of the `longest` document, and the groups of so many ranks share the
    sequences of the microbatch equally. At most `num_ranks`, which is a power of two.
    """
    degree = 1
    while degree < num_ranks and (longest > limit * degree or num_sequences % (num_ranks // degree)):
        degree *= 2
    return degree


@dataclass(frozen=True)
class SequencePart:
    """What one context-parallel rank holds of a microbatch's sequences, and what the others of its group do."""

    of_ranks: tuple[Chunks, ...]
    """The chunks of every rank of the group, in group order."""
    rank: int
    """Index in the group."""
    group: str = "cp"
    """Name of the ranks that split the same sequences."""
    share: tuple[int, int] = (0, 1)
    """(index, number): which share of the microbatch's sequences the group has."""

    @property
    def num_parts(self) -> int:
        """How many ranks have a part of the microbatch."""
        return len(self.of_ranks) * self.share[1]

    @property
    def chunks(self) -> Chunks:
        """Of this rank."""
        return self.of_ranks[self.rank]

    def take(self, x_BS: Tensor) -> Tensor:
        """This rank's part of a tensor over the whole microbatch."""
        return take_places(self.sequences(x_BS), self.chunks)

    def sequences(self, x_BS: Tensor) -> Tensor:
        """All places of the sequences of this rank's group."""
        index, number = self.share
        return x_BS if number == 1 else x_BS.chunk(number)[index]


def take_places(x_BS: Tensor, chunks: Chunks) -> Tensor:
    """The places of `chunks`, in their order, of a tensor whose dim 1 is the whole sequence."""
    return torch.cat([x_BS[:, chunk.start : chunk.stop] for chunk in chunks], dim=1)


def joined(parts: Sequence[Chunks]) -> Chunks:
    """All places of several ranks in ascending order; neighbouring chunks become one."""
    joined: list[range] = []
    for chunk in sorted((chunk for chunks in parts for chunk in chunks), key=lambda chunk: chunk.start):
        if joined and joined[-1].stop == chunk.start:
            joined[-1] = range(joined[-1].start, chunk.stop)
        else:
            joined.append(chunk)
    return tuple(joined)


def in_order(x_S: Tensor, parts: Sequence[Chunks]) -> Tensor:
    """Rows that stand rank by rank (dim 0, `parts` says which) in ascending order of their places."""
    pieces, order = _pieces(x_S, [chunk for chunks in parts for chunk in chunks])
    return torch.cat([pieces[index] for index in order])


def by_rank(x_S: Tensor, parts: Sequence[Chunks]) -> Tensor:
    """Undoes `in_order`."""
    chunks = [chunk for chunks in parts for chunk in chunks]
    pieces, order = _pieces(x_S, sorted(chunks, key=lambda chunk: chunk.start))
    ranked = sorted(range(len(chunks)), key=lambda index: chunks[index].start)
    assert order == list(range(len(chunks))), f"places in order {order}"
    return torch.cat([pieces[ranked.index(index)] for index in range(len(chunks))])


def _pieces(x_S: Tensor, chunks: Sequence[range]) -> tuple[tuple[Tensor, ...], list[int]]:
    """The rows of every chunk, and the indices of the chunks by ascending place."""
    order = sorted(range(len(chunks)), key=lambda index: chunks[index].start)
    return x_S.split([len(chunk) for chunk in chunks]), order


class Ring:
    """The ranks of a group in a circle: what a rank sends goes to the next, what it receives comes from the one before.

    No gradient flows: forward and backward of ring attention each turn the ring themselves. Without a group the rank is
    alone.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
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


def scatter_heads(x_SBND: Tensor, group: ProcessGroup) -> Tensor:
    """All heads of this rank's places -> this rank's share of the heads at the places of all ranks, rank by rank:
    [S, B, N, D] -> [size * S, B, N / size, D]. Backward: `gather_heads` of the gradient."""
    heads = x_SBND.shape[2]
    assert heads % group.size == 0, f"{heads} heads do not divide among {group.size} ranks"
    parts = x_SBND.unflatten(2, (group.size, -1)).movedim(2, 0)
    return exchange.run(AllToAll(group), parts).flatten(0, 1)


def gather_heads(x_SBND: Tensor, group: ProcessGroup) -> Tensor:
    """Undoes `scatter_heads`: [size * S, B, N / size, D] -> [S, B, N, D]. Backward: `scatter_heads` of the gradient."""
    parts = exchange.run(AllToAll(group), x_SBND.unflatten(0, (group.size, -1)))
    return parts.movedim(0, 2).flatten(2, 3)
