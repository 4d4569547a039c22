"""Counts collectives and the elements passed to them, for ranks that run as threads."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

OPS = {
    "all_to_all_single": ("all_to_all", 1),
    "all_gather_into_tensor": ("all_gather", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 1),
    "all_reduce": ("all_reduce", 0),
}
"""Maps a function of torch.distributed to (name in the counts, index of the argument with the sent tensor)."""


class Traffic:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_rank: dict[int, Counter] = defaultdict(Counter)

    def note(self, op: str, group_size: int, elements: int) -> None:
        with self._lock:
            self._by_rank[dist.get_rank()][op, group_size, elements] += 1

    def of_ranks(self, num_ranks: int) -> list[Counter]:
        """Returns, for every rank, the number of calls by (op, group size, number of elements sent)."""
        return [self._by_rank[rank] for rank in range(num_ranks)]


@contextmanager
def counted_traffic(on_call: Callable[[str], None] = lambda op: None) -> Iterator[Traffic]:
    """Counts every collective called inside the context, and calls `on_call` with its name."""
    traffic, originals = Traffic(), {name: getattr(dist, name) for name in OPS}

    def counting(name: str) -> Any:
        word, place = OPS[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            on_call(word)
            traffic.note(word, dist.get_world_size(kwargs["group"]), args[place].numel())
            return originals[name](*args, **kwargs)

        return call

    try:
        for name in OPS:
            setattr(dist, name, counting(name))
        yield traffic
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
