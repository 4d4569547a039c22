"""Optimizer over flat buffers: applies an update rule to the ranges that this rank owns (ZeRO-0 and ZeRO-1).

The step can overlap with the next forward (`Optimizer.step_in_forward`), because the update is bound by memory
bandwidth and the forward mostly by compute. Buckets are stepped on a side stream in the order in which the forward
reads the weights, and each node of the forward waits for the updates of its parameters. Results do not change: a
backward cannot overwrite gradients that an update still reads, because the forward has waited for the update.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron_moe.config.exit_codes import RunError
from megatron_moe.config.param_meta import ParamBox, sharded_dim
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.config.update_rules import spec_of
from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.optim.clip_grads import norm_buffers, sum_over_world
from megatron_moe.optim.cpu_offload import CPUStep, StreamedStep
from megatron_moe.optim.grad_buffers import FlatBuffer, GradBuffers
from megatron_moe.optim.param_layout import forward_order
from megatron_moe.optim.param_store import AcquiringModel, ParamStore
from megatron_moe.optim.state import OptimizerState, StepScalars, UpdateOperands, new_states
from megatron_moe.optim.stored_weights import StoredWeights
from megatron_moe.parallel.collectives import gather_objects
from megatron_moe.parallel.parameter import Parameter
from megatron_moe.parallel.streams import Streams, make_host_copies, make_streams


@dataclass(frozen=True)
class StateRange:
    """One parameter's master weights or other state, limited to the elements that this rank owns."""

    name: str
    """Global name of the parameter."""
    kind: str
    parameter: Parameter
    start: int
    """Index of the first owned element in the flattened shard that `boxes` describe."""
    data: Tensor
    """Owned elements [n] in fp32 (fp64 in fp64 runs): a view of the stored state, or a host copy if the state is stored
    in another format. Values written to `data` take effect when `weights_from_masters` is called."""

    matrix_shape: tuple[int, ...] | None = None
    """Shape of the state of each matrix; None means that the state has the shape of the parameter."""

    @property
    def whole(self) -> Tensor:
        """View of `data` in the parameter's shape; requires that this rank owns the whole parameter."""
        return self.data.view(self.parameter.shape)

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the state of the whole parameter."""
        if self.matrix_shape is None:
            return self.parameter.global_shape
        stack = self.parameter.global_shape[:1] if self.parameter.meta.num_experts is not None else ()
        return (*stack, *self.matrix_shape)

    @property
    def boxes(self) -> tuple[ParamBox, ...]:
        """Boxes of the global state tensor that, concatenated along `dim`, are this rank's shard."""
        boxes, shape = self.parameter.boxes, self.matrix_shape
        if shape is None:
            return boxes
        if self.parameter.meta.num_experts is None:
            return (ParamBox((0,) * len(shape), shape),)
        return (ParamBox((boxes[0].offset[0], *(0 for _ in shape)), (boxes[0].size[0], *shape)),)

    @property
    def dim(self) -> int:
        return 0 if self.matrix_shape is not None else sharded_dim(self.parameter.meta) or 0


