"""Flat buffers of parameters and gradients.

Every parameter is a view of a flat tensor, and so is its gradient, which is accumulated over microbatches in the
accumulation dtype. GEMMs write or add their weight gradient directly to the buffer through
`parameter.grad_accumulator`; gradients that autograd leaves in `.grad` are moved by `collect_autograd_grads` after
every backward. The first gradient of a step overwrites the buffer, and later gradients are added. A parameter that
receives no gradient in a step has gradient zero.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from megatron_moe.config.optimizer import OptimizerConfig
from megatron_moe.config.parallel import DataParallelConfig
from megatron_moe.config.param_meta import Grid
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.kernels.ops import Kernels
from megatron_moe.optim.grad_reduce import GradBucket, GradReducer
from megatron_moe.optim.param_layout import (
    BufferKey,
    BufferLayout,
    ParamLayout,
    ParamShape,
    place_parameters,
    reduction_order,
)
from megatron_moe.optim.param_slices import ParamSlice
from megatron_moe.parallel.collectives import Sizes, all_reduce_, start_all_gather_
from megatron_moe.parallel.context import ParallelContext, ProcessGroup, float_name, torch_dtype
from megatron_moe.parallel.parameter import BatchedWeightGrad, Parameter, WeightGradQueue, store


class MainGrad:
    """Accumulates the gradient of one parameter in the flat buffer; it is the parameter's `grad_accumulator`.

    A `BatchedWeightGrad` is deferred until `interval` of them have been added or the step ends. They are then computed
    together, so that the buffer is read and written once.
    """

    def __init__(
        self, name: str, parameter: Parameter, main_grad: Tensor, queue: WeightGradQueue, interval: int = 1
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.main_grad = main_grad
        """View of the flat gradient buffer in the parameter's shape."""
        self.filled = False
        """True once this step's first gradient has been written; later gradients are accumulated."""
        self.on_arrival: Callable[[int], object] = lambda number: None
        """Callback that receives the number of gradients that have just been added to the buffer."""
        self._queue = queue
        self._interval = interval
        self._batched: BatchedWeightGrad | None = None
        self._batches_left: int | None = None
        """Number of `BatchedWeightGrad`s (one per microbatch) that are still missing in this step; None if unknown."""
        self._num_arrived = 0
        self._num_expected: int | None = None
        self._in_autograd = False
        """True if gradients that autograd added in this backward are not yet counted in `_num_arrived`."""

    def begin_step(self, num_microbatches: int | None) -> None:
        """Begins a step, as in `GradBuffers.begin_step`: the next gradient overwrites that of the last step."""
        assert self._batched is None, f"{self.name}: a deferred weight gradient of the last step was not computed"
        self.filled = False
        self._batches_left = num_microbatches
        self._num_arrived = 0
        self._num_expected = None if num_microbatches is None else num_microbatches * self.parameter.uses

    @property
    def defers_weight_grads(self) -> bool:
        return self._interval > 1

    def add(self, compute: Callable[[Tensor, bool], None]) -> None:
        """Submits the computation of a gradient to the queue, as specified by `GradAccumulator.add`."""
        self._queue.submit(partial(self._take, compute))

    def compute_batched(self) -> None:
        """Computes the `BatchedWeightGrad`s collected so far, if any."""
        batched, self._batched = self._batched, None
        if batched is not None:
            self._compute(batched, len(batched.parts))

    def _take(self, compute: Callable[[Tensor, bool], None]) -> None:
        if not isinstance(compute, BatchedWeightGrad):
            self._compute(compute, 1)
            return
        self._batched = compute if self._batched is None else self._batched.merged_with(compute)
        if self._batches_left is not None:
            self._batches_left -= 1
        is_last = self._batches_left is not None and self._batches_left <= 0
        if is_last or len(self._batched.parts) >= self._interval:
            self.compute_batched()

    @torch.no_grad()
    def _compute(self, compute: Callable[[Tensor, bool], None], num_gradients: int) -> None:
        compute(self.main_grad, self.filled)
        self.filled = True
        self._count(num_gradients)

    def move_autograd_grad(self) -> None:
        """Moves the gradient that autograd left in `.grad` to the buffer.

        `no_grad` is omitted to save time. It would have no effect, because neither tensor has an autograd graph.
        """
        grad = self.parameter.grad
        if grad is None:
            return
        store(grad, self.main_grad, self.filled)
        self.filled = True
        self.parameter.grad = None
        if self.parameter.uses == 1:
            self._count(1)
        else:
            self._in_autograd = True

    def end_backward(self) -> None:
        """Counts the gradients of a parameter with several uses, which autograd may have summed before
        `move_autograd_grad`."""
        if self._in_autograd:
            self._in_autograd = False
            self._count(self.parameter.uses)

    def _count(self, number: int) -> None:
        self._num_arrived += number
        assert self._num_expected is None or self._num_arrived <= self._num_expected, (
            f"{self.name}: {self._num_arrived} gradients in a step with {self._num_expected}, "
            f"{self.parameter.uses} per microbatch"
        )
        self.on_arrival(number)

    def zero_if_empty(self) -> None:
        if not self.filled:
            self.main_grad.zero_()
            self.filled = True


