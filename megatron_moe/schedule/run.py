"""Executes a schedule: the only place that decides when a forward or a backward runs."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from megatron_moe.specs.pipeline.actions import Action


class Stage(Protocol):
    """What a schedule knows of the model."""

    def forward(self, microbatch: int, chunk: int) -> Tensor:
        """Runs one microbatch through one chunk; the scalar to differentiate."""
        ...

    def after_backward(self, microbatch: int, chunk: int) -> None:
        """Called when the gradients of this microbatch have arrived at the parameters."""
        ...


def run_schedule(actions: Sequence[Action], stage: Stage) -> None:
    """Runs the actions in order. Every forward must have its backward."""
    objectives: dict[tuple[int, int], Tensor] = {}
    for action in actions:
        at = (action.microbatch, action.chunk)
        if action.kind == "forward":
            objectives[at] = stage.forward(*at)
        else:
            objectives.pop(at).backward()
            stage.after_backward(*at)
    assert not objectives, f"forwards without a backward (microbatch, chunk): {sorted(objectives)}"
