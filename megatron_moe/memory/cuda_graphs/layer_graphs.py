"""CUDA graphs of parts of a layer: forward and backward are captured once and replayed.

A captured module is a function of a pytree of tensors and of the microbatch context. Its inputs and outputs are at
fixed addresses. Inputs are copied to static buffers, unless they are already outputs of another graph. Outputs stay
valid until the backward of the same microbatch has run, so every in-flight microbatch needs its own `GraphInstance`.
The graphs of an instance share one memory pool: a graph may reuse memory that an earlier graph has freed, because the
graphs are replayed in a fixed order, forwards before backwards.

Weight gradients are captured separately from input gradients, in two versions: one stores the gradients of a step's
first microbatch, the other adds those of later microbatches. A schedule may defer them until later graphs of the
microbatch have run; graphs of deferred weight gradients have their own pool, and the tensors that they read are not
shared with other graphs. Metrics are graph outputs, recorded after every replay.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.logs.metrics import Fold, MetricAccumulator, Reduction
from megatron_moe.memory.cuda_graphs.capture import CapturedGraph, CudaGraphRecorder
from megatron_moe.parallel.parameter import Parameter
from megatron_moe.parallel.pytree import TreeSpec, flatten, unflatten

Function = Callable[[Any, MicrobatchContext], Any]
"""Function (state, microbatch context) -> state: maps the previous module's result to the result of this module."""


class StaticGradAccumulator(Protocol):
    """Gradient accumulator whose buffer `main_grad` is at a fixed address."""

    main_grad: Tensor
    filled: bool
    """True once the first gradient of this step has been written; later gradients are added to it."""

    @property
    def merges(self) -> bool: ...

    def add(self, compute: Callable[[Tensor, bool], None]) -> None: ...

    def accept(self) -> None: ...


@dataclass(frozen=True, eq=False)
class CapturedModule:
    """Function whose forward and backward are captured as CUDA graphs. It must not synchronise with the host or draw
    random numbers."""

    name: str
    function: Function
    parameters: tuple[Parameter, ...]
    """All parameters that the function uses."""
    prepare: Callable[[], None] = lambda: None
    """Called before every replay: updates tensors that the graph reads and that several microbatches share."""

    def __call__(self, state: Any, mb: MicrobatchContext) -> Any:
        """Replays this module's graph in the microbatch's `GraphInstance`, capturing it on first use. Runs the function
        eagerly if `mb.graph_instance` is None or gradients are disabled."""
        if mb.graph_instance is None or not torch.is_grad_enabled():
            return self.function(state, mb)
        self.prepare()
        return mb.graph_instance.run(self, state, mb)


class RecordedMetrics(Enum):
    """Metrics that a captured module records for the log."""

    NOTHING = auto()
    WITHOUT_ROUTING = auto()
    WITH_ROUTING = auto()


