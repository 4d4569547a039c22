"""Point-to-point messages between ranks that are threads: torch's in-memory process group has collectives only."""

import threading
from collections import defaultdict, deque
from collections.abc import Callable

from torch import Tensor

from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.p2p import Kind

Route = tuple[int, int, str]
"""(source rank, destination rank, kind of message)."""


class ThreadMessages:
    """One queue of (label, tensor) per route, shared by all ranks."""

    def __init__(self, timeout_s: float = 120.0) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._queues: dict[Route, deque[tuple[str, Tensor]]] = defaultdict(deque)
        self._closed = False

    def put(self, route: Route, label: str, tensor: Tensor) -> None:
        with self._changed:
            self._queues[route].append((label, tensor))
            self._changed.notify_all()

    def take(self, route: Route, label: str) -> Tensor:
        """Waits for the next tensor of the route, which must have this label."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._queues[route], timeout=self._timeout_s)
            assert self._queues[route], f"no {label} came on route {route}: timeout, or its sender has failed"
            found, tensor = self._queues[route].popleft()
        assert found == label, f"route {route}: {found} came where {label} was expected"
        return tensor

    def close(self) -> None:
        """Ends all waits, after a rank has failed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def unread(self) -> list[str]:
        return [f"{route}: {label}" for route, queue in self._queues.items() for label, _ in queue]

    def make_links(self, context: ParallelContext) -> "ThreadLinks":
        return ThreadLinks(context, self)


class ThreadLinks:
    """Links of one rank, as `p2p.Links`; also checks that each message is the expected one."""

    def __init__(self, context: ParallelContext, messages: ThreadMessages) -> None:
        self._ranks = context.group("pp").ranks
        self.rank = context.group("pp").rank
        self._messages = messages

    def send(self, kind: Kind, tensor: Tensor, to: int, label: str) -> Callable[[], object]:
        self._messages.put((self._ranks[self.rank], self._ranks[to], kind), label, tensor.detach().clone())
        return lambda: None

    def receive(self, kind: Kind, shape: tuple[int, ...], source: int, label: str) -> Callable[[], Tensor]:
        def wait() -> Tensor:
            tensor = self._messages.take((self._ranks[source], self._ranks[self.rank], kind), label)
            assert tuple(tensor.shape) == shape, f"{label}: {tuple(tensor.shape)} came, {shape} was expected"
            return tensor

        return wait
