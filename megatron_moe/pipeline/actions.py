"""The words of which schedules are made."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Compute = Literal["forward", "backward", "backward_input", "backward_weight"]
Transfer = Literal["send_forward", "receive_forward", "send_backward", "receive_backward"]


@dataclass(frozen=True)
class Action:
    """One thing that a rank does.

    forward, backward: one microbatch through one chunk. backward_input gives the gradient of the chunk's input,
    backward_weight those of its weights; both together are backward.
    send_forward: the output of forward(microbatch, chunk). receive_forward: the input of forward(microbatch, chunk).
    send_backward: the gradient of the input of (microbatch, chunk). receive_backward: that of its output.
    """

    kind: Compute | Transfer
    microbatch: int
    chunk: int = 0
    """Index of the model chunk on this rank (virtual pipeline stage)."""
    peer: int | None = None
    """Of sends and receives: pipeline rank at the other end."""

    @property
    def is_transfer(self) -> bool:
        return self.peer is not None

    def __str__(self) -> str:
        """F forward, B backward, I backward_input, W backward_weight; sf>1 send to rank 1, rb<1 receive from it."""
        at = f"{self.microbatch}.{self.chunk}"
        if self.is_transfer:
            first, second = self.kind.split("_")
            return f"{first[0]}{second[0]}{at}{'>' if first == 'send' else '<'}{self.peer}"
        return {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}[self.kind] + at


@dataclass(frozen=True)
class OverlappedPair:
    """The forward of one microbatch interleaved with the backward of another, node by node (`slots.py`).

    What either of them needs is received before the pair, what they give is sent after it.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"{self.forward}|{self.backward}"


Entry = Action | OverlappedPair
Schedule = tuple[tuple[Entry, ...], ...]
"""One list per pipeline rank."""


def parts(entry: Entry) -> tuple[Action, ...]:
    """The actions of an entry: two in a pair."""
    return (entry.forward, entry.backward) if isinstance(entry, OverlappedPair) else (entry,)


def exchanges(entries: Iterable[Entry]) -> Iterator[Action | OverlappedPair | tuple[Action, ...]]:
    """The entries, with every run of sends and receives as one tuple: they are posted together."""
    waiting: list[Action] = []
    for entry in entries:
        if isinstance(entry, Action) and entry.is_transfer:
            waiting.append(entry)
            continue
        if waiting:
            yield tuple(waiting)
            waiting = []
        yield entry
    if waiting:
        yield tuple(waiting)
