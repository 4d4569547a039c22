"""Clones of experts on other ranks (ECHO): sends weights to the clones, and gradients back to the experts.

Weights are sent in their own dtype. Clones compute weight gradients in fp32 (fp64 for fp64 weights), and the home rank
adds them to the gradients of its experts in that dtype. `_Home` and the linear layers of the clones are connected in
the autograd graph by an empty boundary tensor, as the halves of a `SplitExchange` are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from megatron_moe.kernels.autograd import accumulate_grad
from megatron_moe.kernels.ops import GroupedPart, Kernels, RowIndex, internal_dtype
from megatron_moe.parallel.autograd_function import AutogradFunction
from megatron_moe.parallel.context import ProcessGroup
from megatron_moe.parallel.exchange import AllToAll, Wait
from megatron_moe.parallel.parameter import Parameter
from megatron_moe.precision.quantized_tensor import QuantizedTensor


@dataclass(frozen=True)
class CloneSizes:
    """Clones that this rank sends to and receives from other ranks in one dispatch, as host integers."""

    sent: tuple[tuple[int, ...], ...]
    """Local experts whose clones each ep rank holds, in ascending order."""
    received: tuple[int, ...]
    """Number of this rank's clones by the home rank of their expert."""
    num_rows: int
    """Number of rows that this rank's clones process."""
    on_any_rank: bool
    """Whether any ep rank has a clone. If not, nothing is exchanged."""


