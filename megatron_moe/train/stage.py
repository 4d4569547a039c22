"""What one pipeline rank does for a schedule: its chunks of the model, on the microbatches of a step."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from megatron_moe.data.batch import MicroBatch
from megatron_moe.memory.flights import Flights
from megatron_moe.model.gpt import GPT, LossOutput
from megatron_moe.optim.buckets import GradBuffers
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.lanes import Lanes, lanes_of
from megatron_moe.parallel.p2p import connect
from megatron_moe.schedule.run import run_schedule
from megatron_moe.specs.pipeline.actions import Entry, parts
from megatron_moe.specs.pipeline.schedule import ScheduleSpec, build_schedule
from megatron_moe.specs.pipeline.slots import Slot, Step, pair_slots
from megatron_moe.specs.run import RunPlan

TakeLoss = Callable[[LossOutput, MicroBatch], Tensor]
"""Takes the losses of a microbatch in the last stage; gives the scalar to differentiate."""


class Pipeline:
    """This rank's part of the model, and its links to the ranks that hold the others."""

    def __init__(self, plan: RunPlan, context: ParallelContext, model: GPT) -> None:
        """All ranks of the world make it together."""
        self.plan = plan
        self.context = context
        self.model = model
        self.layout = plan.layout
        self.links = connect(context)
        self._lanes = lanes_of(context.device)
        self.flights: Flights | None = None
        """Of the microbatches whose layers are recorded and replayed; None: all is computed."""
        self._entries: dict[ScheduleSpec, tuple[Entry, ...]] = {}

    def run(
        self,
        batches: Sequence[MicroBatch],
        take_loss: TakeLoss,
        *,
        gradients: GradBuffers | None = None,
        lanes: Lanes | None = None,
    ) -> None:
        """Takes the microbatches through all stages, and back when gradients are to be collected.

        Every rank of a pipeline gives the same microbatches; `take_loss` is called where the last stage is. `lanes`:
        None: those of the device.
        """
        spec = self.plan.schedule(len(batches), forward_only=gradients is None)
        if spec not in self._entries:
            self._entries[spec] = build_schedule(spec)[self.links.rank]
        if self.flights is not None and gradients is not None:
            self.flights.begin_step()
        offload = self.model.keeping.offload
        if offload is not None and gradients is not None:
            offload.begin_pass(_computations(self._entries[spec]))
        stage = RankStage(self, batches, take_loss, gradients)
        run_schedule(self._entries[spec], stage, self.links, spec.stages, lanes or self._lanes)


class RankStage:
    """The chunks of one rank in one pass through a schedule (`schedule.run.Stage`)."""

    def __init__(
        self, pipeline: Pipeline, batches: Sequence[MicroBatch], take_loss: TakeLoss, gradients: GradBuffers | None
    ) -> None:
        self._pipeline = pipeline
        self._batches = batches
        self._take_loss = take_loss
        self._gradients = gradients

    def steps(self, microbatch: int, chunk: int) -> Sequence[Step]:
        """See `Stage`."""
        batch, model = self._in_flight(microbatch, chunk), self._pipeline.model
        if self._gradients is not None and model.keeping.offload is not None:
            model.keeping.offload.begin_forward((microbatch, chunk))
        if self._gradients is not None and self._pipeline.plan.pipeline.overlap:
            steps = model.steps(batch, chunk)
        else:
            steps = [Step("chunk", None, lambda received: model(batch, received, chunk=chunk))]
        if not model.chunks[chunk].loss:
            return steps
        *steps, last = steps
        return [*steps, replace(last, run=lambda state: self._take_loss(last.run(state), batch))]

    def _in_flight(self, microbatch: int, chunk: int) -> MicroBatch:
        """The microbatch, with the memory of its recordings if it has one."""
        batch, flights = self._batches[microbatch], self._pipeline.flights
        if self._gradients is None or flights is None:
            return batch
        flight = flights.take(microbatch, chunk)
        if flight is None:
            return batch
        batch = self._pipeline.model.draw_forced(batch, self._pipeline.context.dtype)
        return replace(batch, meta=replace(batch.meta, flight=flight))

    def slots(self, forward_chunk: int, backward_chunk: int) -> Sequence[Slot]:
        """See `Stage`."""
        chunks, spec = self._pipeline.model.chunks, self._pipeline.plan.pipeline
        return pair_slots(
            chunks[forward_chunk],
            chunks[backward_chunk],
            split_backward=spec.split_backward,
            early_attention_backward=spec.early_attention_backward,
        )

    def shape(self, microbatch: int, stage: int) -> tuple[int, ...]:
        """[S, B, H] of what travels into a stage. Behind a stage of multi-token prediction the hidden states of all
        depths stand one behind the other along S."""
        batch, model, spec = self._batches[microbatch], self._pipeline.model, self._pipeline.context.spec
        batch_size, length = batch.tokens_BS.shape
        if spec.sequence_parallel:
            length //= spec.tp
        stages_before = self._pipeline.layout.stages[:stage]
        if batch.meta.training and model.spec.mtp and any(before.num_mtp for before in stages_before):
            length *= 1 + model.spec.mtp.num_layers
        return length, batch_size, model.spec.hidden_size

    def defer_weight_gradients(self, deferred: bool) -> None:
        """See `Stage`."""
        self._buffers.queue.deferred = deferred

    def weight_gradients(self) -> None:
        """See `Stage`."""
        self._buffers.queue.run()

    def after_backward(self, microbatch: int, chunk: int) -> None:
        """See `Stage`."""
        self._buffers.collect()
        if self._pipeline.flights is not None:
            self._pipeline.flights.give_back(microbatch, chunk)

    @property
    def _buffers(self) -> GradBuffers:
        assert self._gradients is not None, "a backward in a pass without gradients"
        return self._gradients


def _computations(entries: Sequence[Entry]) -> list[tuple[str, tuple[int, int]]]:
    """("forward" or "backward", (microbatch, chunk)) in order. A split backward: its first part."""
    kinds = {"forward": "forward", "backward": "backward", "backward_input": "backward"}
    actions = (action for entry in entries for action in parts(entry) if action.peer is None)
    return [(kinds[each.kind], (each.microbatch, each.chunk)) for each in actions if each.kind in kinds]
