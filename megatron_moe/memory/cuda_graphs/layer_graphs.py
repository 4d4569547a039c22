"""CUDA graphs of parts of a layer: forward and backward are captured once and replayed.

A captured module is a function of a pytree of tensors and of the microbatch context. Its inputs and outputs are at
fixed addresses: inputs are copied to static buffers, unless they are already outputs of another graph. Forwards of a
microbatch allocate from the pool of its memory slot, which no other microbatch uses until the end of its backward.
Backwards of all microbatches allocate from one pool, because a rank runs one backward at a time and nothing in the pool
is needed after it. Graphs of a pool reuse memory that earlier ones have freed, so graphs are captured per call site in
the microbatch: the same module after other modules, or with inputs of another structure, has another graph.

Tensors own their memory during the capture, so that they occupy it exactly as long as in eager execution. Afterwards
only aliases of inputs and outputs remain, which keep no memory allocated.

Weight gradients are captured separately from input gradients, in two versions: one stores the gradients of a step's
first microbatch, the other adds those of later microbatches. A schedule may defer them, in an order that changes
between microbatches; their graphs then have their own pool, and no other graph of the backward reuses the tensors that
they read. Metrics are graph outputs, recorded after every replay.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.memory.cuda_graphs.capture import CapturedGraph, CudaGraphRecorder
from megatron_moe.memory.cuda_graphs.graph_metrics import MetricRecorder, RecordedMetrics
from megatron_moe.parallel.autograd_function import AutogradFunction
from megatron_moe.parallel.parameter import Parameter, store
from megatron_moe.parallel.pytree import TreeSpec, flatten, unflatten

Function = Callable[[Any, MicrobatchContext], Any]
"""Function (state, microbatch context) -> state: maps the previous module's result to the result of this module."""


class StaticGradAccumulator(Protocol):
    """Gradient accumulator whose buffer `main_grad` is at a fixed address."""

    main_grad: Tensor
    filled: bool
    """True once the first gradient of this step has been written; later gradients are added to it."""

    @property
    def defers_weight_grads(self) -> bool: ...

    def add(self, compute: Callable[[Tensor, bool], None]) -> None: ...

    def move_autograd_grad(self) -> None: ...


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


class StaticContexts:
    """Static buffers for the tensors of microbatch contexts. They are not allocated from a pool of graphs."""

    def __init__(self) -> None:
        self._contexts: dict[TreeSpec, _StaticContext] = {}
        self._loaded: tuple[MicrobatchContext, _StaticContext] | None = None

    def load(self, mb: MicrobatchContext) -> "_StaticContext":
        """Returns `mb` with its tensors copied to static buffers. The copy is made only once per microbatch."""
        if self._loaded is None or self._loaded[0] is not mb:
            context = static_context(mb)
            tensors, spec = flatten(context)
            if spec not in self._contexts:
                buffers = tuple(torch.empty_like(tensor, requires_grad=False) for tensor in tensors)
                self._contexts[spec] = _StaticContext(unflatten(context, tensors, buffers), buffers, spec)
            static = self._contexts[spec]
            for buffer, tensor in zip(static.buffers, tensors, strict=True):
                buffer.copy_(tensor)
            self._loaded = mb, static
        return self._loaded[1]

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for context in self._contexts.values() for buffer in context.buffers)


class _StaticContext(NamedTuple):
    """Microbatch context whose tensors are static buffers."""

    context: MicrobatchContext
    buffers: tuple[Tensor, ...]
    spec: TreeSpec


def static_context(mb: MicrobatchContext) -> MicrobatchContext:
    """Copy of the context without the fields that a graph must not depend on: RNG key, metrics, graph instance, and the
    length of the longest document. It has no timers either, because events of a capture would not measure replays."""
    scale = mb.aux_loss_scale
    if not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=torch.float64, device=mb.tokens.positions_BS.device)
    tokens = replace(mb.tokens, max_seqlen=None)
    return replace(mb, tokens=tokens, aux_loss_scale=scale, rng=None, metrics=None, timers=None, graph_instance=None)


class GraphPools(NamedTuple):
    """Memory pools of the graphs of a microbatch. The forward's pool is in use until the backward has ended."""

    forward: Any
    backward: Any
    weight_grads: Any


