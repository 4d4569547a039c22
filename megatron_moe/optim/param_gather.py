"""Who owns what under ZeRO-1 (Rajbhandari et al., arXiv 1910.02054), and how new weights reach everyone.

Every bucket of a flat buffer is cut into equal shards, one per rank that holds a copy of its parameters: rank r of the
group owns shard r. Reduced gradients arrive at their owner, which alone keeps master weights and moments of the shard
and steps them, and sends the new weights to the others. Without sharding every rank owns all of its buffers.

For everything that counts elements (norms, zeros, checkpoints) each element of the model also has one rank in the world
that counts it: of the ranks that own the same elements, the one that is first on every axis.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor, nn

from megatron_moe.optim.param_layout import BufferKey, BufferLayout
from megatron_moe.parallel.collectives import PendingCollective, start_all_gather_
from megatron_moe.parallel.context import ParallelContext, ProcessGroup
from megatron_moe.parallel.param_meta import Grid
from megatron_moe.parallel.parameter import named_parameters

Range = tuple[int, int]
"""(start, end) in elements of a flat buffer."""


def owned_ranges(layout: BufferLayout, group: ProcessGroup, *, sharded: bool) -> tuple[Range, ...]:
    """What this rank steps of a buffer: its shard of every bucket, or everything."""
    if not sharded:
        return ((0, layout.size),)
    ranges = []
    for start, end in layout.buckets:
        size, rest = divmod(end - start, group.size)
        assert rest == 0, f"a bucket of {end - start} elements for {group.size} ranks"
        ranges.append((start + group.rank * size, start + (group.rank + 1) * size))
    return tuple(ranges)


def replica_group(grid: Grid) -> str:
    """The ranks that hold copies of a parameter of this grid and see different tokens."""
    return "edp" if grid == "expert" else "dp_cp"


def tensor_group(grid: Grid) -> str:
    """The ranks that share out a parameter of this grid, or hold copies and see the same tokens."""
    return "etp" if grid == "expert" else "tp"


def is_first_owner(key: BufferKey, context: ParallelContext, *, sharded: bool) -> bool:
    """This rank is the one in the world that counts what it owns of such a buffer."""
    copies = [] if sharded else [replica_group(key.grid)]
    copies += [tensor_group(key.grid)] if key.replicated else []
    copies += ["embedding"] if key.shared_stages else []
    return all(context.group(name).rank == 0 for name in copies)


class Arrivals(Protocol):
    """New weights on their way, in buckets."""

    def acquire(self, buckets: Iterable[int]) -> None:
        """Waits for these buckets; of those that are here already nothing is done."""

    def finish(self) -> None:
        """Waits for all of them."""


class WeightGather:
    """Brings the weights that every owner has stepped to all ranks that hold copies.

    `start` begins all gathers, in the order in which a forward pass needs them. Whoever reads a weight waits for its
    bucket first: `finish` for all, or `gather_in_forward_hooks` makes every layer wait for its own.
    """

    def __init__(self, buckets: Sequence[tuple[Tensor, ProcessGroup]]) -> None:
        """`buckets`: (flat weights, ranks that own its shards), in forward order."""
        self._buckets = tuple(buckets)
        self._pending: dict[int, PendingCollective] = {}

    @property
    def travels(self) -> bool:
        """Whether anything comes from other ranks."""
        return any(group.size > 1 for _, group in self._buckets)

    def start(self) -> None:
        for index in range(len(self._buckets)):
            self.start_bucket(index)

    def start_bucket(self, index: int) -> None:
        assert index not in self._pending, f"weights of the last step still travel in bucket {index}"
        weights, group = self._buckets[index]
        # dp_cp or edp: one bucket of weights, by default 40 million elements
        self._pending[index] = start_all_gather_(weights, group)

    def acquire(self, buckets: Iterable[int]) -> None:
        """See `Arrivals`."""
        if self._pending:
            for index in buckets:
                pending = self._pending.pop(index, None)
                if pending is not None:
                    pending.wait()

    def finish(self) -> None:
        """See `Arrivals`."""
        self.acquire(range(len(self._buckets)))


def gather_in_forward_hooks(model: nn.Module, arrivals: Arrivals, bucket_of: Mapping[int, int]) -> None:
    """Makes every layer wait for its weights when the first of its modules is called.

    Word and position embeddings are read by others too (tied head, multi-token prediction), so every layer waits for
    them. `state_dict` waits for everything.

    Args:
        bucket_of: bucket of a parameter by `id`.
    """
    held = {bucket_of[id(p)] for _, p in named_parameters(model) if p.meta.role in ("embedding", "position")}
    layers = list(_layers(model))
    inside = {id(p) for layer in layers for p in layer.parameters()}
    held |= {bucket_of[id(p)] for p in model.parameters() if id(p) not in inside}
    for layer in layers:
        needed = tuple(sorted(held | {bucket_of[id(p)] for p in layer.parameters()}))
        for module in layer.modules():
            module.register_forward_pre_hook(partial(_acquire, arrivals, needed))
    model.register_state_dict_pre_hook(lambda *_: arrivals.finish())


def _acquire(arrivals: Arrivals, buckets: tuple[int, ...], *_: object) -> None:
    arrivals.acquire(buckets)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The smallest modules that hold no list of layers."""
    if any(isinstance(each, nn.ModuleDict | nn.ModuleList) for each in module.modules()):
        for child in module.children():
            yield from _layers(child)
    else:
        yield module
