"""Runs the model chunks of one pipeline rank on the microbatches of a step, in the order of a schedule."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from megatron_moe.config.pipeline import PipelineConfig, ScheduleConfig
from megatron_moe.config.pipeline_layout import PipelineLayout
from megatron_moe.data.batch import MicroBatch
from megatron_moe.memory.cuda_graphs.instances import GraphInstancePool
from megatron_moe.model.gpt import GPT, LossOutput
from megatron_moe.optim.grad_buffers import GradBuffers
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.p2p import connect
from megatron_moe.parallel.streams import Streams, make_streams
from megatron_moe.pipeline.actions import Entry, actions_of
from megatron_moe.pipeline.executor import run_schedule
from megatron_moe.pipeline.overlap import OverlapNode, Step, pair_nodes
from megatron_moe.pipeline.schedule import build_schedule
from megatron_moe.pipeline.slots import At, memory_slots

LossForBackward = Callable[[LossOutput, MicroBatch, int], Tensor]
"""Called on the last stage with the losses of a microbatch, the microbatch and its index on this rank; returns the
scalar to differentiate."""


class Pipeline:
    """This rank's part of the model, and its point-to-point links to other pipeline stages."""

    def __init__(self, config: PipelineConfig, layout: PipelineLayout, context: ParallelContext, model: GPT) -> None:
        """Creates the links. Collective over all ranks."""
        self.config = config
        self.context = context
        self.model = model
        self.layout = layout
        self.links = connect(context)
        self._streams = Streams()
        if model.blocks_host:
            # Dispatchers that block the host use a second stream, so that the device computes while the host waits for
            # sizes. Other dispatchers run only the exchange on another stream: their kernels that sort and copy rows
            # would have to wait there for persistent kernels of the compute stream.
            priority = context.config.high_priority_a2a_comm_stream
            self._streams = make_streams(context.device, "communication", high_priority=priority)
        self.graph_instances: GraphInstancePool | None = None
        """Pool of CUDA graph instances for the microbatches in flight; None means eager execution."""
        self._entries: dict[ScheduleConfig, tuple[Entry, ...]] = {}
        self._slots: dict[ScheduleConfig, dict[At, int]] = {}
        self._pairs: dict[tuple[int, int], tuple[OverlapNode, ...]] = {}

    def interleaved_nodes(self, forward_chunk: int, backward_chunk: int) -> tuple[OverlapNode, ...]:
        """Nodes of the forward and the backward of an overlapped pair, in launch order."""
        chunks = forward_chunk, backward_chunk
        if chunks not in self._pairs:
            self._pairs[chunks] = pair_nodes(
                *(self.model.chunks[chunk] for chunk in chunks),
                split_backward=self.config.delay_wgrad_compute,
                exchange_steps=self.model.blocks_host,
                early_attention_backward=self.config.ep_overlap_early_attn_memory_release,
            )
        return self._pairs[chunks]

    def run(
        self,
        batches: Sequence[MicroBatch],
        loss_for_backward: LossForBackward,
        *,
        gradients: GradBuffers | None = None,
        streams: Streams | None = None,
    ) -> None:
        """Runs the forward of all microbatches, and the backward if `gradients` is given.

        All ranks of a pipeline pass the same microbatches. `streams`: compute and communication streams; None means
        those that the pipeline created.
        """
        config = self.config.pipeline_schedule(self.layout, len(batches), forward_only=gradients is None)
        if config not in self._entries:
            self._entries[config] = build_schedule(config)[self.links.rank]
        if self.graph_instances is not None and gradients is not None:
            if config not in self._slots:
                self._slots[config] = memory_slots(self._entries[config])
            self.graph_instances.begin_step(self._slots[config])
        offload = self.model.saved_tensors.offload
        if offload is not None and gradients is not None:
            offload.begin_pass(_computations(self._entries[config]))
        stage = RankStage(self, batches, loss_for_backward, gradients)
        run_schedule(self._entries[config], stage, self.links, config.stages, streams or self._streams)
        if offload is not None and gradients is not None:
            offload.finish_pass()


