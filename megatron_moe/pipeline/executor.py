"""Schedule executor: runs the forwards, backwards and transfers of one pipeline rank in schedule order.

It runs every schedule: a single stage, 1F1B, interleaved, overlapped and forward only. A microbatch runs through a
chunk as a `SegmentedMicrobatch`, which has one step unless the schedule overlaps two microbatches. The output of a
stage is freed after its send; only its autograd edge is kept for the backward. A received tensor starts a new autograd
graph, and its gradient is sent to the previous stage.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_moe.config.pipeline_layout import StageMap
from megatron_moe.parallel.p2p import Kind, Links
from megatron_moe.parallel.streams import Streams
from megatron_moe.pipeline.actions import Action, Entry, OverlappedPair
from megatron_moe.pipeline.overlap import OverlapNode, Step
from megatron_moe.pipeline.segment import SegmentedMicrobatch

At = tuple[int, int]
"""(microbatch, index of the model chunk on this rank)."""


class ChunkRunner(Protocol):
    """Interface through which the executor runs the model chunks of one pipeline rank."""

    def steps(self, microbatch: int, chunk: int) -> Sequence[Step]:
        """Returns the forward steps of a microbatch in a chunk. The first step takes the output of the previous stage,
        or None in the first stage. The last step returns the input of the next stage, or the scalar loss in the last
        stage."""

    def interleaved_nodes(self, forward_chunk: int, backward_chunk: int) -> Sequence[OverlapNode]:
        """Nodes of the forward and the backward of an overlapped pair, in launch order."""

    def input_shape(self, microbatch: int, stage: int) -> tuple[int, ...]:
        """Shape of the input of a pipeline stage (global index), and of the gradient of this input."""

    def defer_weight_gradients(self, backward: At | None) -> None:
        """Makes the following backward, that of (microbatch, chunk), leave its weight gradients to `weight_gradients`.
        None ends this."""

    def weight_gradients(self, backward: At) -> None:
        """Computes the weight gradients that a backward has deferred so far."""

    def after_autograd(self) -> None:
        """Called when autograd has run the backward of a microbatch in a chunk."""

    def after_backward(self, microbatch: int, chunk: int) -> None:
        """Called when all gradients of a microbatch have been computed, including deferred ones."""


def run_schedule(
    entries: Sequence[Entry], runner: ChunkRunner, links: Links, stages: StageMap, streams: Streams | None = None
) -> None:
    """Runs the entries of this rank in order. If autograd is disabled, all computations must be forwards.

    Asserts that every received tensor is used, every output is sent, and every forward has its backward.
    `streams`: None means no-op streams.
    """
    run = _ScheduleRun(runner, links, stages, streams or Streams())
    for entry in entries:
        if isinstance(entry, OverlappedPair):
            run.run_pair(entry)
        else:
            run.run_action(entry)
    run.finish()


class _ScheduleRun:
    """State of one run of a schedule."""

    def __init__(self, runner: ChunkRunner, links: Links, stages: StageMap, streams: Streams) -> None:
        self._runner = runner
        self._links = links
        self._stages = stages
        self._streams = streams
        self._in_flight: dict[At, SegmentedMicrobatch] = {}
        """Microbatches whose forward has run and whose backward has not started."""
        self._deferred: list[At] = []
        """Backwards that have run except for their weight gradients."""
        self._receives: dict[tuple[Kind, At], Callable[[], Tensor]] = {}
        self._outputs: dict[tuple[Kind, At], Tensor] = {}
        self._sends: list[Callable[[], object]] = []
        self._earlier_sends: list[Callable[[], object]] = []

    def run_action(self, action: Action) -> None:
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
                self._runner.after_autograd()
                self._runner.after_backward(*at)
            case "backward_input":
                self._runner.defer_weight_gradients(at)
                self._end_backward(at, self._begin_backward(at))
                self._runner.defer_weight_gradients(None)
                self._runner.after_autograd()
                self._deferred.append(at)
            case "backward_weight":
                self._deferred.remove(at)
                self._runner.weight_gradients(at)
                self._runner.after_backward(*at)

    def run_pair(self, pair: OverlappedPair) -> None:
        """Runs a forward and a backward interleaved node by node."""
        self._free_sent()
        forward_at, backward_at = _at(pair.forward), _at(pair.backward)
        nodes = self._runner.interleaved_nodes(pair.forward.chunk, pair.backward.chunk)
        forward, backward = self._begin_forward(forward_at), self._begin_backward(backward_at)
        split = "weight" in [entry.direction for entry in nodes]
        self._runner.defer_weight_gradients(backward_at if split else None)
        for entry in nodes:
            match entry.direction:
                case "forward":
                    forward.forward(entry)
                case "backward":
                    backward.backward(entry)
                case "weight":
                    self._runner.weight_gradients(backward_at)
        self._end_forward(forward_at, forward)
        self._end_backward(backward_at, backward)
        if split:
            self._runner.weight_gradients(backward_at)
            self._runner.defer_weight_gradients(None)
        self._runner.after_autograd()
        self._runner.after_backward(*backward_at)

    def finish(self) -> None:
        """Waits for all sends and asserts that no work is left."""
        for _ in ("earlier sends", "newest sends"):
            self._free_sent()
        assert not self._in_flight, f"forwards without a backward, as (microbatch, chunk): {sorted(self._in_flight)}"
        assert not self._deferred, (
            f"weight gradients that were not computed, as (microbatch, chunk): {sorted(self._deferred)}"
        )
        assert not self._receives, f"received tensors that were not used: {sorted(self._receives)}"
        assert not self._outputs, f"computed tensors that were not sent: {sorted(self._outputs)}"

    def _begin_forward(self, at: At) -> SegmentedMicrobatch:
        received = self._received("activation", at)
        assert (received is None) == (self._number(at) == 0), f"(microbatch, chunk) {at} has not received its input"
        return SegmentedMicrobatch(self._runner.steps(*at), received, self._streams)

    def _end_forward(self, at: At, microbatch: SegmentedMicrobatch) -> None:
        microbatch.forward()
        output = microbatch.output()
        if torch.is_grad_enabled():
            self._in_flight[at] = microbatch
        if self._number(at) < self._stages.num_stages - 1:
            self._outputs["activation", at] = output

    def _begin_backward(self, at: At) -> SegmentedMicrobatch:
        microbatch = self._in_flight.pop(at)
        gradient = self._received("gradient", at)
        is_last = self._number(at) == self._stages.num_stages - 1
        assert (gradient is None) == is_last, f"(microbatch, chunk) {at} has not received its gradient"
        microbatch.begin_backward(gradient)
        return microbatch

    def _end_backward(self, at: At, microbatch: SegmentedMicrobatch) -> None:
        microbatch.backward()
        if self._number(at) > 0:
            self._outputs["gradient", at] = microbatch.input_gradient()

    def _transfer(self, action: Action, peer: int, at: At) -> None:
        kind: Kind = "activation" if action.kind.endswith("forward") else "gradient"
        sends = action.kind.startswith("send")
        # stage i receives activations over boundary i and sends them over boundary i + 1; gradients flow in the
        # opposite direction
        boundary = self._number(at) + (sends == (kind == "activation"))
        label = f"{kind} of microbatch {action.microbatch} into stage {boundary}"
        if sends:
            self._sends.append(self._links.send(kind, self._outputs.pop((kind, at)), peer, label))
        else:
            shape = self._runner.input_shape(action.microbatch, boundary)
            self._receives[kind, at] = self._links.receive(kind, shape, peer, label)

    def _received(self, kind: Kind, at: At) -> Tensor | None:
        """Waits for and returns the tensor received for a computation; None if no receive was started for it."""
        wait = self._receives.pop((kind, at), None)
        return None if wait is None else wait()

    def _free_sent(self) -> None:
        """Waits for the sends that were started before the previous computation, and frees their tensors."""
        for wait in self._earlier_sends:
            wait()
        self._earlier_sends, self._sends = self._sends, []

    def _number(self, at: At) -> int:
        """Global index of the pipeline stage that corresponds to the chunk in `at`."""
        return self._stages.stage(self._links.rank, at[1])


def _at(action: Action) -> At:
    return action.microbatch, action.chunk