class Optimizer:
    """Steps the ranges of the buffers that this rank owns. The constructor copies the weights to the master weights.

    Args:
        precision: formats of master weights and moments. `buffers.optimizer` selects whether they are in host memory.
        store: class of the store that provides weights to the model.
    """

    def __init__(self, buffers: GradBuffers, precision: PrecisionConfig, store: type[ParamStore] = ParamStore) -> None:
        self.buffers = buffers
        self.config = buffers.optimizer
        self._host_copies = make_host_copies(buffers.device)
        self.step_count = torch.zeros((), dtype=torch.int64, device=buffers.device)
        """Number of updates applied so far, a scalar on the device."""
        self.nonfinite = torch.zeros((), dtype=torch.bool, device=buffers.device)
        """Device flag: True once an update on this rank has stored a non-finite weight or moment. Never reset."""
        names = dict.fromkeys(buffer.key.rule for buffer in buffers.buffers)
        rules = {name: spec_of(name).new_rule(self.config, precision) for name in names}
        self.states = tuple(
            state
            for buffer in buffers.buffers
            for state in new_states(buffer, rules[buffer.key.rule], self.config, precision, self._host_copies)
        )
        self.on_new_weights: Callable[[], None] = lambda: None
        """Callback that is called whenever weights change, to invalidate values computed from them."""
        self._copies: list[tuple[OptimizerState, str, Tensor]] = []
        """(state, kind, copy): fp32 copies that the last call of `named_state` made of state in other formats."""
        shared = (self.config.offload, buffers.kernels, self._host_copies)
        self._streamed_step = StreamedStep([state for state in self.states if state.placement == "streamed"], *shared)
        self._cpu_step = CPUStep([state for state in self.states if state.placement == "host"], *shared)
        self._stored = StoredWeights(buffers, self.states)
        self.store = store(buffers)
        self._gather_in_forward = False
        self._streams: Streams | None = None
        """Streams for a step that overlaps with the next forward; None if the step does not overlap."""
        self._buckets: list[list[UpdateOperands]] = []
        """Operands of the owned ranges in each bucket, for the overlapped step; buckets in forward order."""
        self._scalars: StepScalars | None = None
        """Scalars of the last overlapped step, kept alive because the optimizer stream may still read them."""
        if self._stored.buffers:
            self._publish()
            self.finish_gather()
            for buffer in self._stored.buffers:
                buffer.free_weights()

    def step_in_forward(self, model: AcquiringModel) -> None:
        """Enables the overlapped step: `step` returns while updates are pending, and nodes of `model` wait for them.

        Other code must call `finish_gather` before it reads weights or optimizer state, or writes gradients.
        """
        assert all(state.placement == "device" for state in self.states), (
            "state in host memory is not stepped on a stream"
        )
        for number, index in forward_order(self.buffers.layout):
            buffer = self.buffers.buffers[number]
            start, end = buffer.layout.buckets[index]
            inside = [
                (state, max(start, state.start), min(end, state.end)) for state in self.states if state.buffer is buffer
            ]
            self._buckets.append([state.operands(a - state.start, b - state.start) for state, a, b in inside if a < b])
        self._streams = make_streams(self.buffers.device, "optimizer")
        model.acquire_from(self.store)

    def enable_overlapped_gather(self, model: AcquiringModel) -> None:
        """Enables overlapped gathers: `step` returns while weights are gathered, and nodes of `model` wait for them.

        Other code must call `finish_gather` before it reads weights.
        """
        assert self.buffers.data_parallel.use_distributed_optimizer, "only a sharded optimizer gathers weights"
        if self.store.gathers or self.store.frees_units:  # the store gathers no weights, so no unit is ever pending
            model.acquire_from(self.store)
        self._gather_in_forward = True

    def finish_gather(self) -> None:
        """Makes the current stream wait for all updates and gathers of the last step."""
        self.store.wait_for_pending()

    @torch.no_grad()
    def step(
        self,
        *,
        lr: float,
        weight_decay: float,
        grad_scale: Tensor,
        apply_update: Tensor,
        decoupled_lr: float | None = None,
        row_factors: Mapping[Parameter, Tensor] | None = None,
    ) -> None:
        """Applies one update with the finished gradients.

        Args:
            grad_scale: scalar on the device that multiplies every gradient (the clip factor).
            apply_update: bool scalar on the device. If False, weights, moments and step count stay bitwise unchanged.
            decoupled_lr: learning rate of embedding and head; if None, embedding and head use `lr`.
            row_factors: see `StepScalars.row_factors`; factors of a rejected step must be 1.
        """
        assert (decoupled_lr is None) == (self.config.decoupled_lr is None), f"decoupled learning rate {decoupled_lr}"
        self.finish_gather()
        self.on_new_weights()
        self.step_count.add_(apply_update.to(torch.int64))
        self._copies = []
        # A rejected first step must not divide by 1 - beta^0.
        number = self.step_count.clamp(min=1)
        flags = apply_update, self.nonfinite
        scalars = StepScalars(lr, decoupled_lr, weight_decay, number, grad_scale, *flags, row_factors or {})
        if self._streams is not None:
            self._start_overlapped(scalars, self._streams)
            return
        for state in self.states:
            if state.placement == "device":
                state.operands().step(scalars, self.buffers.kernels)
        self._streamed_step.run(scalars)
        self._cpu_step.run(scalars)
        self._publish()
        if not self._gather_in_forward:
            self.finish_gather()

    def _start_overlapped(self, scalars: StepScalars, streams: Streams) -> None:
        """Launches the updates of all buckets on the optimizer stream. Requires that no earlier update is pending."""
        self._scalars = scalars
        with streams.fork("optimizer"):
            quantized = []
            for number, bucket in enumerate(self._buckets):
                for operands in bucket:
                    operands.step(scalars, self.buffers.kernels)
                if self.store.is_quantized(number):
                    quantized.append(number)
                else:
                    self.store.publish(number, streams)
            self._stored.update()
            for number in quantized:
                self.store.publish(number, streams)

    def weights_from_masters(self) -> None:
        """Stores the values that the caller wrote to `StateRange.data`, converts the master weights to the parameters'
        dtype, and gathers the parameters on all ranks."""
        self.finish_gather()
        self.on_new_weights()
        self._host_copies.synchronize_all()
        for state, kind, values in self._copies:
            state.write_values(kind, values)
        self._copies = []
        with self.unquantized_weights():
            for state in self.states:
                state.weights_from_master()
            self._publish()
            self.finish_gather()

    def masters_from_weights(self) -> None:
        """Copies the parameters to the master weights. Needed if parameters are set without optimizer state. Parameters
        that are stored in FP8 or FP4 must be set inside `unquantized_weights`."""
        self.finish_gather()
        self.on_new_weights()
        self._host_copies.synchronize_all()
        self._copies = []
        assert not self._free_buffers(), "the values of weights stored in FP8 or FP4 are not allocated"
        for state in self.states:
            state.master_from_weights()
        if self._stored.buffers:
            self._publish()
            self.finish_gather()

    @contextmanager
    def unquantized_weights(self) -> Iterator[None]:
        """Context in which all parameters contain their values in the dtype of the run, equal on all ranks.

        Only parameters that are stored in FP8 or FP4 do not contain them otherwise. They are set to the rounded master
        weights and freed at the end. New values take effect with `weights_from_masters` or `masters_from_weights`.
        Collective over the replica groups if the optimizer is sharded.
        """
        with self.store.all_weights(), self._dequantized(self._free_buffers()):
            yield

    @contextmanager
    def _dequantized(self, buffers: Sequence[FlatBuffer]) -> Iterator[None]:
        """Context in which the weights of `buffers`, which are stored in FP8 or FP4, are allocated and set. Nested
        contexts pass no buffers, because the outer one may have written new weights."""
        for buffer in buffers:
            buffer.allocate_weights()
        for state in self._stored.states if buffers else ():
            state.write_weights()
        if buffers and self.buffers.data_parallel.use_distributed_optimizer:
            for buffer in buffers:
                buffer.gather_owned_weights()
        try:
            yield
        finally:
            for buffer in buffers:
                buffer.free_weights()

    def _free_buffers(self) -> list[FlatBuffer]:
        """Buffers of weights stored in FP8 or FP4 whose values are not allocated."""
        return [buffer for buffer in self._stored.buffers if not buffer.has_weights]

    def _publish(self) -> None:
        """Quantises new master weights of parameters stored in FP8 or FP4, and publishes all buckets."""
        self._stored.update()
        self.store.publish_all()

    def named_state(self) -> Iterator[StateRange]:
        """Yields all state that this rank owns except `step_count`, converted to fp32 (fp64 in fp64 runs).

        To restore state, copy it into `StateRange.data`, then call `weights_from_masters`.
        """
        self.finish_gather()
        self._host_copies.synchronize_all()
        self._copies = []
        for state in self.states:
            flats = {kind: self._values(state, kind) for kind in state.kinds}
            for param in state.param_slices:
                for kind, flat in flats.items():
                    found = state.matrix_states.get((kind, param.name))
                    if found is None or found.spec.matrix_shape is None:
                        data = flat[param.start - state.start : param.end - state.start]
                        yield StateRange(param.name, kind, param.parameter, param.start - param.slot.start, data)
                        continue
                    shape = found.spec.matrix_shape(*param.whole_shape)
                    data = flat[found.start : found.start + param.num_matrices * prod(shape)]
                    start = param.first_matrix * prod(shape)
                    yield StateRange(param.name, kind, param.parameter, start, data, shape)

    def _values(self, state: OptimizerState, kind: str) -> Tensor:
        packed = state.kinds[kind]
        if packed.format == "plain" and packed.data.dtype in (torch.float32, torch.float64):
            return packed.data
        values = state.read_values(kind)
        self._copies.append((state, kind, values))
        return values

    def params_norm(self) -> Tensor:
        """L2 norm of the whole model's master weights, a scalar on the device. Each element is counted once."""
        self.finish_gather()
        if any(state.placement != "device" for state in self.states):
            self._host_copies.synchronize_all()
        kernels, counting = self.buffers.kernels, {id(buffer) for buffer in norm_buffers(self.buffers)}
        squares = [state.sum_of_squares(kernels) for state in self.states if id(state.buffer) in counting]
        if squares:
            total = torch.stack(squares).sum()
        else:
            total = torch.zeros((), dtype=internal_dtype(self.buffers.context.dtype), device=self.buffers.device)
        # collective over world: 4 or 8 bytes
        return sum_over_world(total, self.buffers, self.buffers.context).sqrt()


