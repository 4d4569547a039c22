"""Parts of a layer whose forward and backward are recorded once and replayed (CUDA graphs).

A part is a function of a structure of tensors and of the microbatch context. Everything it reads and returns is at
fixed addresses: inputs are copied there, unless the part before left them there; outputs stay there until the backward
of the same microbatch has run. Every microbatch in flight therefore needs its own memory, a `GraphInstance`. Its graphs
share one pool: their order is always the same, forwards and then backwards, so a graph reuses the memory that an
earlier one has freed.

Weight gradients go to the sinks of the parameters, at fixed addresses too, and are recorded apart from those of the
inputs: once as they store, for the first microbatch of a step, and once as they add. What routers report is noted by
the recording and told to the tally after every replay.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.logs.metrics import Fold, MetricAccumulator, Reduction
from megatron_moe.memory.cuda_graphs.capture import Capture, Recorder
from megatron_moe.memory.pytree import Form, flatten, unflatten
from megatron_moe.parallel.parameter import Parameter

Function = Callable[[Any, MicrobatchContext], Any]
"""From what the part before left to what this part leaves."""
MIB = 2**20


class StaticGradAccumulator(Protocol):
    """A gradient sink whose memory never moves."""

    main_grad: Tensor
    filled: bool
    """Later gradients of this step are added."""

    def add(self, compute: Callable[[Tensor, bool], None]) -> None: ...


@dataclass(frozen=True, eq=False)
class CapturedModule:
    """What is recorded as one: a function without host reads, collectives or random draws."""

    name: str
    function: Function
    parameters: tuple[Parameter, ...]
    """All that it uses."""

    def __call__(self, state: Any, mb: MicrobatchContext) -> Any:
        """Replays for a microbatch in flight, and records first where that was not done; else computes."""
        if mb.graph_instance is None or not torch.is_grad_enabled():
            return self.function(state, mb)
        return mb.graph_instance.run(self, state, mb)


class GraphInstance:
    """Memory and recordings of one microbatch at a time."""

    def __init__(self, recorder: Recorder) -> None:
        self.pool = recorder.pool()
        self.num_recordings = 0
        self.num_landing_bytes = 0
        """Memory outside of the pool, into which inputs are copied."""
        self._recorder = recorder
        self._recorded: dict[tuple[CapturedModule, Form, Form, bool], _CapturedForward] = {}
        self._contexts: dict[Form, _StaticContext] = {}
        self._loaded: tuple[MicrobatchContext, _StaticContext] | None = None
        self._left: dict[int, Tensor] = {}
        """By address, what recordings leave."""
        self._landings: dict[tuple[Any, ...], Tensor] = {}

    def run(self, part: CapturedModule, state: Any, mb: MicrobatchContext) -> Any:
        """Runs a part on the microbatch of this flight."""
        tensors, form = flatten(state)
        static = self._load(mb)
        key = part, form, static.form, mb.metrics is not None
        if key not in self._recorded:
            self._recorded[key] = _CapturedForward(
                self, part, state, tensors, static.context, reports=mb.metrics is not None
            )
        recorded = self._recorded[key]
        outputs = _Replay.apply(recorded, *tensors)  # type: ignore[no-untyped-call]
        if mb.metrics is not None:
            recorded.report(mb.metrics)
        return recorded.leave(tensors, outputs)

    def record(self, work: Callable[[], Sequence[Tensor]]) -> Capture:
        self.num_recordings += 1
        return self._recorder.record(work, self.pool)

    def holds(self, tensor: Tensor) -> bool:
        """Whether this tensor stands where a recording left it."""
        known = self._left.get(tensor.data_ptr())
        return known is not None and known.shape == tensor.shape and known.stride() == tensor.stride()

    def leaves(self, tensors: Sequence[Tensor]) -> None:
        """Remembers what a recording left, which keeps the memory too."""
        self._left |= {tensor.data_ptr(): tensor for tensor in tensors if tensor.numel()}

    def place_for(self, like: Tensor) -> Tensor:
        """Memory for contents like these."""
        self.num_landing_bytes += like.numel() * like.element_size()
        return torch.empty_like(like, requires_grad=False)

    def landing(self, like: Tensor, number: int) -> Tensor:
        """Where a gradient waits for a backward. Backwards run one after another and share it."""
        key = number, like.shape, like.stride(), like.dtype
        if key not in self._landings:
            self._landings[key] = self.place_for(like)
        return self._landings[key]

    def _load(self, mb: MicrobatchContext) -> "_StaticContext":
        """Copies the context's tensors to fixed addresses, once per microbatch."""
        if self._loaded is None or self._loaded[0] is not mb:
            plain = static_context(mb)
            tensors, form = flatten(plain)
            if form not in self._contexts:
                places = tuple(map(self.place_for, tensors))
                self._contexts[form] = _StaticContext(unflatten(plain, tensors, places), places, form)
            static = self._contexts[form]
            for kept, tensor in zip(static.tensors, tensors, strict=True):
                kept.copy_(tensor)
            self._loaded = mb, static
        return self._loaded[1]


