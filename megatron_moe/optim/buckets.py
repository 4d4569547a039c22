"""Flat buffers: parameters and their gradients, each kind in one contiguous stretch of memory.

Every parameter becomes a view of a flat tensor, and so does its gradient, which is accumulated over microbatches in the
accumulation dtype. Gradients arrive on two paths. Matrices compute their weight gradient straight into the buffer
through `parameter.sink`; what autograd returns in `.grad` is swept in by `collect` after every backward. The first
gradient of a step is stored, later ones are added, and a parameter that received none has gradient zero.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from megatron_moe.kernels.ops import Kernels
from megatron_moe.parallel.context import ParallelContext, torch_dtype
from megatron_moe.parallel.parameter import Parameter
from megatron_moe.specs.layout_params import BufferKey, BufferLayout, ParamShape, place_parameters
from megatron_moe.specs.precision import FloatName, PrecisionSpec
from megatron_moe.specs.train import OptimizerSpec


class WeightGradQueue:
    """Weight gradients that wait to be computed. By default none waits.

    With `deferred` set, a schedule decides when they run: nothing else needs them before the gradients are finished.
    """

    def __init__(self) -> None:
        self.deferred = False
        self._tasks: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._tasks)

    def submit(self, task: Callable[[], None]) -> None:
        """Runs the task, or keeps it when deferred."""
        if self.deferred:
            self._tasks.append(task)
        else:
            task()

    @torch.no_grad()
    def run(self) -> None:
        """Runs everything that waits, in the order of submission."""
        while self._tasks:
            self._tasks.popleft()()


class GradSlot:
    """Where the gradient of one parameter is accumulated. It is the parameter's `sink`."""

    def __init__(self, name: str, parameter: Parameter, main_grad: Tensor, queue: WeightGradQueue) -> None:
        self.name = name
        self.parameter = parameter
        self.main_grad = main_grad
        """View of the flat gradient buffer in the parameter's shape."""
        self.filled = False
        """Holds a gradient of this step; what it held before counts for nothing."""
        self._queue = queue

    def add(self, compute: Callable[[Tensor, bool], None]) -> None:
        """Implements `GradSink`."""

        def task() -> None:
            compute(self.main_grad, self.filled)
            self.filled = True

        self._queue.submit(task)

    def zero_if_empty(self) -> None:
        if not self.filled:
            self.main_grad.zero_()
            self.filled = True


class FlatBuffer:
    """One flat tensor of parameters, one of gradients, and the slots in them."""

    def __init__(self, layout: BufferLayout, grad_dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.weights = torch.zeros(layout.size, dtype=torch_dtype(layout.key.dtype), device=device)
        """Params dtype; the parameters are views of it."""
        self.grads = torch.zeros(layout.size, dtype=grad_dtype, device=device)
        """Accumulation dtype; padding stays zero."""
        self.slots: tuple[GradSlot, ...] = ()

    @property
    def key(self) -> BufferKey:
        return self.layout.key

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(global name, view in the parameter's shape) of every place in a flat tensor of this buffer's size."""
        for place in self.layout.places:
            yield place.name, flat[place.start : place.end].view(place.shape)

    def adopt(self, parameters: dict[str, Parameter], queue: WeightGradQueue) -> None:
        """Moves the parameters into this buffer, keeping their values, and gives them their sinks."""
        slots = []
        for (name, weight), (_, main_grad) in zip(self.views(self.weights), self.views(self.grads), strict=True):
            parameter = parameters[name]
            weight.copy_(parameter.data)
            parameter.data = weight
            parameter.grad = None
            slots.append(GradSlot(name, parameter, main_grad, queue))
            parameter.sink = slots[-1]
        self.slots = tuple(slots)


class GradBuffers:
    """All flat buffers of one rank. Makes every trainable parameter a view of them.

    Args:
        named_parameters: (global name, parameter) in the order of registration.
        precision: the dtype in which gradients are accumulated and reduced.
        kernels: the bundle that norms and optimizer use on these buffers.
        optimizer: decides what shares a buffer: weight decay and learning rate.
        bucket_size: elements per collective; None is Megatron's rule (`place_parameters`).
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        precision: PrecisionSpec,
        context: ParallelContext,
        kernels: Kernels,
        *,
        optimizer: OptimizerSpec | None = None,
        bucket_size: int | None = None,
    ) -> None:
        self.kernels = kernels
        self.device = context.device
        self.grad_dtype = torch_dtype(precision.grads)
        self.optimizer = optimizer or OptimizerSpec()
        self.queue = WeightGradQueue()
        parameters = {name: parameter for name, parameter in named_parameters if parameter.requires_grad}
        self.layout = place_parameters(
            [
                ParamShape(name=name, shape=tuple(p.shape), dtype=_float_name(p.dtype), meta=p.meta)
                for name, p in parameters.items()
            ],
            self.optimizer,
            num_shards={"attention": context.group("dp_cp").size, "expert": context.group("edp").size},
            bucket_size=bucket_size,
        )
        self.buffers = tuple(FlatBuffer(layout, self.grad_dtype, self.device) for layout in self.layout.buffers)
        for buffer in self.buffers:
            buffer.adopt(parameters, self.queue)

    @property
    def slots(self) -> Iterator[GradSlot]:
        for buffer in self.buffers:
            yield from buffer.slots

    def begin_step(self) -> None:
        """Forgets the gradients of the last step: the next one of every parameter is stored, not added."""
        assert not len(self.queue), f"{len(self.queue)} weight gradients of the last step were never computed"
        for slot in self.slots:
            slot.filled = False

    def collect(self) -> None:
        """Sweeps every `.grad` that the last backward left into the buffers and frees it."""
        stored: list[tuple[Tensor, Tensor]] = []
        added: list[tuple[Tensor, Tensor]] = []
        for slot in self.slots:
            grad = slot.parameter.grad
            if grad is not None:
                (added if slot.filled else stored).append((slot.main_grad, grad))
                slot.filled = True
                slot.parameter.grad = None
        for target, grad in stored:
            target.copy_(grad)
        for target, grad in added:
            target.add_(grad)

    def complete(self) -> None:
        """Computes what still waits and zeroes what received nothing. Afterwards the buffers hold this step's sums."""
        self.queue.run()
        for slot in self.slots:
            slot.zero_if_empty()


def _float_name(dtype: torch.dtype) -> FloatName:
    names: dict[torch.dtype, FloatName] = {
        torch.float64: "fp64",
        torch.float32: "fp32",
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
    }
    return names[dtype]
