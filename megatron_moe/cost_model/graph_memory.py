"""Memory and number of the CUDA graphs of captured modules."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

from megatron_moe.config.component import Component
from megatron_moe.config.costs import ActivationSizes, QuantizedCopyBytes
from megatron_moe.config.memory import graph_module
from megatron_moe.config.model import LayerConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.workspace import ATTENTION, residual_gradient_bytes
from megatron_moe.pipeline.actions import Entry
from megatron_moe.pipeline.slots import memory_slots


class SavedBytes(NamedTuple):
    """Bytes of a saved tensor of one module: on the device, and recomputed in backward instead of saved."""

    module: str
    device: float
    recomputed: float
    is_quantized: bool
    """Whether the tensor is saved in the format that its weight gradients read."""


class _LocalGemm(NamedTuple):
    """Sizes of the GEMM of one matrix, and whether FP8 and FP4 recipes quantise its operands."""

    rows: float
    outputs: int
    inputs: int
    low: bool


def captured_parts(plan: RunPlan, layer: LayerConfig) -> tuple[bool, bool]:
    """Whether the mixer and the feed-forward part of a layer are captured as a whole."""
    modules: Sequence[str] = plan.cuda_graphs.cuda_graph_modules
    mixer, feed_forward = layer.mixer, layer.feed_forward
    return (
        mixer.present and graph_module(mixer.node_name) in modules,
        feed_forward.present and feed_forward.whole_module in modules,
    )


def chunks_of_slots(entries: Iterable[Entry]) -> list[set[int]]:
    """Chunks of the microbatches that use each memory slot in the schedule of one rank."""
    chunks: dict[int, set[int]] = defaultdict(set)
    for (_, chunk), slot in memory_slots(entries).items():
        chunks[slot].add(chunk)
    return list(chunks.values())


def num_graphs(plan: RunPlan, layers_of_chunks: Sequence[Sequence[LayerConfig]], entries: Iterable[Entry]) -> int:
    """Number of graphs of a rank: two for forward and backward of every captured module, and two for its weight
    gradients if it has weights, in every memory slot that its chunk uses. `layers_of_chunks`: decoder layers."""
    modules: Sequence[str] = plan.cuda_graphs.cuda_graph_modules
    exchanges = plan.parallel.ep * plan.parallel.etp > 1
    graphs = []
    for layers in layers_of_chunks:
        number = 0
        for layer in layers:
            number += 4 * sum(captured_parts(plan, layer))
            inside = [name for name in modules if name.startswith(f"{layer.feed_forward.whole_module}_")]
            number += 4 * ("moe_router" in inside) + 2 * ("moe_preprocess" in inside and not exchanges)
        graphs.append(number)
    return sum(graphs[chunk] for chunks in chunks_of_slots(entries) for chunk in chunks)


@dataclass(frozen=True)
class GraphMemory:
    """Memory of the pools of captured modules of one rank."""

    plan: RunPlan
    sizes: ActivationSizes
    saved: Callable[[LayerConfig], Sequence[SavedBytes]]
    """Saved tensors of a layer."""
    backward_workspace: Callable[[LayerConfig], float]
    """Peak temporary bytes in the backward of the captured parts of a layer."""

    def pool_bytes(
        self, layers_of_chunks: Sequence[Sequence[LayerConfig]], slots: Iterable[set[int]], in_flight: Sequence[int]
    ) -> float:
        """Bytes beyond the activations of the microbatches `in_flight` (one number per chunk). The pool of a memory
        slot keeps the activations of the captured modules of the largest chunk that uses it, and the temporary memory
        of the forward of its last layer. Backwards share one pool, or use that of the only slot. `slots`: chunks that
        use each slot."""
        chunks = [[layer for layer in layers if any(self._is_captured(layer))] for layers in layers_of_chunks]
        layers = [layer for layers in chunks for layer in layers]
        workspace = max(map(self.backward_workspace, layers), default=0.0)
        if self.plan.layout.pp == 1 and not self.plan.pipeline.overlap:
            workspace += max((residual_gradient_bytes(layer, self.sizes) for layer in layers), default=0.0)
            return workspace + self._deferred_gradient_bytes(chunks)
        # the weight gradients of a part are computed last and read all its output gradients; the part's workspace
        # contains only the largest
        gradients = ((layer, self._output_gradient_bytes(layer)) for layer in layers)
        alone = max((self.backward_workspace(layer) + sum(own) - max(own) for layer, own in gradients), default=0.0)
        backward = max(alone, workspace + self._deferred_gradient_bytes(chunks))
        saved = [sum(map(self._saved_by, layers)) for layers in chunks]
        temporary = [max(map(self._forward_workspace, layers), default=0.0) for layers in chunks]
        pools = sum(max(saved[chunk] + temporary[chunk] for chunk in users) for users in slots)
        return backward + pools - sum(map(mul, in_flight, saved))

    def _is_captured(self, layer: LayerConfig) -> tuple[bool, bool]:
        return captured_parts(self.plan, layer)

    def _parts(self, layer: LayerConfig) -> Iterable[tuple[Component, Sequence[SavedBytes]]]:
        """Captured parts of a layer and the tensors that they save."""
        saved = self.saved(layer)
        mixer, feed_forward = self._is_captured(layer)
        of_mixer = (*ATTENTION, "mlp_norm") if layer.mixer.present else ATTENTION  # the mixer ends with the next norm
        if mixer:
            yield layer.mixer, [each for each in saved if each.module in of_mixer]
        if feed_forward:
            yield layer.feed_forward, [each for each in saved if each.module not in of_mixer]

    def _saved_by(self, layer: LayerConfig) -> float:
        """Bytes that the captured modules of a layer save for one microbatch."""
        of_router = 0.0
        if "moe_router" in self.plan.cuda_graphs.cuda_graph_modules and not self._is_captured(layer)[1]:
            of_router = sum(each.device for each in self.saved(layer) if each.module == "router")
        return of_router + sum(each.device for _, saved in self._parts(layer) for each in saved)

    def _forward_workspace(self, layer: LayerConfig) -> float:
        """Largest number of bytes that the forward of one captured part of a layer allocates but does not save,
        including its output."""
        low = self.plan.precision.low_precision
        output = residual_gradient_bytes(layer, self.sizes) / 2
        found = (
            sum(each.recomputed for each in saved) + part.forward_workspace(self.plan.parallel, self.sizes, low)
            for part, saved in self._parts(layer)
        )
        return output + max(found, default=0.0)

    def _deferred_gradient_bytes(self, chunks: Sequence[Sequence[LayerConfig]]) -> float:
        """Bytes of the tensors made in backward that deferred weight gradients of a chunk read."""
        if not self.plan.pipeline.defers_weight_grads:
            return 0.0
        return max(
            sum(sum(self._output_gradient_bytes(layer)) + self._input_copy_bytes(layer) for layer in layers)
            for layers in chunks
        )

    def _input_copy_bytes(self, layer: LayerConfig) -> float:
        """Bytes of the inputs of the matrices in captured parts of a layer that are quantised in backward, because they
        are saved in the format of the activations or sharded."""
        column, total = QuantizedCopyBytes.of(self.plan.precision.low_precision).column, 0.0
        for part, saved in self._parts(layer):
            copies = sum(each.rows * each.inputs * column for each in self._matrices(part) if each.low)
            total += max(copies - sum(each.device for each in saved if each.is_quantized), 0.0)
        return total

    def _output_gradient_bytes(self, layer: LayerConfig) -> list[float]:
        """Bytes of the output gradient of each matrix in the captured parts of a layer."""
        column = QuantizedCopyBytes.of(self.plan.precision.low_precision).column
        found = [0.0]
        for part, _ in self._parts(layer):
            for each in self._matrices(part):
                itemsize = column if each.low and column else self.sizes.activation_itemsize
                found.append(each.rows * each.outputs * itemsize)
        return found

    def _matrices(self, part: Component) -> Iterator[_LocalGemm]:
        """GEMM of every matrix of a component on one rank."""
        parallel, sizes = self.plan.parallel, self.sizes
        for spec in part.parameters(parallel):
            if spec.meta.role == "matrix":
                rows, ranks = float(sizes.inner), parallel.tp
                if spec.active_experts is not None:
                    rows, ranks = sizes.residual * spec.active_experts * parallel.etp, parallel.etp
                local = [size // (ranks if spec.meta.tp_dim == dim else 1) for dim, size in enumerate(spec.shape)]
                yield _LocalGemm(rows, local[-2], local[-1], bool(spec.low))