class GraphInstance:
    """Memory pools and captured graphs of one in-flight microbatch."""

    def __init__(self, recorder: CudaGraphRecorder, *, defers_weight_grads: bool = False) -> None:
        """`defers_weight_grads`: other graphs of the microbatch may run before the weight gradients of a module."""
        self.defers_weight_grads = defers_weight_grads
        self.pool = recorder.pool()
        self.weight_grad_pool = recorder.pool() if defers_weight_grads else self.pool
        """Memory pool of the weight-gradient graphs, which need no memory in it between replays."""
        self.num_graphs = 0
        self.static_bytes = 0
        """Size of the static buffers, which are not allocated from the pool."""
        self._recorder = recorder
        self._captured: dict[tuple[CapturedModule, TreeSpec, TreeSpec, RecordedMetrics], _CapturedForward] = {}
        self._contexts: dict[TreeSpec, _StaticContext] = {}
        self._loaded: tuple[MicrobatchContext, _StaticContext] | None = None
        self._outputs: dict[tuple[int, int], Tensor] = {}
        """Output tensors of the captured graphs, by `_location`."""
        self._static_grads: dict[tuple[Any, ...], Tensor] = {}
        self._held: list[object] = []
        """Operands of the captured weight gradients, kept alive so that no other graph reuses their memory."""

    @property
    def pools(self) -> tuple[Any, ...]:
        """All memory pools of the instance, without duplicates."""
        return (self.pool, self.weight_grad_pool) if self.defers_weight_grads else (self.pool,)

    def run(self, module: CapturedModule, state: Any, mb: MicrobatchContext) -> Any:
        """Runs a module on the microbatch of this instance by graph replay, and captures its graph on first use."""
        tensors, spec = flatten(state)
        static = self._load(mb)
        recorded = RecordedMetrics.NOTHING
        if mb.metrics is not None:
            recorded = (
                RecordedMetrics.WITHOUT_ROUTING if mb.metrics.trace_routing is None else RecordedMetrics.WITH_ROUTING
            )
        key = module, spec, static.spec, recorded
        if key not in self._captured:
            self._captured[key] = _CapturedForward(self, module, state, tensors, static.context, recorded)
        captured = self._captured[key]
        outputs = _Replay.apply(captured, *tensors)  # type: ignore[no-untyped-call]
        if mb.metrics is not None:
            captured.record_metrics(mb.metrics)
        return captured.state_with(tensors, outputs)

    def capture(self, work: Callable[[], Sequence[Tensor]]) -> CapturedGraph:
        self.num_graphs += 1
        return self._recorder.capture(work, self.pool)

    def capture_weight_grads(
        self, compute: Callable[[bool], Sequence[Tensor]], operands: object
    ) -> dict[bool, CapturedGraph]:
        """Captures `compute(accumulate)` for both values of `accumulate`. `operands`: tensors that the graphs read and
        that the caller is about to free."""
        if self.defers_weight_grads:
            self._held.append(operands)
        self.num_graphs += 2
        return {each: self._recorder.capture(partial(compute, each), self.weight_grad_pool) for each in (False, True)}

    def end_microbatch(self) -> None:
        """Called when all gradients of the microbatch have been computed."""
        self._held.clear()

    def static_input(self, tensor: Tensor, allocate: Callable[[Tensor], Tensor]) -> "_StaticInput":
        """Static input for `tensor`: `tensor` itself if a graph returned it, else a buffer from `allocate(tensor)`."""
        known = self._outputs.get(_location(tensor))
        if known is not None and known.shape == tensor.shape and known.stride() == tensor.stride():
            return _StaticInput(tensor.detach(), is_output=True)
        return _StaticInput(allocate(tensor), is_output=False)

    def add_outputs(self, tensors: Sequence[Tensor]) -> None:
        """Registers output tensors of a graph by location, and keeps their memory allocated."""
        self._outputs |= {_location(tensor): tensor for tensor in tensors if tensor.numel()}

    def static_buffer(self, like: Tensor) -> Tensor:
        """Allocates a static buffer (one at a fixed address) with the shape and dtype of `like`."""
        self.static_bytes += like.nbytes
        return torch.empty_like(like, requires_grad=False)

    def static_grad(self, like: Tensor, module: CapturedModule, index: int) -> Tensor:
        """Static buffer for the gradient of a module's output number `index`. Modules share it, because they run one
        after the other, unless deferred weight gradients still read it."""
        key = module if self.defers_weight_grads else None, index, like.shape, like.stride(), like.dtype
        if key not in self._static_grads:
            self._static_grads[key] = self.static_buffer(like)
        return self._static_grads[key]

    def _load(self, mb: MicrobatchContext) -> "_StaticContext":
        """Returns `mb` with its tensors copied to static buffers. The copy is made only once per microbatch."""
        if self._loaded is None or self._loaded[0] is not mb:
            context = static_context(mb)
            tensors, spec = flatten(context)
            if spec not in self._contexts:
                buffers = tuple(map(self.static_buffer, tensors))
                self._contexts[spec] = _StaticContext(unflatten(context, tensors, buffers), buffers, spec)
            static = self._contexts[spec]
            for buffer, tensor in zip(static.buffers, tensors, strict=True):
                buffer.copy_(tensor)
            self._loaded = mb, static
        return self._loaded[1]


