"""Executes a schedule: the only place that decides when a forward or a backward runs, and when stages exchange data.

One code path for every schedule: a pipeline of one rank, 1F1B, interleaved, overlapped, forward only. Every microbatch
passes a chunk as a `SegmentedMicrobatch` of steps; it has one step unless a schedule interleaves the nodes of two
microbatches. What
a stage sends is freed once it has left: for the backward only the edge of the graph is kept, not the output itself.
What a stage receives begins a graph of its own; its gradient is handed back explicitly.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_moe.parallel.p2p import Kind, Links
from megatron_moe.parallel.streams import Streams
from megatron_moe.pipeline.actions import Action, Entry, OverlappedPair
from megatron_moe.pipeline.layout import StageMap
from megatron_moe.pipeline.overlap import Slot, Step
from megatron_moe.pipeline.segment import SegmentedMicrobatch

At = tuple[int, int]
"""(microbatch, chunk)."""


class Stage(Protocol):
    """What a schedule knows of the chunks of the model that a rank holds."""

    def steps(self, microbatch: int, chunk: int) -> Sequence[Step]:
        """The forward of one microbatch through one chunk. The first step takes what the stage before sent (None: there
        is none before); the last leaves what the next stage receives, in the last stage the scalar to differentiate."""
        ...

    def slots(self, forward_chunk: int, backward_chunk: int) -> Sequence[Slot]:
        """The order of work of a pair. With slots for weight gradients its backward leaves them to those."""
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
        """Called when all gradients of this microbatch have been computed, those that waited included."""
        ...


def run_schedule(
    entries: Sequence[Entry], stage: Stage, links: Links, stages: StageMap, streams: Streams | None = None
) -> None:
    """Runs the entries of this rank in order. Without gradients enabled they are forwards only.

    Everything that comes in must go out again: what is received into a computation, what is computed to the next stage,
    every forward into its backward. `streams`: None: no-op streams.
    """
    run = _Run(stage, links, stages, streams or Streams())
    for entry in entries:
        if isinstance(entry, OverlappedPair):
            run.do_pair(entry)
        else:
            run.do(entry)
    run.finish()


class _Run:
    """One pass of one rank through its schedule."""

    def __init__(self, stage: Stage, links: Links, stages: StageMap, streams: Streams) -> None:
        self._stage = stage
        self._links = links
        self._stages = stages
        self._streams = streams
        self._flying: dict[At, SegmentedMicrobatch] = {}
        """Microbatches between their forward and their backward in one chunk."""
        self._owed: list[At] = []
        """Backwards whose weight gradients wait."""
        self._coming: dict[tuple[Kind, At], Callable[[], Tensor]] = {}
        self._outgoing: dict[tuple[Kind, At], Tensor] = {}
        self._leaving: list[Callable[[], object]] = []
        self._overdue: list[Callable[[], object]] = []

    def do(self, action: Action) -> None:
        at = _at(action)
        if action.peer is not None:
            self._transfer(action, action.peer, at)
            return
        self._free_sent()
        match action.kind:
            case "forward":
                self._end_forward(at, self._begin_forward(at))
            case "backward":
                self._end_backward(at, self._begin_backward(at))
                self._stage.after_backward(*at)
            case "backward_input":
                self._stage.defer_weight_gradients(True)
                self._end_backward(at, self._begin_backward(at))
                self._stage.defer_weight_gradients(False)
                self._owed.append(at)
            case "backward_weight":
                self._owed.remove(at)
                self._stage.weight_gradients()
                self._stage.after_backward(*at)

    def do_pair(self, pair: OverlappedPair) -> None:
        """A forward and a backward, slot by slot."""
        self._free_sent()
        slots = self._stage.slots(pair.forward.chunk, pair.backward.chunk)
        ahead, behind = self._begin_forward(_at(pair.forward)), self._begin_backward(_at(pair.backward))
        split = any(slot.direction == "weight" for slot in slots)
        self._stage.defer_weight_gradients(split)
        for slot in slots:
            match slot.direction:
                case "forward":
                    ahead.forward(slot)
                case "backward":
                    behind.backward(slot)
                case "weight":
                    self._stage.weight_gradients()
        self._end_forward(_at(pair.forward), ahead)
        self._end_backward(_at(pair.backward), behind)
        if split:
            self._stage.weight_gradients()
            self._stage.defer_weight_gradients(False)
        self._stage.after_backward(*_at(pair.backward))

    def finish(self) -> None:
        """Waits until everything has left, and proves that nothing was forgotten."""
        self._free_sent()
        self._free_sent()
        assert not self._flying, f"forwards without a backward (microbatch, chunk): {sorted(self._flying)}"
        assert not self._owed, f"weight gradients never computed (microbatch, chunk): {sorted(self._owed)}"
        assert not self._coming, f"received and never used: {sorted(self._coming)}"
        assert not self._outgoing, f"computed and never sent: {sorted(self._outgoing)}"

    def _begin_forward(self, at: At) -> SegmentedMicrobatch:
        received = self._arrived("activation", at)
        assert (received is None) == (self._number(at) == 0), f"(microbatch, chunk) {at} has not received its input"
        return SegmentedMicrobatch(self._stage.steps(*at), received, self._streams)

    def _end_forward(self, at: At, chain: SegmentedMicrobatch) -> None:
        chain.forward()
        output = chain.output()
        if torch.is_grad_enabled():
            self._flying[at] = chain
        if self._number(at) < self._stages.num_stages - 1:
            self._outgoing["activation", at] = output

    def _begin_backward(self, at: At) -> SegmentedMicrobatch:
        chain = self._flying.pop(at)
        gradient = self._arrived("gradient", at)
        is_last = self._number(at) == self._stages.num_stages - 1
        assert (gradient is None) == is_last, f"(microbatch, chunk) {at} has not received its gradient"
        chain.begin_backward(gradient)
        return chain

    def _end_backward(self, at: At, chain: SegmentedMicrobatch) -> None:
        chain.backward()
        if self._number(at) > 0:
            self._outgoing["gradient", at] = chain.input_gradient()

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


def _at(action: Action) -> At:
    return action.microbatch, action.chunk
