"""GEMMs of the reference against explicit sums, and their gradients."""

import pytest
import torch
from torch import Tensor

from megatron_moe.config.param_meta import ParamMeta
from megatron_moe.kernels import autograd
from megatron_moe.kernels.ops import GroupedPart
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.kernels.reference.sequential import sequential
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import Parameter, new_parameter
from tests.helpers.tolerances import EXACT, FP64_REF

KERNELS = reference.bundle()
OFFSETS = ([2, 2, 5, 6], [0, 0, 0, 7], [7, 7, 7, 7], [1, 2, 3, 4], [0, 0, 0, 0])
"""Ends of four experts' rows among seven: an empty expert, all on the last, all on the first, one each, none at all."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ends(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def owner(row: int, offsets: list[int]) -> int | None:
    """Expert of a row, determined by a loop over the offsets."""
    return next((expert for expert, end in enumerate(offsets) if row < end), None)


def by_hand(rows: Tensor, weight: Tensor, offsets: list[int]) -> Tensor:
    """Multiplies each row by its expert's matrix, element by element; rows after the last offset are 0."""
    out = torch.zeros(len(rows), weight.shape[1], dtype=torch.float64)
    for r in range(len(rows)):
        expert = owner(r, offsets)
        if expert is not None:
            for o in range(weight.shape[1]):
                out[r, o] = sum(weight[expert, o, i] * rows[r, i] for i in range(weight.shape[2]))
    return out


def test_linear_is_x_times_weight_transposed_plus_bias() -> None:
    x, weight, bias = draw(2, 3, 5), draw(4, 5, seed=1), draw(4, seed=2)
    expected = torch.zeros(2, 3, 4, dtype=torch.float64)
    for s in range(2):
        for b in range(3):
            for o in range(4):
                expected[s, b, o] = bias[o] + sum(weight[o, i] * x[s, b, i] for i in range(5))
    FP64_REF.check(KERNELS.linear_forward(x, weight, bias), expected)


def test_linear_has_the_gradients_of_finite_differences() -> None:
    inputs = [t.requires_grad_() for t in (draw(2, 3, 5), draw(4, 5, seed=1), draw(4, seed=2))]
    assert torch.autograd.gradcheck(lambda x, w, b: autograd.linear(KERNELS, x, w, b), inputs)


@pytest.mark.parametrize("num_rows", [0, 1])
def test_linear_of_zero_and_one_rows(num_rows: int) -> None:
    x, weight = draw(num_rows, 5).requires_grad_(), draw(4, 5).requires_grad_()
    out = autograd.linear(KERNELS, x, weight)
    out.backward(torch.ones_like(out))
    assert out.shape == (num_rows, 4)
    FP64_REF.check(weight.grad, x.detach().sum(0).expand(4, 5), "weight gradient")


def test_weight_gradients_accumulate_in_the_dtype_of_the_buffer() -> None:
    grad, x = torch.ones(1, 1, dtype=torch.bfloat16), torch.full((1, 1), 2.0**-10, dtype=torch.bfloat16)
    out = torch.ones(1, 1, dtype=torch.float32)
    for _ in range(4):
        KERNELS.linear_weight_grad(grad, x, out, True)
    EXACT.check(out, torch.tensor([[1.0 + 4 * 2.0**-10]]))


@pytest.mark.parametrize("kernels", [KERNELS, sequential(KERNELS)], ids=["reference", "looped"])
@pytest.mark.parametrize("offsets", OFFSETS)
class TestGroupedProducts:
    def test_forward_multiplies_each_row_by_its_experts_matrix(self, kernels, offsets) -> None:
        rows, weight = draw(7, 3), draw(4, 5, 3, seed=1)
        actual = kernels.grouped_forward(rows, weight, ends(offsets))
        held = slice(0, offsets[-1])
        FP64_REF.check(actual[held], by_hand(rows, weight, offsets)[held])

    def test_gradients_are_those_of_finite_differences(self, kernels, offsets) -> None:
        def held_rows(rows: Tensor, weight: Tensor) -> Tensor:
            return autograd.grouped_linear(kernels, rows, weight, ends(offsets))[: offsets[-1]]

        assert torch.autograd.gradcheck(
            held_rows, (draw(7, 3).requires_grad_(), draw(4, 5, 3, seed=1).requires_grad_())
        )

    def test_weight_gradient_overwrites_or_adds_and_is_zero_for_an_empty_expert(self, kernels, offsets) -> None:
        grad, rows, before = draw(7, 5), draw(7, 3, seed=1), draw(4, 5, 3, seed=2)
        expected = torch.zeros(4, 5, 3, dtype=torch.float64)
        for r in range(7):
            expert = owner(r, offsets)
            if expert is not None:
                expected[expert] += torch.outer(grad[r], rows[r])
        grad[offsets[-1] :], rows[offsets[-1] :] = torch.nan, torch.nan
        stored, added = torch.full_like(before, torch.nan), before.clone()
        part = GroupedPart(grad, rows, ends(offsets))
        kernels.grouped_weight_grad([part], stored, False)
        kernels.grouped_weight_grad([part], added, True)
        FP64_REF.check(stored, expected, "stored")
        FP64_REF.check(added, before + expected, "added")


class Sink:
    """Stores deferred weight-gradient computations until `run` is called."""

    def __init__(self, like: Tensor) -> None:
        self.buffer = torch.zeros(like.shape, dtype=torch.float64)
        self.waiting: list = []

    def add(self, compute) -> None:
        self.waiting.append(compute)

    def run(self) -> None:
        for number, compute in enumerate(self.waiting):
            compute(self.buffer, number > 0)


def parameter(*shape: int, seed: int) -> Parameter:
    made = new_parameter(shape, ParamMeta(role="matrix"), ParallelContext.single())
    made.data.copy_(draw(*shape, seed=seed))
    return made


def test_sinks_receive_weight_gradients_and_may_defer_them() -> None:
    weight, stack = parameter(4, 5, seed=1), parameter(3, 2, 4, seed=2)
    x, offsets = draw(6, 5).requires_grad_(), ends([2, 2, 6])

    def run() -> None:
        autograd.grouped_linear(KERNELS, autograd.linear(KERNELS, x, weight), stack, offsets).square().sum().backward()

    run()
    plain = {"linear": weight.grad, "grouped": stack.grad, "x": x.grad}
    weight.grad = stack.grad = x.grad = None
    weight.grad_accumulator, stack.grad_accumulator = Sink(weight), Sink(stack)
    run()
    FP64_REF.check(x.grad, plain["x"], "input gradient")
    run()  # a second microbatch
    assert weight.grad is None and stack.grad is None, "the gradient must go to the sink alone"
    assert not weight.grad_accumulator.buffer.any(), "nothing is computed before the accumulator says so"
    weight.grad_accumulator.run()
    stack.grad_accumulator.run()
    FP64_REF.check(weight.grad_accumulator.buffer, 2 * plain["linear"], "linear")
    FP64_REF.check(stack.grad_accumulator.buffer, 2 * plain["grouped"], "grouped")