def _location(tensor: Tensor) -> tuple[int, int]:
    """Storage and offset of a tensor, which identify its memory while it is allocated, also without data."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


class _StaticContext(NamedTuple):
    """Microbatch context whose tensors are static buffers."""

    context: MicrobatchContext
    buffers: tuple[Tensor, ...]
    spec: TreeSpec


def static_context(mb: MicrobatchContext) -> MicrobatchContext:
    """Copy of the context without the fields that a graph must not depend on: RNG key, metrics, graph instance, and the
    length of the longest document."""
    scale = mb.aux_loss_scale
    if not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=torch.float64, device=mb.tokens.positions_BS.device)
    tokens = replace(mb.tokens, max_seqlen=None)
    return replace(mb, tokens=tokens, aux_loss_scale=scale, rng=None, metrics=None, graph_instance=None)


class _Replay(torch.autograd.Function):
    """Autograd function that replays a captured module's forward and backward graphs."""

    @staticmethod
    def forward(ctx: Any, captured: "_CapturedForward", *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.captured = captured
        ctx.set_materialize_grads(False)
        outputs = captured.forward(tensors)
        ctx.mark_non_differentiable(*(t for t, has in zip(outputs, captured.differentiable, strict=True) if not has))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.captured.backward(grads)


class _CapturedForward:
    """Graphs of one module in one instance: forward, input gradients and weight gradients."""

    def __init__(
        self,
        instance: GraphInstance,
        module: CapturedModule,
        state: Any,
        tensors: Sequence[Tensor],
        mb: MicrobatchContext,
        recorded: RecordedMetrics,
    ) -> None:
        """`mb`: microbatch context with static buffers as tensors."""
        self._instance = instance
        self._module = module
        self._mb = mb
        self._recorded = recorded
        self._inputs = [instance.static_input(tensor, instance.static_buffer) for tensor in tensors]
        self._buffers = [static.buffer for static in self._inputs]
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            buffer.requires_grad_(tensor.requires_grad)
        self._state = unflatten(state, tensors, self._buffers)
        self._result: Any = None
        """Result of the module's function during capture, with its autograd graph."""
        self._outputs: list[Tensor] = []
        """Tensors in `_result` that are not inputs of the module."""
        self._metrics = MetricRecorder()
        self._forward: CapturedGraph | None = None
        self._backward: _CapturedBackward | None = None

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Copies `tensors` to the static inputs and replays the graph. Returns aliases of the graph's outputs."""
        for static, tensor in zip(self._inputs, tensors, strict=True):
            static.load(tensor, self._module.name)
        if self._forward is None:
            self._forward = self._instance.capture(self._compute)
        self._forward.replay()
        outputs = self._forward.outputs[: len(self._outputs)]
        self._instance.add_outputs(outputs)
        return tuple(tensor.detach() for tensor in outputs)

    @property
    def differentiable(self) -> list[bool]:
        """Whether each output requires a gradient."""
        return [output.requires_grad for output in self._outputs]

    def state_with(self, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> Any:
        """Result of the module for this microbatch: the captured result with its tensors replaced by the given ones."""
        return unflatten(self._result, [*self._buffers, *self._outputs], [*tensors, *outputs])

    def record_metrics(self, metrics: MetricAccumulator) -> None:
        """Records the metrics of the last replay in `metrics`."""
        assert self._forward is not None, f"{self._module.name} has not been captured"
        self._metrics.replay(metrics, self._forward.outputs[len(self._outputs) :])

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Computes the gradients of the inputs; the returned tensors are valid until the next backward of this module.
        Also adds the weight gradients to their accumulators."""
        if self._backward is None:
            self._backward = _CapturedBackward(
                self._instance, self._module, self._buffers, lambda: self._outputs, grads
            )
        return self._backward.run(grads)

    def _compute(self) -> list[Tensor]:
        self._metrics = MetricRecorder(with_routing=self._recorded is RecordedMetrics.WITH_ROUTING)
        mb = replace(self._mb, metrics=None if self._recorded is RecordedMetrics.NOTHING else self._metrics)
        with torch.enable_grad():
            self._result = self._module.function(self._state, mb)
        inputs = {id(tensor) for tensor in self._buffers}
        self._outputs = [tensor for tensor in flatten(self._result)[0] if id(tensor) not in inputs]
        return [tensor.detach() for tensor in (*self._outputs, *self._metrics.tensors)]


class _CapturedBackward:
    """Backward graphs of one module in one instance; the constructor captures them."""

    def __init__(
        self,
        instance: GraphInstance,
        module: CapturedModule,
        inputs: Sequence[Tensor],
        outputs: Callable[[], Sequence[Tensor]],
        grads: Sequence[Tensor | None],
    ) -> None:
        """`outputs`: function that returns the outputs to differentiate. `grads`: gradient of each output, or None."""
        self._instance = instance
        self._module = module
        self._grads = [
            None
            if grad is None
            else instance.static_input(grad, partial(instance.static_grad, module=module, index=index))
            for index, grad in enumerate(grads)
        ]
        self._num_inputs = len(inputs)
        self._with_grad: list[int] = []
        """Indices of the module inputs that get a gradient."""
        self._accumulators: list[StaticGradAccumulator] = []
        self._tasks: list[_WeightGrad] = []
        """Weight-gradient computations, which are captured when they run first. The list is emptied afterwards."""
        self._input_grads = instance.capture(lambda: self._differentiate(inputs, outputs()))
        self._weight_grads: dict[bool, CapturedGraph] = {}

    def run(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replays the graphs; arguments and result are those of `_CapturedForward.backward`."""
        for static, grad in zip(self._grads, grads, strict=True):
            assert (static is None) == (grad is None), (
                f"{self._module.name}: an output has a gradient in some backward passes only"
            )
            if static is not None and grad is not None:
                static.load(grad, self._module.name)
        self._input_grads.replay()
        self._instance.add_outputs(self._input_grads.outputs)
        if self._accumulators:
            self._add_weight_grads()
        result: list[Tensor | None] = [None] * self._num_inputs
        for index, grad in zip(self._with_grad, self._input_grads.outputs, strict=True):
            result[index] = grad.detach()
        return result

    def _add_weight_grads(self) -> None:
        """Submits the replay as the gradient of the first weight. The replay also writes the gradients of the
        others."""
        first, *others = self._accumulators
        first.add(self._replay_weight_grads)
        for accumulator in others:
            accumulator.add(_already_written)

    def _replay_weight_grads(self, out: Tensor, accumulate: bool) -> None:
        filled = {accumulator.filled for accumulator in self._accumulators}
        assert filled == {accumulate}, f"{self._module.name}: only some weights have a gradient from this step"
        if not self._weight_grads:
            self._weight_grads = self._instance.capture_weight_grads(self._compute_weight_grads, self._tasks)
        self._weight_grads[accumulate].replay()
        self._tasks = []  # releases saved tensors, whose memory later graphs of the instance may reuse

    def _differentiate(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
        """Returns the input gradients, and stores the computations of the weight gradients in `_tasks`."""
        pairs = [(output, grad.buffer) for output, grad in zip(outputs, self._grads, strict=True) if grad is not None]
        indices = [index for index, tensor in enumerate(inputs) if tensor.requires_grad]
        parameters = self._module.parameters
        tasks: list[_WeightGrad] = []
        accumulators = [cast(StaticGradAccumulator, parameter.grad_accumulator) for parameter in parameters]
        for parameter, accumulator in zip(parameters, accumulators, strict=True):
            parameter.grad_accumulator = _Collector(parameter, accumulator, tasks)
        try:
            grads = torch.autograd.grad(
                [output for output, _ in pairs],
                [*(inputs[index] for index in indices), *parameters],
                [grad for _, grad in pairs],
                allow_unused=True,
            )
            for parameter in parameters:
                cast(_Collector, parameter.grad_accumulator).accept()
        finally:
            for parameter, accumulator in zip(parameters, accumulators, strict=True):
                parameter.grad_accumulator = accumulator
        tasks += [
            _WeightGrad(accumulator, partial(_store, grad))
            for accumulator, grad in zip(accumulators, grads[len(indices) :], strict=True)
            if grad is not None
        ]
        self._tasks, self._accumulators = tasks, [task.accumulator for task in tasks]
        input_grads = {index: grad for index, grad in zip(indices, grads, strict=False) if grad is not None}
        self._with_grad = list(input_grads)
        return list(input_grads.values())

    @torch.no_grad()
    def _compute_weight_grads(self, accumulate: bool) -> list[Tensor]:
        written: set[int] = set()
        for accumulator, compute in self._tasks:
            compute(accumulator.main_grad, accumulate or id(accumulator) in written)
            written.add(id(accumulator))
        return []


class _WeightGrad(NamedTuple):
    """Weight gradient whose computation is deferred."""

    accumulator: StaticGradAccumulator
    compute: Callable[[Tensor, bool], None]


@dataclass(frozen=True)
class _Collector:
    """Stand-in for a gradient accumulator during capture: stores the weight-gradient computations in `tasks`."""

    parameter: Parameter
    accumulator: StaticGradAccumulator
    tasks: list[_WeightGrad]
    merges = False

    def add(self, compute: Callable[[Tensor, bool], None]) -> None:
        """Stores the computation, which is captured in a separate graph, in `tasks`."""
        self.tasks.append(_WeightGrad(self.accumulator, compute))

    def accept(self) -> None:
        """Stores the gradient that the backward of a recomputed module left in `.grad`."""
        grad, self.parameter.grad = self.parameter.grad, None
        if grad is not None:
            self.add(partial(_store, grad))


def _store(grad: Tensor, out: Tensor, accumulate: bool) -> None:
    if accumulate:
        out.add_(grad)
    else:
        out.copy_(grad)


def _already_written(out: Tensor, accumulate: bool) -> None:
    """Does nothing. Passed to an accumulator as `compute` if a graph replay has already written the gradient."""


class _StaticInput(NamedTuple):
    """Graph input at a fixed address."""

    buffer: Tensor
    is_output: bool
    """True if the buffer is an output of another graph, so that the input need not be copied."""

    def load(self, tensor: Tensor, name: str) -> None:
        if self.is_output:
            assert _location(self.buffer) == _location(tensor), f"{name}: the output of the previous graph has moved"
        else:
            with torch.no_grad():
                self.buffer.copy_(tensor)


class MetricRecorder(MetricAccumulator):
    """Stores the metric tensors of a captured function, so that their values can be recorded after every replay."""

    def __init__(self, *, with_routing: bool = False) -> None:
        """`with_routing`: also stores the expert ids of a routing trace."""
        super().__init__(trace_routing=self._trace_routing if with_routing else None)
        self.tensors: list[Tensor] = []
        """Tensors passed to `record` and `collect` (values, counts, rows), in call order. The graph returns them."""
        self._records: list[Callable[[MetricAccumulator, Sequence[Tensor]], None]] = []

    def record(
        self,
        name: str,
        value: Tensor,
        *,
        layer: int | None = None,
        count: Tensor | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        """Stores the arguments, which `replay` passes to `MetricAccumulator.record`."""
        value_index = self._add(value)
        count_index = None if count is None else self._add(count)

        def record(metrics: MetricAccumulator, tensors: Sequence[Tensor]) -> None:
            number = None if count_index is None else tensors[count_index]
            metrics.record(name, tensors[value_index], layer=layer, count=number, reduction=reduction)

        self._records.append(record)

    def collect(self, name: str, layer: int, row: Tensor, fold: Fold) -> None:
        """Stores the arguments, which `replay` passes to `MetricAccumulator.collect`."""
        index = self._add(row)
        # the accumulator stores rows, but the next replay overwrites this row
        self._records.append(lambda metrics, tensors: metrics.collect(name, layer, tensors[index].clone(), fold))

    def _trace_routing(self, layer: int, ids_TK: Tensor) -> None:
        index = self._add(ids_TK)

        def trace(metrics: MetricAccumulator, tensors: Sequence[Tensor]) -> None:
            assert metrics.trace_routing is not None, (
                "the graph was captured with a routing trace, but replayed without one"
            )
            metrics.trace_routing(layer, tensors[index])

        self._records.append(trace)

    def replay(self, metrics: MetricAccumulator, tensors: Sequence[Tensor]) -> None:
        """Records all stored metrics in `metrics`. `tensors`: the graph outputs that correspond to `self.tensors`."""
        for record in self._records:
            record(metrics, tensors)

    def _add(self, tensor: Tensor) -> int:
        self.tensors.append(tensor.detach())
        return len(self.tensors) - 1
