"""Executes a schedule: the only place that decides when a forward or a backward runs, and when stages exchange data.

One code path for every schedule: a pipeline of one rank, 1F1B, interleaved, forward only. What a stage sends is freed
once it has left: for the backward only the edge of the graph is kept, not the output itself. What a stage receives is a
leaf of its own graph; its gradient is handed back explicitly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_moe.parallel.p2p import Kind, Links
from megatron_moe.specs.pipeline.actions import Action, Entry, parts
from megatron_moe.specs.pipeline.stages import StageMap

At = tuple[int, int]
"""(microbatch, chunk)."""


class Stage(Protocol):
    """What a schedule knows of the chunks of the model that a rank holds."""

    def forward(self, microbatch: int, chunk: int, received: Tensor | None) -> Tensor:
        """Runs one microbatch through one chunk, from what the stage before sent (None: there is none before). Returns
        what the next stage receives; from the last stage, the scalar to differentiate."""
        ...

    def shape(self, microbatch: int, stage: int) -> tuple[int, ...]:
        """Of what travels into a stage of the pipeline, and of its gradient."""
        ...

    def defer_weight_gradients(self, deferred: bool) -> None:
        """Whether the weight gradients of the backwards to come wait for `weight_gradients`."""
        ...

    def weight_gradients(self) -> None:
        """Computes all weight gradients that wait."""
        ...

    def after_backward(self, microbatch: int, chunk: int) -> None:
        """Called when the gradients that autograd made for this microbatch have arrived at the parameters."""
        ...


def run_schedule(entries: Sequence[Entry], stage: Stage, links: Links, stages: StageMap) -> None:
    """Runs the entries of this rank in order. Without gradients enabled they are forwards only.

    Everything that comes in must go out again: what is received into a computation, what is computed to the next stage,
    every forward into its backward.
    """
    run = _Run(stage, links, stages)
    for entry in entries:
        for action in parts(entry):
            run.do(action)
    run.finish()


@dataclass(frozen=True)
class _Flying:
    """A microbatch between its forward and its backward in one chunk."""

    received: Tensor | None
    output: GradientEdge


class _Run:
    """One pass of one rank through its schedule."""

    def __init__(self, stage: Stage, links: Links, stages: StageMap) -> None:
        self._stage = stage
        self._links = links
        self._stages = stages
        self._flying: dict[At, _Flying] = {}
        self._owed: list[At] = []
        """Backwards whose weight gradients wait."""
        self._coming: dict[tuple[Kind, At], Callable[[], Tensor]] = {}
        self._outgoing: dict[tuple[Kind, At], Tensor] = {}
        self._leaving: list[Callable[[], object]] = []
        self._overdue: list[Callable[[], object]] = []

    def do(self, action: Action) -> None:
        at = (action.microbatch, action.chunk)
        if action.peer is not None:
            self._transfer(action, action.peer, at)
            return
        self._free_sent()
        match action.kind:
            case "forward":
                self._forward(at)
            case "backward":
                self._backward(at)
            case "backward_input":
                self._stage.defer_weight_gradients(True)
                self._backward(at)
                self._stage.defer_weight_gradients(False)
                self._owed.append(at)
            case "backward_weight":
                self._owed.remove(at)
                self._stage.weight_gradients()

    def finish(self) -> None:
        """Waits until everything has left, and proves that nothing was forgotten."""
        self._free_sent()
        self._free_sent()
        assert not self._flying, f"forwards without a backward (microbatch, chunk): {sorted(self._flying)}"
        assert not self._owed, f"weight gradients never computed (microbatch, chunk): {sorted(self._owed)}"
        assert not self._coming, f"received and never used: {sorted(self._coming)}"
        assert not self._outgoing, f"computed and never sent: {sorted(self._outgoing)}"

    def _forward(self, at: At) -> None:
        received = self._arrived("activation", at)
        assert (received is None) == (self._number(at) == 0), f"(microbatch, chunk) {at} has not received its input"
        if received is not None and torch.is_grad_enabled():
            received.requires_grad_()
        output = self._stage.forward(*at, received)
        if torch.is_grad_enabled():
            self._flying[at] = _Flying(received, get_gradient_edge(output))
        if self._number(at) < self._stages.num_stages - 1:
            self._outgoing["activation", at] = output.detach()

    def _backward(self, at: At) -> None:
        flying = self._flying.pop(at)
        gradient = self._arrived("gradient", at)
        is_last = self._number(at) == self._stages.num_stages - 1
        assert (gradient is None) == is_last, f"(microbatch, chunk) {at} has not received its gradient"
        torch.autograd.backward((flying.output,), (gradient,))
        if flying.received is not None:
            assert flying.received.grad is not None, f"what (microbatch, chunk) {at} received has no gradient"
            self._outgoing["gradient", at] = flying.received.grad
        self._stage.after_backward(*at)

    def _transfer(self, action: Action, peer: int, at: At) -> None:
        kind: Kind = "activation" if action.kind.endswith("forward") else "gradient"
        # Activations come from the boundary before the stage and go to the one after it; gradients the other way.
        sends = action.kind.startswith("send")
        boundary = self._number(at) + (sends == (kind == "activation"))
        label = f"{kind} of microbatch {action.microbatch} into stage {boundary}"
        if sends:
            self._leaving.append(self._links.send(kind, self._outgoing.pop((kind, at)), peer, label))
        else:
            shape = self._stage.shape(action.microbatch, boundary)
            self._coming[kind, at] = self._links.receive(kind, shape, peer, label)

    def _arrived(self, kind: Kind, at: At) -> Tensor | None:
        """What was received for a computation; None at the ends of the pipeline."""
        wait = self._coming.pop((kind, at), None)
        return None if wait is None else wait()

    def _free_sent(self) -> None:
        """Lets go of what was sent before the last computation: it had the time of one to leave."""
        for wait in self._overdue:
            wait()
        self._overdue, self._leaving = self._leaving, []

    def _number(self, at: At) -> int:
        """Position in the model of a chunk of this rank."""
        return self._stages.stage(self._links.rank, at[1])