InitialValues = Callable[[Parameter, str], Tensor] | None
"""Function (parameter, global name) -> initial values of this rank's shard of a parameter on the meta device."""


class FlatBuffer:
    """Two flat tensors with the same layout, one of parameters and one of their gradients."""

    def __init__(
        self,
        layout: BufferLayout,
        grad_dtype: torch.dtype,
        context: ParallelContext,
        *,
        sharded: bool,
        loads: list[float] | None = None,
    ) -> None:
        """`loads`: see `BufferLayout.owner_ranges`."""
        device = context.device
        self.layout = layout
        self.group = self._sharding_group(context)
        """Data-parallel process group over which the parameters are sharded if `sharded`. Its ranks hold copies of the
        parameters and process different tokens."""
        ranges = layout.owner_ranges(self.group.size, loads)
        self.owned = ranges[self.group.rank] if sharded else ((0, layout.size),)
        """(start, end) ranges that this rank updates: its shard of every bucket if `sharded`, else the whole buffer."""
        self._shard_sizes = [tuple(end - start for start, end in bucket) for bucket in zip(*ranges, strict=True)]
        self._shards = context.group(tensor_group_name(layout.key.grid))
        self.counts = _is_first_owner(layout.key, context, sharded=sharded)
        """True on the first of the ranks that own the same elements. Only this rank adds the elements to norms."""
        self.weights = self._new_weights(device)
        """Flat tensor in the storage format; the parameters are views of it. If `codes` replace the weights, it is a
        NaN placeholder without memory, except between `allocate_weights` and `free_weights`."""
        self.has_weights = True
        """False while only the quantised copies of the weights, `codes`, are in memory."""
        self.codes = self._new_codes(device)
        """Flat bytes of the quantised copies of all weights (`Parameter.stored`); empty if the weights are stored."""
        self.grads = self._new_grads(grad_dtype, device)
        """Flat tensor in the accumulation dtype; padding stays zero."""
        self.main_grads: tuple[MainGrad, ...] = ()

    @property
    def key(self) -> BufferKey:
        return self.layout.key

    def _sharding_group(self, context: ParallelContext) -> ProcessGroup:
        return context.group(replica_group_name(self.key.grid))

    def _new_weights(self, device: torch.device) -> Tensor:
        return torch.zeros(self.layout.size, dtype=torch_dtype(self.key.storage), device=device)

    def _new_codes(self, device: torch.device) -> tuple[Tensor, ...]:
        sizes = [self.layout.size * bits // 8 for bits in self.key.code_bits]
        return tuple(torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes)

    def _new_grads(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(self.layout.size, dtype=dtype, device=device)

    def tensors(self) -> Iterator[tuple[Literal["weights", "gradients"], Tensor]]:
        """Yields the tensors that store weights and gradients, with their kind."""
        for flat in self.codes or (self.weights,):
            yield "weights", flat
        for each in self.main_grads if self.codes else ():
            yield from (("weights", tensor) for tensor in each.parameter.stored_tensors)
        yield "gradients", self.grads

    def owned_weights(self, start: int, end: int) -> Tensor:
        """Weights of elements `start` to `end`, which this rank owns."""
        return self.weights[start:end]

    def owned_grads(self, start: int, end: int) -> Tensor:
        """Gradients of elements `start` to `end`, which this rank owns."""
        return self.grads[start:end]

    def finished_grads(self) -> list[Tensor]:
        """Gradients of the ranges that this rank owns, which are complete after `finish_grads`."""
        return [self.owned_grads(start, end) for start, end in self.owned]

    def shard_sizes(self, bucket: int) -> Sizes:
        """Number of elements of a bucket that each rank of `group` owns; None if they are equal."""
        return none_if_equal(self._shard_sizes[bucket])

    def storage_shard_sizes(self, bucket: int) -> list[Sizes]:
        """Sizes of each rank's shard of a bucket in the tensors of `storage_views`; None where they are equal."""
        return self._storage_sizes(self.shard_sizes(bucket))

    def _storage_sizes(self, sizes: Sizes) -> list[Sizes]:
        """Converts sizes in elements to sizes in the tensors of `storage_views`."""
        return [None if sizes is None else [size * bits // 8 for size in sizes] for bits in self.key.code_bits or (8,)]

    def owned_storage_views(self, start: int, end: int) -> tuple[Tensor, ...]:
        """Views of elements `start` to `end`, which this rank owns, in the tensors that store the weights."""
        return self.storage_views(start, end)

    def storage_views(self, start: int, end: int) -> tuple[Tensor, ...]:
        """Views of elements `start` to `end` in the flat tensors that store the weights and that ranks exchange:
        `codes`, or `weights`. For packed codes, `start` and `end` must be even."""
        if not self.codes:
            return (self.weights[start:end],)
        sizes = zip(self.codes, self.key.code_bits, strict=True)
        return tuple(flat[start * bits // 8 : end * bits // 8] for flat, bits in sizes)

    def new_grad_bucket(self, index: int) -> GradBucket:
        """Creates the `GradBucket` of bucket `index`, which counts and reduces the gradients of its parameters."""
        start, end = self.layout.buckets[index]
        pairs = zip(self.layout.params, self.main_grads, strict=True)
        main_grads = [each for param, each in pairs if param.bucket == index]
        uses = sum(param.parameter.uses for param in self.layout.params if param.bucket == index)
        fill = [each.zero_if_empty for each in main_grads]
        bucket = GradBucket(self.grads[start:end], self.group, uses, fill, self.shard_sizes(index))
        for each in main_grads:
            each.on_arrival = bucket.count_arrived
        return bucket

    def begin_step(self, num_microbatches: int | None) -> None:
        """See `GradBuffers.begin_step`."""
        for each in self.main_grads:
            each.begin_step(num_microbatches)

    def param_slices(self, start: int, end: int) -> Iterator[ParamSlice]:
        """Yields the parameters, or parts of them, between two offsets."""
        for index in self.layout.param_indices_between(start, end):
            param, parameter = self.layout.params[index], self.main_grads[index].parameter
            yield ParamSlice(param, parameter, max(start, param.start), min(end, param.end), self._shards)

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yields each parameter's global name and its view of `flat`, a tensor with this buffer's layout."""
        for param in self.layout.params:
            yield param.name, flat[param.start : param.end].view(param.shape)

    def allocate_weights(self) -> None:
        """Allocates the values of weights that are stored as `codes`, initialised to zero."""
        self._set_weights(torch.zeros(self.layout.size, dtype=self.weights.dtype, device=self.weights.device))
        self.has_weights = True

    def gather_owned_weights(self) -> None:
        """Gathers the weights that other ranks own to `weights`, which must be allocated."""
        for index, (start, end) in enumerate(self.layout.buckets):
            # collective over dp_cp or edp: one bucket of weights
            start_all_gather_(self.weights[start:end], self.group, self.shard_sizes(index)).wait()

    def free_weights(self) -> None:
        """Frees the values of weights that are stored as `codes`."""
        nan = torch.full((), torch.nan, dtype=self.weights.dtype, device=self.weights.device)
        self._set_weights(nan.expand(self.layout.size))
        self.has_weights = False

    def _set_weights(self, weights: Tensor) -> None:
        self.weights = weights
        for each, (_, weight) in zip(self.main_grads, self.views(weights), strict=True):
            each.parameter.data = weight

    def adopt_parameters(
        self, parameters: dict[str, Parameter], queue: WeightGradQueue, interval: int, initial: InitialValues = None
    ) -> None:
        """Copies the parameters into this buffer, makes them views of it, and attaches a `MainGrad` to each. Parameters
        without memory are set to their initial values."""
        main_grads = []
        for (name, weight), (_, main_grad) in zip(self.views(self.weights), self.views(self.grads), strict=True):
            parameter = parameters[name]
            materialized = parameter.is_meta and not weight.is_meta  # in a memory emulation, both are meta tensors
            weight.copy_(initial(parameter, name) if materialized and initial is not None else parameter.data)
            if materialized:
                replacement = Parameter(weight.new_empty(0))
                vars(replacement).update(vars(parameter))
                torch.utils.swap_tensors(parameter, replacement)
            parameter.data = weight
            parameter.grad = None
            main_grads.append(MainGrad(name, parameter, main_grad, queue, interval))
            parameter.grad_accumulator = main_grads[-1]
        self.main_grads = tuple(main_grads)


def none_if_equal(sizes: Sequence[int]) -> Sizes:
    """Returns the shard sizes in the form that collectives expect: None if all sizes are equal."""
    return None if len(set(sizes)) == 1 else sizes


def replica_group_name(grid: Grid) -> str:
    """Name of the process group whose ranks hold copies of the grid's parameters and process different tokens."""
    return "edp" if grid == "expert" else "dp_cp"


def tensor_group_name(grid: Grid) -> str:
    """Name of the process group over which tensor parallelism shards or replicates the grid's parameters."""
    return "etp" if grid == "expert" else "tp"


def _is_first_owner(key: BufferKey, context: ParallelContext, *, sharded: bool) -> bool:
    """True if this rank is the first of the ranks that own the same elements of a buffer."""
    copies = [] if sharded else [replica_group_name(key.grid)]
    copies += [tensor_group_name(key.grid)] if key.replicated else []
    copies += ["embedding"] if key.shared_stages else []
    return all(context.group(name).rank == 0 for name in copies)


class Sharding:
    """Storage of weights and gradients, and reduction of gradients. The default is ZeRO-0 or ZeRO-1: all weights and
    gradients are stored on every rank, and gradients are reduced once a step."""

    by_unit = False
    """Whether every unit has its own buffers, each of which is one bucket."""

    def new_buffers(
        self, layout: ParamLayout, grad_dtype: torch.dtype, context: ParallelContext, *, sharded: bool
    ) -> Iterator[FlatBuffer]:
        """Creates the buffers one by one. Each buffer must adopt its parameters before the next one is created, which
        limits peak memory."""
        for each in layout.buffers:
            yield FlatBuffer(each, grad_dtype, context, sharded=sharded)

    def new_reducer(self, buckets: Sequence[GradBucket], config: DataParallelConfig, kernels: Kernels) -> GradReducer:
        """Creates the reducer of all buckets, after their buffers have been created."""
        return GradReducer(buckets, config)


class GradBuffers:
    """Flat buffers of one rank for all trainable parameters and their gradients. Every parameter becomes a view of a
    buffer.

    Args:
        named_parameters: (global name, parameter) in the order of registration.
        precision: selects the dtype in which gradients are accumulated and reduced.
        kernels: kernels that compute norms and optimizer steps on these buffers.
        optimizer: selects weight decay and learning rate; parameters with equal settings share a buffer. None means
            the defaults of `OptimizerConfig`.
        data_parallel: size of buckets, overlap of their reduction with the backward pass, and whether ranks own shards
            of them (ZeRO-1). None means the defaults of `DataParallelConfig`.
        expert_interval: number of microbatches whose expert weight gradients are computed together.
        sharding: where weights and gradients are stored, and how gradients are reduced. None means ZeRO-0 or ZeRO-1.
        initial: function that returns the initial values of parameters on the meta device.
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
        sharding: Sharding | None = None,
        initial: InitialValues = None,
    ) -> None:
        self.data_parallel = data_parallel or DataParallelConfig()
        sharding = sharding or Sharding()
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
            by_unit=sharding.by_unit,
        )
        sharded = self.data_parallel.use_distributed_optimizer
        buffers = []
        for buffer in sharding.new_buffers(self.layout, self.grad_dtype, context, sharded=sharded):
            buffer.adopt_parameters(parameters, self.queue, expert_interval, initial)
            buffers.append(buffer)
        self.buffers = tuple(buffers)
        if self.data_parallel.overlap_grad_reduce:
            # The hooks let buckets complete during the backward. `collect_autograd_grads` moves gradients for which no
            # hook fires.
            for each in self.main_grads:
                each.parameter.register_post_accumulate_grad_hook(_accept)
        self._several_uses = [each for each in self.main_grads if each.parameter.uses != 1]
        order = reduction_order(self.layout)
        buckets = [self.buffers[buffer].new_grad_bucket(index) for buffer, index in order]
        self.reducer = sharding.new_reducer(buckets, self.data_parallel, kernels)

    @property
    def owns_whole_model(self) -> bool:
        """True if every rank owns every element of the model."""
        config = self.context.config
        return not self.data_parallel.use_distributed_optimizer and {config.tp, config.pp, config.ep, config.etp} == {1}

    @property
    def main_grads(self) -> Iterator[MainGrad]:
        for buffer in self.buffers:
            yield from buffer.main_grads

    def begin_step(self, num_microbatches: int | None = None, *, early: bool = True) -> None:
        """Begins a step: the next gradient of every parameter overwrites that of the last step.

        Reductions can start before `finish_grads` only if `num_microbatches` is not None and `early` is True.
        """
        assert not len(self.queue), f"{len(self.queue)} deferred weight gradients of the last step were not computed"
        for buffer in self.buffers:
            buffer.begin_step(num_microbatches)
        self.reducer.begin_step(num_microbatches if early else None)

    def collect_autograd_grads(self) -> None:
        """Moves every `.grad` of the last backward to the buffers."""
        for each in self.main_grads:
            each.move_autograd_grad()
        for each in self._several_uses:
            each.end_backward()

    def complete_local_grads(self) -> None:
        """Computes deferred weight gradients and zeroes the gradients of unused parameters. Afterwards the buffers
        contain this rank's sums over the step."""
        self.queue.run()
        for each in self.main_grads:
            each.compute_batched()
        self.reducer.complete_local_grads()


def finish_grads(buffers: GradBuffers, context: ParallelContext, *, token_count: Tensor | None = None) -> None:
    """Completes, reduces and scales all gradients in place. The result is the gradient of the global batch's loss.

    With a sharded optimizer, only the ranges that this rank owns are valid afterwards. Without `token_count`, each
    rank's loss is a mean. Gradients are summed over the data-parallel ranks and divided by dp x cp. Experts have only
    edp data-parallel ranks, but receive the tokens of all dp x cp ranks, so their divisor is also dp x cp.

    With `token_count` (per-token loss), each rank's loss is a sum over tokens. Summed gradients are divided by
    `token_count`, the number of tokens in the global batch (a scalar on the device). If it is 0, gradients are zero.
    """
    in_collective = buffers.data_parallel.ddp_average_in_collective
    assert token_count is None or not in_collective, "averaging in the collective does not support per-token loss"
    buffers.complete_local_grads()
    buffers.reducer.finish()
    num_ranks = context.group("dp_cp").size
    for buffer in buffers.buffers:
        share = (buffer.group.size if in_collective else 1) / num_ranks
        for grads in buffer.finished_grads():
            _sum_parts(grads, buffer, context)
            if token_count is not None:
                grads.div_(token_count.clamp(min=1).to(grads.dtype))
            elif share != 1.0:
                grads.mul_(share)


def _sum_parts(grads: Tensor, buffer: FlatBuffer, context: ParallelContext) -> None:
    """All-reduces `grads` over the tp, etp or embedding group if each of its ranks has only a partial sum."""
    if buffer.key.partial:
        # collective over tp or etp: norms, gates and biases; a few vectors of H elements, and E * H elements per layer
        all_reduce_(grads, context.group(tensor_group_name(buffer.key.grid)))
    if buffer.key.shared_stages:
        # collective over embedding: the sharded word embedding, V * H elements over all shards
        all_reduce_(grads, context.group("embedding"))


def _accept(parameter: Tensor) -> None:
    """Gradient hook of a parameter. Capturing the `MainGrad` would create a reference cycle that is never freed."""
    assert isinstance(parameter, Parameter) and parameter.grad_accumulator is not None, "no main gradient"
    parameter.grad_accumulator.move_autograd_grad()


def _param_shape(name: str, parameter: Parameter, context: ParallelContext) -> ParamShape:
    meta = parameter.meta
    return ParamShape(
        name=name,
        shape=tuple(parameter.shape),
        storage=float_name(parameter.dtype),
        meta=meta,
        replicated=meta.tp_dim is None and context.group(tensor_group_name(meta.grid)).size > 1,
        shared_stages=meta.shared_stages and context.group("embedding").size > 1,
        uses=parameter.uses,
        code_bits=() if parameter.stored is None else parameter.stored.code_bits,
    )