class ExpertClones:
    """Clones of one forward of a layer, and their exchange with the home ranks of their experts.

    A rank without clones calls `join` instead of `linear`, because every rank takes part in the exchange.
    """

    def __init__(
        self, weights: Sequence[Parameter], ep: ProcessGroup, sizes: CloneSizes, *, keeps_weights: bool = True
    ) -> None:
        """
        Args:
            weights: stacks of the layer's local experts, [e, O, I] each.
            keeps_weights: whether weights of clones stay in memory until backward; otherwise backward receives them
                again.
        """
        self.sizes = sizes
        self._weights, self._keeps_weights = tuple(weights), keeps_weights
        self._experts = tuple(chain(*sizes.sent))
        self._num_clones = sum(sizes.received)
        self._exchange = AllToAll(ep, tuple(len(each) for each in sizes.sent), sizes.received)
        self._received: list[Wait] = []
        self._grads: list[Wait | None] = [None] * len(self._weights)
        self._boundary: Tensor = _Home.apply(self, *self._weights)

    @torch.no_grad()
    def fetch(self) -> None:
        """Starts to exchange the weights, unless they have been received."""
        if self._received or not self.sizes.on_any_rank:
            return
        # collective over ep, backward `send_grad`: O * I elements per clone
        for weight in self._weights:
            sent = [weight[expert] for expert in self._experts]
            stacked = torch.stack(sent) if sent else weight.new_empty(0, *weight.shape[1:])
            self._received.append(_once(self._exchange.launch(stacked)))

    def linear(
        self,
        kernels: Kernels,
        stack_index: int,
        rows: Tensor,
        offsets_e: Tensor,
        *,
        index: RowIndex | None = None,
        probs_R: Tensor | None = None,
        rows_q: QuantizedTensor | None = None,
    ) -> Tensor:
        """Maps rows [R, I] to [R, O] with the clones of the weights in stack `stack_index` (0: fc1, 1: fc2), as
        `GroupedLinear` does. Experts with clones have no biases, to which `probs_R` would apply."""
        assert index is None and rows_q is None, "clones process plain rows"
        offsets_e = offsets_e[: self._num_clones]
        out_RO: Tensor = _CloneLinear.apply(self._boundary, rows, self, stack_index, kernels, offsets_e)
        if stack_index == len(self._weights) - 1 and not self._keeps_weights:
            self._release()
        return out_RO

    def replace_boundary(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replaces the boundary tensor by `change(tensor)`. An overlapped schedule, which cuts the graph there, then
        receives the gradients in the backward of the dispatch."""
        self._boundary = change(self._boundary)

    def join(self, rows: Tensor) -> Tensor:
        """Returns `rows`, and takes part in the exchange of weights and, in backward, of gradients."""
        self.fetch()
        self._release()
        return _Join.apply(rows, self._boundary, self)

    def weight(self, stack_index: int) -> Tensor:
        """Weights of this rank's clones, [n, O, I]."""
        self.fetch()
        return self._received[stack_index]()

    def grad_buffer(self, stack_index: int) -> Tensor:
        """Uninitialised buffer for the weight gradients of the clones, [n, O, I] in promote(fp32, dtype)."""
        weight = self._weights[stack_index]
        return weight.new_empty(self._num_clones, *weight.shape[1:], dtype=internal_dtype(weight.dtype))

    def send_grad(self, stack_index: int, grad: Tensor) -> None:
        """Starts to send the gradients of the clones of stack `stack_index` to the home ranks."""
        if self.sizes.on_any_rank:
            # collective over ep: O * I elements per clone in fp32
            self._grads[stack_index] = self._exchange.transposed.launch(grad)
        if stack_index == 0:  # the last gradient in backward
            self._release()

    def receive_grads(self) -> list[Tensor | None]:
        """Adds the gradients of all clones of this rank's experts to the gradients of the experts. Returns a value per
        stack of weights; see `accumulate_grad`."""
        received = [None if wait is None else wait() for wait in self._grads]
        self._grads = [None] * len(self._weights)
        return [
            accumulate_grad(weight, partial(_add_to_experts, self._experts, grads))
            for weight, grads in zip(self._weights, received, strict=True)
        ]

    def send_empty_grads(self) -> None:
        """Takes part in the exchanges of a backward on a rank without clones."""
        if not self._keeps_weights:
            self.fetch()
        for stack_index in reversed(range(len(self._weights))):
            self.send_grad(stack_index, self.grad_buffer(stack_index))

    def _release(self) -> None:
        """Waits for the weights, whose send buffers are in use until then, and frees them."""
        for wait in self._received:
            wait()
        self._received = []


class _Home(AutogradFunction):
    """Connects the weights of experts with their clones: backward adds the gradients of the clones."""

    @staticmethod
    def forward(ctx: Any, clones: ExpertClones, *weights: Tensor) -> Tensor:
        ctx.clones = clones
        return weights[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.clones.receive_grads()


class _CloneLinear(AutogradFunction):
    """Grouped GEMM of rows [R, I] and the weights of clones [n, O, I]."""

    @staticmethod
    def forward(
        ctx: Any,
        boundary: Tensor,
        rows: Tensor,
        clones: ExpertClones,
        stack_index: int,
        kernels: Kernels,
        offsets_e: Tensor,
    ) -> Tensor:
        ctx.clones, ctx.stack_index, ctx.kernels = clones, stack_index, kernels
        ctx.save_for_backward(offsets_e, rows)
        return kernels.grouped_forward(rows, clones.weight(stack_index), offsets_e)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (offsets_e, rows), clones = grads, ctx.saved_tensors, ctx.clones
        grad_boundary = grad_rows = None
        if ctx.needs_input_grad[1]:
            grad_rows = ctx.kernels.grouped_input_grad(grad, clones.weight(ctx.stack_index), offsets_e)
        if ctx.needs_input_grad[0]:
            buffer = clones.grad_buffer(ctx.stack_index)
            ctx.kernels.grouped_weight_grad([GroupedPart(grad, rows, offsets_e)], buffer, False)
            clones.send_grad(ctx.stack_index, buffer)
            grad_boundary = grad.new_empty(0)
        return grad_boundary, grad_rows, None, None, None, None


class _Join(AutogradFunction):
    """Identity on rows. Backward takes part in the exchanges of other ranks' clones."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, boundary: Tensor, clones: ExpertClones) -> Tensor:
        ctx.clones = clones
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        if not ctx.needs_input_grad[1]:
            return grad, None, None
        ctx.clones.send_empty_grads()
        return grad, grad.new_empty(0), None


def _add_to_experts(experts: Sequence[int], grads: Tensor | None, out: Tensor, accumulate: bool) -> None:
    """Adds the gradients of the clones of local `experts` to `out` [e, O, I], which is overwritten unless
    `accumulate`."""
    if not accumulate:
        out.zero_()
    if grads is not None:
        for expert, grad in zip(experts, grads, strict=True):
            out[expert].add_(grad)


def _once(wait: Wait) -> Wait:
    """Wraps an asynchronous result: the first call waits for it, and every call returns the tensor."""
    result: list[Tensor] = []

    def wait_once() -> Tensor:
        if not result:
            result.append(wait())
        return result[0]

    return wait_once