@dataclass(frozen=True)
class RankStage:
    """Model chunks of one rank in one pass through a schedule; implements `pipeline.executor.ChunkRunner`."""

    _pipeline: Pipeline
    _batches: Sequence[MicroBatch]
    _loss_for_backward: LossForBackward
    _gradients: GradBuffers | None

    def steps(self, microbatch: int, chunk: int) -> Sequence[Step]:
        batch, model = self._microbatch_for_graphs(microbatch, chunk), self._pipeline.model
        if self._gradients is not None and model.saved_tensors.offload is not None:
            model.saved_tensors.offload.begin_forward((microbatch, chunk))
        if self._gradients is not None and self._pipeline.config.overlap:
            steps = model.steps(batch, chunk)
        else:
            steps = [Step("chunk", None, lambda received: model(batch, received, chunk=chunk))]
        if not model.chunks[chunk].loss:
            return steps
        *steps, last = steps
        return [*steps, replace(last, run=lambda state: self._loss_for_backward(last.run(state), batch, microbatch))]

    def _microbatch_for_graphs(self, microbatch: int, chunk: int) -> MicroBatch:
        """Returns the microbatch. If this pass uses CUDA graphs, its context has a graph instance, and forced router
        logits, which graphs cannot draw."""
        batch, graph_instances = self._batches[microbatch], self._pipeline.graph_instances
        if self._gradients is None or graph_instances is None:
            return batch
        graph_instance = graph_instances.acquire(microbatch, chunk)
        if graph_instance is None:
            return batch
        batch = self._pipeline.model.draw_forced_logits(batch, self._pipeline.context.dtype)
        return replace(batch, context=replace(batch.context, graph_instance=graph_instance))

    def interleaved_nodes(self, forward_chunk: int, backward_chunk: int) -> Sequence[OverlapNode]:
        return self._pipeline.interleaved_nodes(forward_chunk, backward_chunk)

    def input_shape(self, microbatch: int, stage: int) -> tuple[int, ...]:
        """Shape of the tensor sent to a stage: [S, B, n H] for n residual streams and, after the final norm,
        [n S, B, H] for n hidden states (`PipelineLayout.received_states`)."""
        batch, model, config = self._batches[microbatch], self._pipeline.model, self._pipeline.context.config
        batch_size, length = batch.tokens_BS.shape
        if config.sequence_parallel:
            length //= config.tp
        layout, num_streams = self._pipeline.layout, model.config.residual.num_streams
        num_mtp = model.config.num_mtp if batch.context.training else 0
        number = layout.received_states(stage, num_streams, num_mtp)
        if any(before.final_norm for before in layout.stages[:stage]):
            return number * length, batch_size, model.config.hidden_size
        return length, batch_size, number * model.config.hidden_size

    def defer_weight_gradients(self, backward: At | None) -> None:
        queue = self._buffers.queue
        queue.deferred, queue.backward = backward is not None, backward

    def weight_gradients(self, backward: At) -> None:
        self._buffers.queue.run_backward(backward)

    def after_autograd(self) -> None:
        if self._pipeline.config.overlap_dispatch_backward_with_experts_wgrad:
            self._buffers.queue.run()  # weight gradients of layers below the last exchange
        self._buffers.collect_autograd_grads()

    def after_backward(self, microbatch: int, chunk: int) -> None:
        if self._pipeline.graph_instances is not None:
            self._pipeline.graph_instances.release(microbatch, chunk)

    @property
    def _buffers(self) -> GradBuffers:
        assert self._gradients is not None, "the schedule contains a backward, but the pass computes no gradients"
        return self._gradients


def _computations(entries: Sequence[Entry]) -> list[tuple[str, tuple[int, int]]]:
    """Returns ("forward" or "backward", (microbatch, chunk)) of every computation, in order; weight gradients are left
    out."""
    kinds = {"forward": "forward", "backward": "backward", "backward_input": "backward"}
    actions = (action for entry in entries for action in actions_of(entry) if action.peer is None)
    return [(kinds[each.kind], (each.microbatch, each.chunk)) for each in actions if each.kind in kinds]