class GraphInstance:
    """Captured graphs of one model chunk in one memory slot."""

    def __init__(
        self,
        recorder: CudaGraphRecorder,
        pools: GraphPools,
        contexts: StaticContexts,
        *,
        defers_weight_grads: bool = False,
        copies_input_grads: bool = False,
    ) -> None:
        """`contexts`: microbatch contexts of the slot. `defers_weight_grads`: other graphs of the microbatch may run
        before the weight gradients of a module. `copies_input_grads`: gradients of the inputs of the chunk's first
        module are needed after the backward, when other microbatches use the pool."""
        self.pools = pools
        self.copies_input_grads = copies_input_grads
        self.num_graphs = 0
        self._recorder = recorder
        self._contexts = contexts
        self._defers_weight_grads = defers_weight_grads
        self._forwards: dict[tuple[Any, ...], _CapturedForward] = {}
        """Captured forwards by (previous forward of the microbatch, module, structure of its inputs, structure of the
        context, metrics)."""
        self._fixed: dict[tuple[Any, ...], Tensor] = {}
        """Aliases of the outputs of graphs, by `_location` of the output or the alias."""
        self._held: list[object] = []
        """Operands of the captured weight gradients, kept alive so that no other graph reuses their memory."""
        self.last_forward: _CapturedForward | None = None
        """Forward of this microbatch that ran last; None before the first one."""
        self.last_backward: _CapturedBackward | None = None
        """Backward of this microbatch that ran last; None before the first one."""

    def run(self, module: CapturedModule, state: Any, mb: MicrobatchContext) -> Any:
        """Runs a module on the microbatch of this instance by graph replay, and captures its graph on first use."""
        tensors, spec = flatten(state)
        static = self._contexts.load(mb)
        recorded = RecordedMetrics.of(mb.metrics)
        key = self.last_forward, module, spec, static.spec, recorded
        if key not in self._forwards:
            self._forwards[key] = _CapturedForward(self, module, state, tensors, static.context, recorded)
        self.last_forward = captured = self._forwards[key]
        outputs = _Replay.apply(captured, *tensors)
        if mb.metrics is not None:
            captured.record_metrics(mb.metrics)
        return captured.state_with(tensors, outputs)

    def capture(self, work: Callable[..., Sequence[Tensor]], pool: Any, inputs: Sequence[Tensor] = ()) -> CapturedGraph:
        self.num_graphs += 1
        return self._recorder.capture(work, pool, inputs)

    def capture_weight_grads(
        self, compute: Callable[[bool], Sequence[Tensor]], operands: object
    ) -> dict[bool, CapturedGraph]:
        """Captures `compute(accumulate)` for both values of `accumulate`. `operands`: tensors that the graphs read and
        that the caller is about to free."""
        if self._defers_weight_grads:
            self._held.append(operands)
        return {each: self.capture(partial(compute, each), self.pools.weight_grads) for each in (False, True)}

    def end_microbatch(self) -> None:
        """Called when all gradients of the microbatch have been computed. Frees the tensors that its captures still
        own."""
        self._held.clear()
        self.last_forward = self.last_backward = None
        for captured in self._forwards.values():
            captured.free()

    def alias_of(self, tensor: Tensor) -> Tensor | None:
        """Returns an alias of `tensor` if it is an output of another graph, else None. Such outputs have fixed
        addresses and become inputs of the next graph without a copy."""
        return self._fixed.get(_location(tensor))

    def outputs_of(self, graph: CapturedGraph, number: int) -> list[Tensor]:
        """Returns the first `number` outputs of a graph after a replay. The first call returns tensors that own their
        memory; later calls return aliases that do not."""
        outputs = list(graph.outputs)
        if not graph.has_aliases:
            graph.outputs, graph.has_aliases = list(map(self._aliased, outputs)), True
        return outputs[:number]

    def _aliased(self, owner: Tensor) -> Tensor:
        """Creates the alias of a graph output that `alias_of` returns. A graph may return an output of another
        graph."""
        location = _location(owner)
        if location not in self._fixed:
            self._fixed[location] = alias = self._recorder.alias(owner)
            self._fixed[_location(alias)] = alias
            weakref.finalize(owner.untyped_storage(), self._fixed.pop, location, None).atexit = False
        return self._fixed[location]


def _location(tensor: Tensor) -> tuple[Any, ...]:
    """Storage and layout of a tensor, which identify its values as long as it is allocated, even for tensors without
    data."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


class _Replay(AutogradFunction):
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


class _Traced(NamedTuple):
    """Result of a module's function during capture, with its autograd graph."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    """Tensors in `result` that are not inputs of the module."""
    result: Any


