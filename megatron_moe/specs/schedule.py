"""Schedules as data: what each pipeline rank does, in which order. Pure, so that it can be printed and simulated.

A schedule is a list of actions per rank. One stage runs the forward and then the backward of every microbatch, so that
the activations of one microbatch at most are alive.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Action:
    """One entry of a schedule."""

    kind: Literal["forward", "backward"]
    microbatch: int
    chunk: int = 0
    """Index of the model chunk on this rank (virtual pipeline stage)."""

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.microbatch}.{self.chunk}"


def schedule_actions(num_microbatches: int) -> tuple[Action, ...]:
    """The actions of the only rank of a pipeline of one stage."""
    return tuple(_one_stage(num_microbatches))


def _one_stage(num_microbatches: int) -> Iterator[Action]:
    for microbatch in range(num_microbatches):
        yield Action("forward", microbatch)
        yield Action("backward", microbatch)
