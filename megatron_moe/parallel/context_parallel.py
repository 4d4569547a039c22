"""Context parallelism: assignment of sequence positions to ranks, ring and all-to-all communication for attention."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_moe.parallel import exchange
from megatron_moe.parallel.context import ProcessGroup
from megatron_moe.parallel.exchange import AllToAll, Wait

Split = Literal["zigzag", "contiguous"]
Chunks = tuple[range, ...]
"""Ranges of positions in a sequence."""


def split_positions(split: Split, seq: int, num_ranks: int) -> tuple[Chunks, ...]:
    """Divides a sequence of `seq` positions among n = `num_ranks` ranks; returns the chunks of every rank.

    zigzag: rank i holds chunks i and 2n - 1 - i of 2n equal chunks, which balances the work under a causal mask.
    contiguous: rank i holds chunk i of n equal chunks.
    """
    if num_ranks == 1:
        return ((range(seq),),)
    num_chunks = 2 * num_ranks if split == "zigzag" else num_ranks
    assert seq % num_chunks == 0, f"{seq} tokens cannot be divided into {num_chunks} equal chunks"
    size = seq // num_chunks
    chunks = [range(start, start + size) for start in range(0, seq, size)]
    if split == "contiguous":
        return tuple((chunk,) for chunk in chunks)
    return tuple((chunks[i], chunks[-1 - i]) for i in range(num_ranks))


def smallest_cp_degree(longest: int, limit: int, num_sequences: int, num_ranks: int, least: int = 1) -> int:
    """Smallest degree (ranks per sequence) of dynamic context parallelism with which a microbatch fits.

    The degree is `least` times a power of two. With it, each rank holds at most `limit` tokens of the longest document,
    which has `longest` tokens, and the `num_sequences` of the microbatch divide equally among the `num_ranks / degree`
    groups. Returns `num_ranks` if no degree meets both conditions.
    """
    degree = least
    while degree < num_ranks and (longest > limit * degree or num_sequences % (num_ranks // degree)):
        degree *= 2
    return degree


@dataclass(frozen=True)
class SequencePart:
    """Part of a microbatch on one context-parallel rank: some of the sequences, and some positions of each."""

    of_ranks: tuple[Chunks, ...]
    """Chunks of every rank in `group`, in group order."""
    rank: int
    """Index of this rank in `group`."""
    group: str = "cp"
    """Name of the process group over which each sequence is split."""
    share: tuple[int, int] = (0, 1)
    """(index of this group, number of groups): each group processes an equal share of the microbatch's sequences."""

    @property
    def num_parts(self) -> int:
        """Number of ranks that process parts of the microbatch: ranks per group times number of groups."""
        return len(self.of_ranks) * self.share[1]

    @property
    def chunks(self) -> Chunks:
        """Chunks of this rank."""
        return self.of_ranks[self.rank]

    def select(self, x_BS: Tensor) -> Tensor:
        """Selects this rank's sequences and positions from a tensor of the whole microbatch."""
        return select_positions(self.select_sequences(x_BS), self.chunks)

    def select_sequences(self, x_BS: Tensor) -> Tensor:
        """Selects the sequences of this rank's group, with all positions, from a tensor of the whole microbatch."""
        index, number = self.share
        return x_BS if number == 1 else x_BS.chunk(number)[index]


def select_positions(x_BS: Tensor, chunks: Chunks) -> Tensor:
    """Selects the positions of `chunks`, in the given order, from a tensor whose dim 1 is the whole sequence."""
    return torch.cat([x_BS[:, chunk.start : chunk.stop] for chunk in chunks], dim=1)


def merged_chunks(parts: Sequence[Chunks]) -> Chunks:
    """Chunks of several ranks, sorted by position; adjacent chunks are merged."""
    merged: list[range] = []
    for chunk in _ascending(parts):
        if merged and merged[-1].stop == chunk.start:
            merged[-1] = range(merged[-1].start, chunk.stop)
        else:
            merged.append(chunk)
    return tuple(merged)