class _CapturedForward:
    """Captured graphs of one call of a module in a microbatch: forward, input gradients and weight gradients."""

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
        self._metrics = MetricRecorder()
        self._traced: _Traced | None = None
        """Result of the capture; None once its backward has been captured."""
        self._template: Any = None
        """Result of the module's function, with placeholders as tensors."""
        self._placeholders: list[Tensor] = []
        self.differentiable: list[bool] = []
        """Whether each output requires a gradient."""
        self._backward: _CapturedBackward | None = None
        self._copies_input_grads = instance.copies_input_grads and instance.last_forward is None
        inputs = _GraphInputs(tensors, instance)
        compute = partial(self._compute, state, tensors, inputs, mb, recorded)
        self._graph = instance.capture(compute, instance.pools.forward, inputs.new)
        self._inputs = inputs.static(self._graph)

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Copies `tensors` to the static inputs and replays the graph. Returns aliases of the graph's outputs."""
        for static, tensor in zip(self._inputs, tensors, strict=True):
            static.load(tensor, self._instance, self._module.name)
        self._graph.replay()
        if not self._placeholders:
            self._describe(tensors)
        return tuple(tensor.detach() for tensor in self._instance.outputs_of(self._graph, len(self.differentiable)))

    def _describe(self, tensors: Sequence[Tensor]) -> None:
        """Stores the structure of the result of the capture, without its tensors."""
        assert self._traced is not None, f"{self._module.name} has not been captured"
        inputs, outputs, result = self._traced
        self.differentiable = [output.requires_grad for output in outputs]
        self._placeholders = [torch.empty(0) for _ in (*inputs, *outputs)]
        self._template = unflatten(result, [*inputs, *outputs], self._placeholders)

    def state_with(self, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> Any:
        """Result of the module for this microbatch: the captured result with its tensors replaced by the given ones."""
        return unflatten(self._template, self._placeholders, [*tensors, *outputs])

    def record_metrics(self, metrics: MetricAccumulator) -> None:
        """Records the metrics of the last replay in `metrics`."""
        self._metrics.replay(metrics, self._graph.outputs[len(self.differentiable) :])

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Computes the gradients of the inputs, None for inputs without one, and adds the weight gradients to their
        accumulators. The returned tensors are valid until the backward of the microbatch has ended."""
        if self._backward is None:
            self._backward = _CapturedBackward(self._instance, self._module, self._take_trace, grads)
        found = self._backward.run(grads)
        return [grad if grad is None else grad.clone() for grad in found] if self._copies_input_grads else found

    def free(self) -> None:
        """Frees the tensors that were kept for the capture of the backward."""
        self._traced = None

    def _take_trace(self) -> _Traced:
        traced, self._traced = self._traced, None
        assert traced is not None, f"{self._module.name}: its first backward is not that of the captured forward"
        return traced

    def _compute(
        self,
        state: Any,
        tensors: Sequence[Tensor],
        given: "_GraphInputs",
        mb: MicrobatchContext,
        recorded: RecordedMetrics,
        *new: Tensor,
    ) -> list[Tensor]:
        self._metrics = MetricRecorder(with_routing=recorded is RecordedMetrics.WITH_ROUTING)
        mb = replace(mb, metrics=None if recorded is RecordedMetrics.NOTHING else self._metrics)
        inputs = [
            buffer.detach().requires_grad_(tensor.requires_grad)
            for buffer, tensor in zip(given.with_new(new), tensors, strict=True)
        ]
        with torch.enable_grad():
            result = self._module.function(unflatten(state, tensors, inputs), mb)
        known = {id(tensor) for tensor in inputs}
        outputs = [tensor for tensor in flatten(result)[0] if id(tensor) not in known]
        self._traced = _Traced(inputs, outputs, result)
        return [*(tensor.detach() for tensor in outputs), *self._metrics.pop_tensors()]


class _CapturedBackward:
    """Captured backward graphs of one call of a module in a microbatch; the constructor captures them."""

    def __init__(
        self,
        instance: GraphInstance,
        module: CapturedModule,
        take_trace: Callable[[], _Traced],
        grads: Sequence[Tensor | None],
    ) -> None:
        """`take_trace`: function that returns the result of the captured forward. `grads`: gradient of each output, or
        None."""
        self._instance = instance
        self._module = module
        self._previous = instance.last_backward
        self._with_input_grad: list[int] = []
        """Indices of the module inputs that get a gradient."""
        self._num_inputs = 0
        self._accumulators: list[StaticGradAccumulator] = []
        self._tasks: list[_WeightGrad] = []
        """Weight-gradient computations, which are captured when they run first. The list is emptied afterwards."""
        self._has_grad = [grad is not None for grad in grads]
        present = [grad for grad in grads if grad is not None]
        inputs = _GraphInputs(present, instance)
        compute = partial(self._differentiate, take_trace, inputs)
        self._graph = instance.capture(compute, instance.pools.backward, inputs.new)
        self._grads = inputs.static(self._graph)
        self._weight_grads: dict[bool, CapturedGraph] = {}

    def run(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replays the graphs; arguments and result are those of `_CapturedForward.backward`."""
        name, instance = self._module.name, self._instance
        assert instance.last_backward is self._previous, f"{name}: the order of backwards has changed"
        instance.last_backward = self
        assert [grad is not None for grad in grads] == self._has_grad, (
            f"{name}: an output has a gradient in some backward passes only"
        )
        for static, grad in zip(self._grads, (grad for grad in grads if grad is not None), strict=True):
            static.load(grad, instance, name)
        self._graph.replay()
        input_grads = instance.outputs_of(self._graph, len(self._with_input_grad))
        if self._accumulators:
            self._add_weight_grads()
        result: list[Tensor | None] = [None] * self._num_inputs
        for index, grad in zip(self._with_input_grad, input_grads, strict=True):
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
        self._tasks = []  # releases saved tensors, whose memory later graphs may reuse

    def _differentiate(self, take_trace: Callable[[], _Traced], given: "_GraphInputs", *new: Tensor) -> list[Tensor]:
        """Returns the input gradients, and stores the computations of the weight gradients in `_tasks`."""
        inputs, outputs, _ = take_trace()
        indices = [index for index, tensor in enumerate(inputs) if tensor.requires_grad]
        parameters = self._module.parameters
        tasks: list[_WeightGrad] = []
        accumulators = [cast(StaticGradAccumulator, parameter.grad_accumulator) for parameter in parameters]
        for parameter, accumulator in zip(parameters, accumulators, strict=True):
            parameter.grad_accumulator = _Collector(parameter, accumulator, tasks)
        try:
            grads = torch.autograd.grad(
                [output for output, has_grad in zip(outputs, self._has_grad, strict=True) if has_grad],
                [*(inputs[index] for index in indices), *parameters],
                given.with_new(new),
                allow_unused=True,
            )
            for parameter in parameters:
                cast(_Collector, parameter.grad_accumulator).move_autograd_grad()
        finally:
            for parameter, accumulator in zip(parameters, accumulators, strict=True):
                parameter.grad_accumulator = accumulator
        tasks += [
            _WeightGrad(accumulator, partial(store, grad))
            for accumulator, grad in zip(accumulators, grads[len(indices) :], strict=True)
            if grad is not None
        ]
        self._tasks, self._accumulators = tasks, [task.accumulator for task in tasks]
        input_grads = {index: grad for index, grad in zip(indices, grads, strict=False) if grad is not None}
        self._with_input_grad, self._num_inputs = list(input_grads), len(inputs)
        return [grad.detach() for grad in input_grads.values()]

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
    defers_weight_grads = False

    def add(self, compute: Callable[[Tensor, bool], None]) -> None:
        """Stores the computation, which is captured in a separate graph, in `tasks`."""
        self.tasks.append(_WeightGrad(self.accumulator, compute))

    def move_autograd_grad(self) -> None:
        """Stores the gradient that the backward of a recomputed module left in `.grad`."""
        grad, self.parameter.grad = self.parameter.grad, None
        if grad is not None:
            self.add(partial(store, grad))


def _already_written(out: Tensor, accumulate: bool) -> None:
    """Does nothing. Passed to an accumulator as `compute` if a graph replay has already written the gradient."""


class _StaticInput(NamedTuple):
    """Graph input at a fixed address."""

    buffer: Tensor
    is_output: bool
    """True if the buffer is an output of another graph, so that the input need not be copied."""

    def load(self, tensor: Tensor, instance: GraphInstance, name: str) -> None:
        if self.is_output:
            assert instance.alias_of(tensor) is self.buffer, f"{name}: the output of the previous graph has moved"
        else:
            with torch.no_grad():
                self.buffer.copy_(tensor)


class _GraphInputs:
    """Inputs of a graph during its capture: outputs of other graphs, and static buffers that the graph allocates."""

    def __init__(self, tensors: Sequence[Tensor], instance: GraphInstance) -> None:
        self._aliases = [instance.alias_of(tensor) for tensor in tensors]
        pairs = list(zip(tensors, self._aliases, strict=True))
        self._owners = [None if alias is None else tensor.detach() for tensor, alias in pairs]
        self.new = [tensor for tensor, alias in pairs if alias is None]
        """Tensors for which the graph allocates static buffers."""

    def with_new(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Returns all inputs of the graph, with the given buffers in place of the tensors in `new`."""
        following = iter(buffers)
        return [next(following) if owner is None else owner for owner in self._owners]

    def static(self, graph: CapturedGraph) -> list[_StaticInput]:
        """Inputs of the captured graph as aliases, which do not own their memory."""
        following = iter(graph.inputs)
        return [
            _StaticInput(next(following), is_output=False) if alias is None else _StaticInput(alias, is_output=True)
            for alias in self._aliases
        ]