def check_coverage(buffers: GradBuffers) -> None:
    """Checks that the ranks together own every element of every parameter exactly once. Collective over the world.

    An element without an owner would never be stepped or saved, and an element with two owners would be stepped twice.

    Raises:
        RunError: the ranks own more or fewer elements of a parameter than it has.
    """
    own_sizes = {each.name: prod(each.parameter.global_shape) for each in buffers.main_grads}
    # collective over pp: names and sizes of all parameters of a stage
    stages = gather_objects(own_sizes, buffers.context.group("pp"))
    sizes = {name: size for stage in stages for name, size in sorted(stage.items())}
    index = {name: number for number, name in enumerate(sizes)}
    owned = [0] * len(sizes)
    for buffer in norm_buffers(buffers):
        for param in (param for start, end in buffer.owned for param in buffer.param_slices(start, end)):
            owned[index[param.name]] += param.end - param.start
    sums = torch.tensor(owned, dtype=torch.int64, device=buffers.device)
    # collective over world: 8 bytes per parameter
    found = sum_over_world(sums, buffers, buffers.context).tolist()
    for (name, expected), number in zip(sizes.items(), found, strict=True):
        if number != expected:
            raise RunError(
                f"the ranks together own {number:,} elements of {name}, which has {expected:,}, so that some would be "
                "stepped twice or never: compare its ParamMeta (tp_dim, num_experts, grid, shared_stages) with how "
                f"the ranks of the layout {buffers.context.config} shard it"
            )
