"""Parameters with metadata, and the interface through which their gradients are accumulated."""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron_moe.config.param_meta import ParamBox, ParamMeta, local_boxes, local_shape, sharded_dim
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.precision.stored_weight import StoredWeight


class GradAccumulator(Protocol):
    """Accumulates the gradient of one parameter and decides when its weight-gradient GEMMs run.

    The optimizer's buffers set one as the `grad_accumulator` of every parameter, so that GEMMs write weight gradients
    directly into the flat buffer. A parameter without one receives its gradient from autograd, so modules work without
    an optimizer.
    """

    @property
    def defers_weight_grads(self) -> bool:
        """Whether `add` may defer a `BatchedWeightGrad` to a later microbatch and compute several of them together."""

    def add(self, compute: Callable[[Tensor, bool], None]) -> None:
        """Calls `compute(out, accumulate)`, now or later, to write the gradient to `out` or add it (if `accumulate`).
        `out` has the parameter's shape and the accumulation dtype. A `BatchedWeightGrad` may be merged with others."""

    def move_autograd_grad(self) -> None:
        """Moves the gradient that autograd left in the parameter's `.grad`, if any, to the accumulator."""


def store(grad: Tensor, out: Tensor, accumulate: bool) -> None:
    """Writes a gradient to `out`, or adds it to `out` if `accumulate`."""
    if accumulate:
        out.add_(grad)
    else:
        out.copy_(grad)


@dataclass(frozen=True)
class BatchedWeightGrad:
    """Weight gradient that can be merged with later gradients of the same parameter and computed together with them.
    An accumulator that does not merge gradients can call the object directly."""

    gemm: Callable[[Sequence[Any], Tensor, bool], None]
    """`gemm(parts, out, accumulate)` writes the sum of all parts' gradients to `out`, or adds it if
    `accumulate`."""
    parts: tuple[Any, ...]
    """Operands of the deferred weight-gradient GEMMs, one entry per microbatch; they must stay unmodified until
    `gemm` has run."""

    def __call__(self, out: Tensor, accumulate: bool) -> None:
        self.gemm(self.parts, out, accumulate)

    def merged_with(self, later: "BatchedWeightGrad") -> "BatchedWeightGrad":
        return replace(self, parts=self.parts + later.parts)


class WeightGradQueue:
    """Queue of weight-gradient computations, which run immediately unless `deferred` is True.

    If `deferred` is True, they run when `run` or `run_backward` is called: by the schedule, by exchanges of gradients
    that they overlap with (`ExpertComm.overlap_weight_grads`), and at the latest in `GradBuffers.complete_local_grads`.
    """

    def __init__(self) -> None:
        self.deferred = False
        self.backward: Hashable = None
        """Identifies the running backward for `run_backward`."""
        self._tasks: dict[Hashable, deque[Callable[[], None]]] = {}
        """Deferred tasks of each backward."""

    def __len__(self) -> int:
        return sum(map(len, self._tasks.values()))

    def submit(self, task: Callable[[], None]) -> None:
        """Runs the task, or appends it to the queue if `deferred` is True."""
        if self.deferred:
            self._tasks.setdefault(self.backward, deque()).append(task)
        else:
            task()

    def run(self) -> None:
        """Runs all deferred tasks, one backward after the other."""
        while self._tasks:
            self.run_backward(next(iter(self._tasks)))

    @torch.no_grad()
    def run_backward(self, backward: Hashable) -> None:
        """Runs the deferred tasks of one backward in the order of submission."""
        tasks = self._tasks.pop(backward, deque[Callable[[], None]]())
        while tasks:
            tasks.popleft()()


class Parameter(nn.Parameter):
    """Parameter that contains this rank's shard of a global tensor of shape `global_shape`."""

    meta: ParamMeta
    global_shape: tuple[int, ...]
    boxes: tuple[ParamBox, ...]
    """Boxes of the global tensor that form the shard when concatenated along the sharded dim."""
    grad_accumulator: GradAccumulator | None
    uses: int = 1
    """Number of gradients per microbatch on this rank: one per GEMM or embedding lookup that uses the parameter,
    counting each run of a layer that runs several times."""
    stored: StoredWeight | None = None
    """Quantised storage of the weight. Once an optimizer owns the parameter, its values are NaN placeholders without
    memory, except in `Optimizer.unquantized_weights`. None means that the parameter contains its values."""

    @property
    def stored_tensors(self) -> tuple[Tensor, ...]:
        """Tensors that contain the values of the parameter: itself, or the bytes and scales of its storage."""
        return (self.detach(),) if self.stored is None else self.stored.tensors


def named_parameters(module: nn.Module) -> Iterator[tuple[str, Parameter]]:
    """Yields (global name, parameter) in the order of registration."""
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, Parameter), f"{name} was not created by new_parameter"
        yield name, parameter


def new_parameter(shape: tuple[int, ...], meta: ParamMeta, ctx: ParallelContext) -> Parameter:
    """Creates this rank's shard of a parameter of the global `shape`, in the context's dtype and on its device, or on
    the meta device (`--init-model-with-meta-device`).

    The values are uninitialised; `model/init.py` sets them.
    """
    tp, ep = ctx.group("etp" if meta.grid == "expert" else "tp"), ctx.group("ep")
    boxes = local_boxes(shape, meta, tp=(tp.rank, tp.size), ep=(ep.rank, ep.size))
    device = torch.device("meta") if ctx.config.init_model_with_meta_device else ctx.device
    parameter = Parameter(torch.empty(local_shape(boxes, meta), dtype=ctx.dtype, device=device))
    parameter.meta = meta
    parameter.global_shape = shape
    parameter.boxes = boxes
    parameter.grad_accumulator = None
    return parameter


def local_shard(whole: Tensor, boxes: tuple[ParamBox, ...], meta: ParamMeta) -> Tensor:
    """Extracts the shard that consists of `boxes` from the global tensor `whole`. Returns a view if there is one box,
    otherwise the concatenated boxes."""
    parts = [whole[_slices(box)] for box in boxes]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=sharded_dim(meta) or 0)


def local_expert_ids(parameter: Parameter) -> range:
    """Global ids of the experts in this rank's shard of a stacked expert parameter."""
    first, number = parameter.boxes[0].offset[0], parameter.boxes[0].size[0]
    return range(first, first + number)


def local_shard_of_expert(whole: Tensor, parameter: Parameter) -> Tensor:
    """Extracts this rank's shard from the whole tensor of one expert. `parameter` stacks the experts of this rank."""
    boxes = tuple(ParamBox(box.offset[1:], box.size[1:]) for box in parameter.boxes)
    return local_shard(whole, boxes, replace(parameter.meta, num_experts=None))


def write_shard(whole: Tensor, part: Tensor, boxes: tuple[ParamBox, ...], meta: ParamMeta) -> None:
    """Writes a rank's shard `part`, which consists of `boxes`, into the global tensor `whole` (inverse of
    `local_shard`)."""
    dim = sharded_dim(meta) or 0
    pieces = part.split([box.size[dim] for box in boxes], dim=dim)
    for box, piece in zip(boxes, pieces, strict=True):
        whole[_slices(box)] = piece


def _slices(box: ParamBox) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.offset, box.size, strict=True))