def order_by_position(x_S: Tensor, parts: Sequence[Chunks]) -> Tensor:
    """Sorts the rows (dim 0) of `x_S` by position. Input order: the rows of `parts[0]`, then `parts[1]`, and so on."""
    return _reordered(x_S, [chunk for chunks in parts for chunk in chunks], _ascending(parts))


def order_by_rank(x_S: Tensor, parts: Sequence[Chunks]) -> Tensor:
    """Inverse of `order_by_position`: reorders rows that are sorted by position to the order `parts[0]`, `parts[1]`,
    ..."""
    return _reordered(x_S, _ascending(parts), [chunk for chunks in parts for chunk in chunks])


def _ascending(parts: Sequence[Chunks]) -> list[range]:
    return sorted((chunk for chunks in parts for chunk in chunks), key=lambda chunk: chunk.start)


def _reordered(x_S: Tensor, before: Sequence[range], after: Sequence[range]) -> Tensor:
    pieces = dict(zip(before, x_S.split([len(chunk) for chunk in before]), strict=True))
    return torch.cat([pieces[chunk] for chunk in after])


class Ring:
    """Ring over the ranks of a group: each rank sends to the next rank and receives from the previous one.

    Transfers are not differentiable; ring attention calls them in its forward and backward. `group` is None if there is
    only one rank.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank, group.size)

    def circulate(self, k_SBGD: Tensor, v_SBGE: Tensor) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """Yields (rank, keys and values of that rank) for every rank, starting with this rank.

        The next transfer runs while the caller uses the yielded tensors. The tensors of all ranks must have equal
        shapes."""
        wait = self.send_to_next(pack_keys_values(k_SBGD, v_SBGE)) if self.size > 1 else None
        yield self.rank, (k_SBGD, v_SBGE)
        for step in range(1, self.size):
            assert wait is not None
            packed = wait()
            wait = self.send_to_next(packed) if step + 1 < self.size else None
            yield (self.rank - step) % self.size, unpack_keys_values(packed, k_SBGD.shape[-1])

    def send_to_next(self, x_SBGC: Tensor) -> Wait:
        """Starts to send a tensor to the next rank. The returned function waits for the tensor of the previous rank."""
        assert self.group is not None, "a ring of one rank has no peer to send to"
        send, receive = [0] * self.size, [0] * self.size
        send[(self.rank + 1) % self.size] = receive[(self.rank - 1) % self.size] = len(x_SBGC)
        return AllToAll(self.group, tuple(send), tuple(receive)).launch(x_SBGC)


def pack_keys_values(k_SBGD: Tensor, v_SBGE: Tensor) -> Tensor:
    """Concatenates keys and values, or their gradients, to one tensor [S, B, G, D + E]."""
    return torch.cat([k_SBGD, v_SBGE], dim=-1)


def unpack_keys_values(packed_SBGC: Tensor, key_width: int) -> tuple[Tensor, Tensor]:
    """Inverse of `pack_keys_values`; returns two views."""
    return packed_SBGC[..., :key_width], packed_SBGC[..., key_width:]


def scatter_heads(x_SBND: Tensor, group: ProcessGroup) -> Tensor:
    """All-to-all that gathers positions and scatters heads: [S, B, N, D] -> [size * S, B, N / size, D].

    `size` is the group size. Positions are in rank order. Backward: `gather_heads` of the gradient.
    """
    heads = x_SBND.shape[2]
    assert heads % group.size == 0, f"{heads} heads cannot be divided equally among {group.size} ranks"
    parts = x_SBND.unflatten(2, (group.size, -1)).movedim(2, 0)
    return exchange.run_exchange(AllToAll(group), parts).flatten(0, 1)


def gather_heads(x_SBND: Tensor, group: ProcessGroup) -> Tensor:
    """Inverse of `scatter_heads`: [size * S, B, N / size, D] -> [S, B, N, D], with the group size `size`."""
    parts = exchange.run_exchange(AllToAll(group), x_SBND.unflatten(0, (group.size, -1)))
    return parts.movedim(0, 2).flatten(2, 3)
