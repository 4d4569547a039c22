"""Entries of a pipeline schedule: computations, transfers, and overlapped pairs of computations."""

from dataclasses import dataclass
from typing import Literal

Compute = Literal["forward", "backward", "backward_input", "backward_weight"]
Transfer = Literal["send_forward", "receive_forward", "send_backward", "receive_backward"]


@dataclass(frozen=True)
class Action:
    """One computation or transfer of a rank, for one microbatch and one model chunk.

    `backward` computes the gradient of the chunk's input (`backward_input`) and of its weights (`backward_weight`).
    `send_forward` sends the chunk's output, and `receive_forward` receives its input. `send_backward` sends the
    gradient of the input, and `receive_backward` receives the gradient of the output.
    """

    kind: Compute | Transfer
    microbatch: int
    chunk: int = 0
    """Index of the model chunk on this rank (virtual pipeline stage)."""
    peer: int | None = None
    """Other pipeline rank of a send or receive; None for computations."""

    @property
    def is_transfer(self) -> bool:
        return self.peer is not None

    def __str__(self) -> str:
        """Kind, microbatch and chunk: F2.0, B2.0, I2.0 (input gradient), W2.0 (weights), sf2.0>1 (send to rank 1)."""
        at = f"{self.microbatch}.{self.chunk}"
        if self.is_transfer:
            first, second = self.kind.split("_")
            return f"{first[0]}{second[0]}{at}{'>' if first == 'send' else '<'}{self.peer}"
        return {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}[self.kind] + at


@dataclass(frozen=True)
class OverlappedPair:
    """Forward of one microbatch interleaved with the backward of another, node by node (`overlap.py`).

    The inputs of both are received before the pair runs, and the outputs of both are sent after it.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"{self.forward}|{self.backward}"


Entry = Action | OverlappedPair
Schedule = tuple[tuple[Entry, ...], ...]
"""Entries in execution order, for each pipeline rank."""


def actions_of(entry: Entry) -> tuple[Action, ...]:
    """Actions of an entry: the forward and the backward of a pair, or the entry itself."""
    return (entry.forward, entry.backward) if isinstance(entry, OverlappedPair) else (entry,)
