"""Flat buffers: parameters and their gradients, each kind in one contiguous stretch of memory.

Every parameter becomes a view of a flat tensor, and so does its gradient, which is accumulated over microbatches in the
accumulation dtype. Gradients arrive on two paths. Matrices compute their weight gradient straight into the buffer
through `parameter.sink`; what autograd returns in `.grad` is swept in by `collect` after every backward. The first
gradient of a step is stored, later ones are added, and a parameter that received none has gradient zero. Every arrival
is told to whoever listens, so that a bucket's reduction can start when it is complete.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from megatron_moe.config.optimizer import OptimizerConfig
from megatron_moe.config.parallel import DataParallelConfig
from megatron_moe.config.precision import FloatName, PrecisionConfig
from megatron_moe.kernels.ops import Kernels
from megatron_moe.optim.grad_reduce import GradBucket, GradReducer
from megatron_moe.optim.param_gather import (
    is_first_owner,
    owned_ranges,
    replica_group,
    tensor_group,
)
from megatron_moe.optim.param_layout import (
    BufferKey,
    BufferLayout,
    ParamShape,
    place_parameters,
    reduction_order,
)
from megatron_moe.parallel.context import ParallelContext, torch_dtype
from megatron_moe.parallel.parameter import BatchedWeightGrad, Parameter


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


class MainGrad:
    """Where the gradient of one parameter is accumulated. It is the parameter's `sink`.

    Gradients that can be computed in one go wait until there are `interval` of them, or until every microbatch of the
    step has brought one. Then memory is read and written once for all of them.
    """

    def __init__(
        self, name: str, parameter: Parameter, main_grad: Tensor, queue: WeightGradQueue, interval: int = 1
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.main_grad = main_grad
        """View of the flat gradient buffer in the parameter's shape."""
        self.filled = False
        """Holds a gradient of this step; what it held before counts for nothing."""
        self.on_arrival: Callable[[], None] = _nobody_listens
        """Called once for every gradient, when it is in the buffer."""
        self._queue = queue
        self._interval = interval
        self._waiting: BatchedWeightGrad | None = None
        self._num_left: int | None = None
        """Microbatches of this step that have not brought a gradient of parts; None: not known."""

    def begin_step(self, num_microbatches: int | None) -> None:
        """See `GradBuffers.begin_step`."""
        assert self._waiting is None, f"{self.name}: a weight gradient of the last step was never computed"
        self.filled = False
        self._num_left = num_microbatches

    def add(self, compute: Callable[[Tensor, bool], None]) -> None:
        """Implements `GradAccumulator`."""
        self._queue.submit(partial(self._take, compute))

    def compute_waiting(self) -> None:
        """Computes the gradients that wait for others."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._compute(waiting, len(waiting.parts))

    def _take(self, compute: Callable[[Tensor, bool], None]) -> None:
        if not isinstance(compute, BatchedWeightGrad):
            self._compute(compute, 1)
            return
        self._waiting = compute if self._waiting is None else self._waiting.with_later(compute)
        if self._num_left is not None:
            self._num_left -= 1
        is_last = self._num_left is not None and self._num_left <= 0
        if is_last or len(self._waiting.parts) >= self._interval:
            self.compute_waiting()

    @torch.no_grad()
    def _compute(self, compute: Callable[[Tensor, bool], None], num_gradients: int) -> None:
        compute(self.main_grad, self.filled)
        self.filled = True
        for _ in range(num_gradients):
            self.on_arrival()

    def accept(self) -> None:
        """Moves what autograd left in `.grad` here; nothing where the gradient came through the sink.

        For every parameter and microbatch, so it opens no scope of its own: neither tensor has a graph.
        """
        grad = self.parameter.grad
        if grad is None:
            return
        if self.filled:
            self.main_grad.add_(grad)
        else:
            self.main_grad.copy_(grad)
        self.filled = True
        self.parameter.grad = None
        self.on_arrival()

    def zero_if_empty(self) -> None:
        if not self.filled:
            self.main_grad.zero_()
            self.filled = True


class FlatBuffer:
    """One flat tensor of parameters, one of gradients, and the slots in them."""

    def __init__(
        self, layout: BufferLayout, grad_dtype: torch.dtype, context: ParallelContext, *, sharded: bool
    ) -> None:
        device = context.device
        self.layout = layout
        self.group = context.group(replica_group(layout.key.grid))
        """Ranks that hold copies of the parameters and see different tokens."""
        self.owned = owned_ranges(layout, self.group, sharded=sharded)
        """What this rank steps, as ranges of the flat tensors."""
        self.counts = is_first_owner(layout.key, context, sharded=sharded)
        """This rank is the one in the world that counts what it owns."""
        self.weights = torch.zeros(layout.size, dtype=torch_dtype(layout.key.dtype), device=device)
        """Params dtype; the parameters are views of it."""
        self.grads = torch.zeros(layout.size, dtype=grad_dtype, device=device)
        """Accumulation dtype; padding stays zero."""
        self.slots: tuple[MainGrad, ...] = ()

    @property
    def key(self) -> BufferKey:
        return self.layout.key

    def owned_parts(self, flat: Tensor) -> list[Tensor]:
        """Views of what this rank owns of a flat tensor of this buffer's size."""
        return [flat[start:end] for start, end in self.owned]

    def bucket(self, index: int) -> GradBucket:
        """What the reduction needs to know of a bucket. From now on its slots tell it of every gradient."""
        start, end = self.layout.buckets[index]
        places = zip(self.layout.places, self.slots, strict=True)
        slots = [slot for place, slot in places if place.bucket == index]
        bucket = GradBucket(self.grads[start:end], self.group, [slot.zero_if_empty for slot in slots])
        for slot in slots:
            slot.on_arrival = bucket.arrived
        return bucket

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(global name, view in the parameter's shape) of every place in a flat tensor of this buffer's size."""
        for place in self.layout.places:
            yield place.name, flat[place.start : place.end].view(place.shape)

    def adopt(self, parameters: dict[str, Parameter], queue: WeightGradQueue, interval: int) -> None:
        """Moves the parameters into this buffer, keeping their values, and gives them their sinks."""
        slots = []
        for (name, weight), (_, main_grad) in zip(self.views(self.weights), self.views(self.grads), strict=True):
            parameter = parameters[name]
            weight.copy_(parameter.data)
            parameter.data = weight
            parameter.grad = None
            slots.append(MainGrad(name, parameter, main_grad, queue, interval))
            parameter.sink = slots[-1]
        self.slots = tuple(slots)


class GradBuffers:
    """All flat buffers of one rank. Makes every trainable parameter a view of them.

    Args:
        named_parameters: (global name, parameter) in the order of registration.
        precision: the dtype in which gradients are accumulated and reduced.
        kernels: the bundle that norms and optimizer use on these buffers.
        optimizer: decides what shares a buffer: weight decay and learning rate.
        data_parallel: size of buckets, and whether ranks own shards of them (ZeRO-1).
        expert_interval: weight gradients of experts are computed once for so many microbatches.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        precision: PrecisionConfig,
        context: ParallelContext,
        kernels: Kernels,
        *,
        optimizer: OptimizerConfig | None = None,
        data_parallel: DataParallelConfig | None = None,
        expert_interval: int = 1,
    ) -> None:
        self.data_parallel = data_parallel or DataParallelConfig()
        self.context = context
        self.kernels = kernels
        self.device = context.device
        self.grad_dtype = torch_dtype(precision.grads)
        self.optimizer = optimizer or OptimizerConfig()
        self.queue = WeightGradQueue()
        parameters = {name: parameter for name, parameter in named_parameters if parameter.requires_grad}
        self.layout = place_parameters(
            [_param_shape(name, parameter, context) for name, parameter in parameters.items()],
            self.optimizer,
            num_shards={"attention": context.group("dp_cp").size, "expert": context.group("edp").size},
            config=self.data_parallel,
        )
        sharded = self.data_parallel.sharded_optimizer
        self.buffers = tuple(
            FlatBuffer(layout, self.grad_dtype, context, sharded=sharded) for layout in self.layout.buffers
        )
        for buffer in self.buffers:
            buffer.adopt(parameters, self.queue, expert_interval)
        if self.data_parallel.overlap_grad_reduce:
            # So that a bucket is complete before the whole backward is over. Where no hook fires `collect` sweeps.
            for slot in self.slots:
                slot.parameter.register_post_accumulate_grad_hook(_tell_its_slot)
        order = reduction_order(self.layout)
        self.reducer = GradReducer([self.buffers[buffer].bucket(index) for buffer, index in order], self.data_parallel)

    @property
    def whole(self) -> bool:
        """This rank owns every element of the model."""
        config = self.context.config
        return not self.data_parallel.sharded_optimizer and (config.tp, config.pp, config.ep, config.etp) == (
            1,
            1,
            1,
            1,
        )

    @property
    def slots(self) -> Iterator[MainGrad]:
        for buffer in self.buffers:
            yield from buffer.slots

    def begin_step(self, num_microbatches: int | None = None, *, early: bool = True) -> None:
        """Forgets the gradients of the last step: the next one of every parameter is stored, not added.

        `num_microbatches`: how many backward passes every parameter will see; None: not known. `early`: reductions may
        start before all gradients are finished, if it is known.
        """
        assert not len(self.queue), f"{len(self.queue)} weight gradients of the last step were never computed"
        for slot in self.slots:
            slot.begin_step(num_microbatches)
        self.reducer.begin_step(num_microbatches if early else None)

    def collect(self) -> None:
        """Sweeps every `.grad` that the last backward left into the buffers and frees it."""
        for slot in self.slots:
            slot.accept()

    def complete(self) -> None:
        """Computes what still waits and zeroes what received nothing. Afterwards the buffers hold this step's sums."""
        self.queue.run()
        for slot in self.slots:
            slot.compute_waiting()
            slot.zero_if_empty()


def _tell_its_slot(parameter: Tensor) -> None:
    """As a hook. A hook that held the slot would close a circle which Python's garbage collection does not see, and no
    buffer would ever be freed."""
    assert isinstance(parameter, Parameter) and isinstance(parameter.sink, MainGrad), "a parameter without a slot"
    parameter.sink.accept()


def _float_name(dtype: torch.dtype) -> FloatName:
    names: dict[torch.dtype, FloatName] = {
        torch.float64: "fp64",
        torch.float32: "fp32",
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
    }
    return names[dtype]


def _param_shape(name: str, parameter: Parameter, context: ParallelContext) -> ParamShape:
    meta = parameter.meta
    return ParamShape(
        name=name,
        shape=tuple(parameter.shape),
        dtype=_float_name(parameter.dtype),
        meta=meta,
        replicated=meta.tp_dim is None and context.group(tensor_group(meta.grid)).size > 1,
        shared_stages=meta.shared_stages and context.group("embedding").size > 1,
    )


def _nobody_listens() -> None:
    """For slots outside of buckets."""
