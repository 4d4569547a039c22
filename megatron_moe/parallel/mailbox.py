"""Point-to-point messages between ranks that are threads of one process."""

import threading
from collections import deque
from dataclasses import dataclass

from torch import Tensor

Route = tuple[int, int, str]
"""(source rank, destination rank, kind of message)."""


@dataclass(frozen=True)
class Letter:
    """A tensor, and what its sender says it is."""

    label: str
    tensor: Tensor


class Mailbox:
    """One first-in-first-out queue per route, shared by all ranks.

    Args:
        patience: seconds after which a rank that waits for a letter fails: nobody will ever send it.
    """

    def __init__(self, patience: float = 30.0) -> None:
        self._patience = patience
        self._changed = threading.Condition()
        self._routes: dict[Route, deque[Letter]] = {}
        self._closed = False

    def post(self, route: Route, letter: Letter) -> None:
        """Leaves a letter. Never waits."""
        with self._changed:
            self._routes.setdefault(route, deque()).append(letter)
            self._changed.notify_all()

    def take(self, route: Route, label: str) -> Tensor:
        """The next tensor of the route, which must be the one with this label. Waits until it is there."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._routes.get(route), timeout=self._patience)
            letters = self._routes.get(route)
            assert letters, f"no {label} came on route {route} in {self._patience:g} s, or its sender has failed"
            letter = letters.popleft()
        assert letter.label == label, f"route {route}: {letter.label} came where {label} was expected"
        return letter.tensor

    def close(self) -> None:
        """Nothing more will be posted: a rank has failed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def unread(self) -> list[str]:
        """What was posted and never taken."""
        with self._changed:
            return [f"{route}: {letter.label}" for route, letters in self._routes.items() for letter in letters]