@dataclass(frozen=True)
class _StaticContext:
    """A microbatch context whose tensors are at fixed addresses."""

    context: MicrobatchContext
    tensors: tuple[Tensor, ...]
    form: Form


def static_context(mb: MicrobatchContext) -> MicrobatchContext:
    """The part of the context that a graph may depend on: its tensors; without RNG key, metrics and graph instance."""
    scale = mb.aux_loss_scale
    if not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=torch.float64, device=mb.tokens.positions_BS.device)
    return replace(mb, aux_loss_scale=scale, rng=None, metrics=None, graph_instance=None)


class _Replay(torch.autograd.Function):
    """A recorded part in the graph of a microbatch."""

    @staticmethod
    def forward(ctx: Any, recorded: "_CapturedForward", *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.recorded = recorded
        ctx.set_materialize_grads(False)
        outputs = recorded.forward(tensors)
        ctx.mark_non_differentiable(*(t for t, has in zip(outputs, recorded.differentiable, strict=True) if not has))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.recorded.backward(grads)


class _CapturedForward:
    """One part in one flight: its forward, the gradients of its inputs, and those of its weights."""

    def __init__(
        self,
        flight: GraphInstance,
        part: CapturedModule,
        state: Any,
        tensors: Sequence[Tensor],
        mb: MicrobatchContext,
        *,
        reports: bool,
    ) -> None:
        """`mb`: at fixed addresses. `reports`: there is a tally to tell."""
        self._flight = flight
        self._part = part
        self._mb = mb
        self._reports = reports
        self._borrowed = [flight.holds(tensor) for tensor in tensors]
        self._inputs = [
            (tensor.detach() if borrowed else flight.place_for(tensor)).requires_grad_(tensor.requires_grad)
            for tensor, borrowed in zip(tensors, self._borrowed, strict=True)
        ]
        self._state = unflatten(state, tensors, self._inputs)
        self._left: Any = None
        """What the last pass over the function left, with its graph."""
        self._outputs: list[Tensor] = []
        """Its tensors that are not inputs."""
        self._notes = MetricRecorder()
        self._forward: Capture | None = None
        self._backward: _CapturedBackward | None = None

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Takes the inputs and replays; new tensors in the memory of the outputs."""
        for kept, borrowed, tensor in zip(self._inputs, self._borrowed, tensors, strict=True):
            _land(kept, tensor, borrowed, self._part.name)
        if self._forward is None:
            self._forward = self._flight.record(self._compute)
        self._forward.replay()
        made = self._forward.made[: len(self._outputs)]
        self._flight.leaves(made)
        return tuple(tensor.detach() for tensor in made)

    @property
    def differentiable(self) -> list[bool]:
        """Which of the outputs have a gradient."""
        return [output.requires_grad for output in self._outputs]

    def leave(self, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> Any:
        """What the function left, with this microbatch's tensors."""
        return unflatten(self._left, [*self._inputs, *self._outputs], [*tensors, *outputs])

    def report(self, metrics: MetricAccumulator) -> None:
        """Tells the tally what the last replay noted."""
        assert self._forward is not None, f"{self._part.name} has not been recorded"
        self._notes.tell(metrics, self._forward.made[len(self._outputs) :])

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the inputs, in memory that is this part's until its next backward; those of the weights go to
        their sinks."""
        if self._backward is None:
            self._backward = _CapturedBackward(self._flight, self._part, gradients)
            self._backward.record(self._inputs, lambda: self._outputs)
        return self._backward.run(gradients)

    def _compute(self) -> list[Tensor]:
        self._notes = MetricRecorder()
        mb = replace(self._mb, metrics=self._notes if self._reports else None)
        with torch.enable_grad():
            self._left = self._part.function(self._state, mb)
        inputs = {id(tensor) for tensor in self._inputs}
        self._outputs = [tensor for tensor in flatten(self._left)[0] if id(tensor) not in inputs]
        return [tensor.detach() for tensor in (*self._outputs, *self._notes.tensors)]


class _CapturedBackward:
    """The recorded backward of one part in one flight."""

    def __init__(self, flight: GraphInstance, part: CapturedModule, gradients: Sequence[Tensor | None]) -> None:
        """`gradients`: of the outputs; None: an output has none, now and ever."""
        self._flight = flight
        self._part = part
        self._borrowed = [gradient is not None and flight.holds(gradient) for gradient in gradients]
        self._landed = [
            None if gradient is None else gradient.detach() if borrowed else flight.landing(gradient, number)
            for number, (gradient, borrowed) in enumerate(zip(gradients, self._borrowed, strict=True))
        ]
        self._reached: list[int] = []
        """Inputs that have a gradient."""
        self._num_inputs = 0
        self._tasks: list[_Task] = []
        """Weight gradients of the last pass backwards."""
        self._sinks: list[StaticGradAccumulator] = []
        """Where they go."""
        self._input_grads: Capture
        self._weight_grads: dict[bool, Capture]

    def record(self, inputs: Sequence[Tensor], outputs: Callable[[], Sequence[Tensor]]) -> None:
        """Records everything, and lets go of what the forward saved: later recordings of the flight may have its
        memory. `outputs`: with the graph of the last forward."""
        self._num_inputs = len(inputs)
        self._input_grads = self._flight.record(lambda: self._differentiate(inputs, outputs()))
        if self._part.parameters:
            self._weight_grads = {adds: self._flight.record(partial(self._weigh, adds)) for adds in (False, True)}
        self._tasks = []

    def run(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """See `_CapturedForward.backward`."""
        for kept, borrowed, gradient in zip(self._landed, self._borrowed, gradients, strict=True):
            assert (kept is None) == (gradient is None), f"{self._part.name}: an output has a gradient at times only"
            if kept is not None and gradient is not None:
                _land(kept, gradient, borrowed, self._part.name)
        self._input_grads.replay()
        self._flight.leaves(self._input_grads.made)
        if self._sinks:
            self._add_weight_grads()
        result: list[Tensor | None] = [None] * self._num_inputs
        for number, gradient in zip(self._reached, self._input_grads.made, strict=True):
            result[number] = gradient.detach()
        return result

    def _add_weight_grads(self) -> None:
        filled = {sink.filled for sink in self._sinks}
        assert len(filled) == 1, f"{self._part.name}: some weights have a gradient of this step, and some have none"
        self._weight_grads[filled.pop()].replay()
        for sink in self._sinks:
            sink.add(_is_there)

    def _differentiate(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
        pairs = [(output, landed) for output, landed in zip(outputs, self._landed, strict=True) if landed is not None]
        wanted = [number for number, tensor in enumerate(inputs) if tensor.requires_grad]
        parameters = self._part.parameters
        tasks: list[_Task] = []
        sinks = [cast(StaticGradAccumulator, parameter.sink) for parameter in parameters]
        for parameter, sink in zip(parameters, sinks, strict=True):
            parameter.sink = _Collector(sink, tasks)
        try:
            grads = torch.autograd.grad(
                [output for output, _ in pairs],
                [*(inputs[number] for number in wanted), *parameters],
                [landed for _, landed in pairs],
                allow_unused=True,
            )
        finally:
            for parameter, sink in zip(parameters, sinks, strict=True):
                parameter.sink = sink
        tasks += [
            _Task(sink, partial(_store, grad))
            for sink, grad in zip(sinks, grads[len(wanted) :], strict=True)
            if grad is not None
        ]
        self._tasks, self._sinks = tasks, [task.sink for task in tasks]
        reached = [(number, grad) for number, grad in zip(wanted, grads, strict=False) if grad is not None]
        self._reached = [number for number, _ in reached]
        return [grad for _, grad in reached]

    @torch.no_grad()
    def _weigh(self, adds: bool) -> list[Tensor]:
        seen: set[int] = set()
        for sink, compute in self._tasks:
            compute(sink.main_grad, adds or id(sink) in seen)
            seen.add(id(sink))
        return []


class _Task(NamedTuple):
    """A weight gradient to be computed."""

    sink: StaticGradAccumulator
    compute: Callable[[Tensor, bool], None]


@dataclass(frozen=True)
class _Collector:
    """Stands in the place of a sink while a backward is recorded."""

    sink: StaticGradAccumulator
    tasks: list[_Task]

    def add(self, compute: Callable[[Tensor, bool], None]) -> None:
        """See `GradAccumulator`."""
        self.tasks.append(_Task(self.sink, compute))


def _store(gradient: Tensor, out: Tensor, accumulate: bool) -> None:
    if accumulate:
        out.add_(gradient)
    else:
        out.copy_(gradient)


def _is_there(out: Tensor, accumulate: bool) -> None:
    """A replay has written the gradient already."""


def _land(kept: Tensor, tensor: Tensor, borrowed: bool, name: str) -> None:
    """Brings a tensor to where a recording reads it."""
    if borrowed:
        assert kept.data_ptr() == tensor.data_ptr(), f"{name}: what the part before leaves has moved"
    else:
        with torch.no_grad():
            kept.copy_(tensor)


class MetricRecorder(MetricAccumulator):
    """Notes what would be recorded, so that it can be recorded again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        """All that was noted: values, counts and rows."""
        self._tellers: list[Callable[[MetricAccumulator, Sequence[Tensor]], None]] = []

    def record(
        self,
        name: str,
        value: Tensor,
        *,
        layer: int | None = None,
        count: Tensor | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        """See `MetricAccumulator`."""
        at = self._note(value)
        counted = None if count is None else self._note(count)

        def tell(metrics: MetricAccumulator, tensors: Sequence[Tensor]) -> None:
            number = None if counted is None else tensors[counted]
            metrics.record(name, tensors[at], layer=layer, count=number, reduction=reduction)

        self._tellers.append(tell)

    def collect(self, name: str, layer: int, row: Tensor, fold: Fold) -> None:
        """See `MetricAccumulator`."""
        at = self._note(row)
        # the tally keeps rows, and the next replay writes here
        self._tellers.append(lambda metrics, tensors: metrics.collect(name, layer, tensors[at].clone(), fold))

    def tell(self, metrics: MetricAccumulator, tensors: Sequence[Tensor]) -> None:
        """Records everything; `tensors` as a replay left those that were noted."""
        for teller in self._tellers:
            teller(metrics, tensors)

    def _note(self, tensor: Tensor) -> int:
        self.tensors.append(tensor.detach())
        return len(self.tensors) - 1
