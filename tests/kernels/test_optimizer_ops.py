"""Flat-buffer ops: AdamW against torch's own and against its formulas in plain numbers; sums of squares."""

import math

import pytest
import torch
from torch import Tensor

from megatron_moe.kernels.backends.torch_native import backend as torch_native
from megatron_moe.kernels.backends.triton import backend as triton
from megatron_moe.kernels.reference import backend as reference
from tests.helpers.kernel_comparison import OVERFLOWS, adamw_step, check_nonfinite_flag
from tests.helpers.tolerances import EXACT, FP32_REF, FP64_REF

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # numpy, of the interpreter
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
BACKENDS = pytest.mark.parametrize("ops", [reference, torch_native], ids=["reference", "torch_native"])
ADAMW = pytest.mark.parametrize("ops", [reference, torch_native, triton], ids=["reference", "torch_native", "triton"])
NUMBERS = dict(lr=0.1, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.2)


def draw(size: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def step(ops, state: list[Tensor], grad: Tensor, number: int, *, scale: float = 1.0, apply_update: bool = True) -> None:
    master, exp_avg, exp_avg_sq = state
    ops.adamw_(
        master,
        grad.clone(),
        exp_avg,
        exp_avg_sq,
        adamw_step(number, scale=torch.tensor(scale, dtype=master.dtype), apply_update=apply_update, **NUMBERS),
    )


def test_adamw_follows_the_formula_of_the_paper() -> None:
    weight, first, second = 0.5, 0.0, 0.0
    state = [torch.tensor([value], dtype=torch.float64) for value in (weight, first, second)]
    for number, grad in enumerate((0.3, -0.2, 1.5), start=1):
        step(reference, state, torch.tensor([grad], dtype=torch.float64), number, scale=0.5)
        g = 0.5 * grad
        first = 0.8 * first + 0.2 * g
        second = 0.9 * second + 0.1 * g**2
        unbiased = first / (1 - 0.8**number), second / (1 - 0.9**number)
        weight = weight - 0.1 * 0.2 * weight - 0.1 * unbiased[0] / (math.sqrt(unbiased[1]) + 1e-3)
        FP64_REF.check(torch.cat(state), [weight, first, second], f"after step {number}")


@ADAMW
@pytest.mark.parametrize("size", [1, 1003])
def test_adamw_matches_torch(ops, size: int) -> None:
    parameter = torch.nn.Parameter(draw(size, 0, torch.float32))
    names = dict(betas=(0.8, 0.9), lr=0.1, eps=1e-3, weight_decay=0.2)
    theirs = torch.optim.AdamW([parameter], foreach=False, fused=False, **names)
    ours = [parameter.detach().clone(), torch.zeros(size), torch.zeros(size)]
    for number in range(1, 6):
        grad = draw(size, number, torch.float32)
        parameter.grad = grad.clone()
        theirs.step()
        step(ops, ours, grad * 2, number, scale=0.5)
        FP32_REF.check(ours[0], parameter, f"weights after step {number}")
    FP32_REF.check(ours[1], theirs.state[parameter]["exp_avg"], "first moment")
    FP32_REF.check(ours[2], theirs.state[parameter]["exp_avg_sq"], "second moment")


@ADAMW
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_skipped_steps_ignore_nonfinite_gradients(ops, bad: float) -> None:
    state = [draw(7, seed, torch.float32).abs() for seed in range(3)]
    before = [tensor.clone() for tensor in state]
    grad = draw(7, 3, torch.float32)
    grad[2] = bad
    step(ops, state, grad, 4, scale=math.nan, apply_update=False)
    for tensor, old in zip(state, before, strict=True):
        EXACT.check(tensor, old)


@ADAMW
@pytest.mark.parametrize("what", OVERFLOWS)
def test_nonfinite_values_set_the_flag(ops, what: str) -> None:
    check_nonfinite_flag(ops, what)


@BACKENDS
def test_moments_beyond_the_range_of_their_dtype_set_the_flag(ops) -> None:
    exp_avg, exp_avg_sq = torch.zeros(5), torch.full((5,), 3.3895e38).bfloat16()
    move = adamw_step(3, scale=1.0, beta2=0.1)
    ops.adamw_(torch.ones(5), torch.full((5,), 1.8444e19), exp_avg, exp_avg_sq, move)
    assert bool(exp_avg_sq.isinf().all()) and bool(move.nonfinite)


@BACKENDS
def test_bf16_moments_and_gradients_are_updated_in_fp32(ops) -> None:
    narrow, wide = torch.bfloat16, torch.float32
    state = [draw(50, 0, wide), draw(50, 1).to(narrow), draw(50, 2).abs().to(narrow)]
    expected = [tensor.double() for tensor in state]
    grad = draw(50, 3).to(narrow)
    step(ops, state, grad, 2)
    step(reference, expected, grad.double(), 2)
    FP32_REF.check(state[0], expected[0], "weights")
    EXACT.check(state[1], expected[1].float().to(narrow), "first moment")
    EXACT.check(state[2], expected[2].float().to(narrow), "second moment")


@BACKENDS
def test_empty_buffers(ops) -> None:
    step(ops, [torch.zeros(0), torch.zeros(0), torch.zeros(0)], torch.zeros(0), 1)
    EXACT.check(ops.sum_of_squares(torch.zeros(0)), 0.0)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 1023, 1024, 5000])
def test_sum_of_squares_is_computed_in_fp32(ops, size: int, dtype: torch.dtype) -> None:
    flat = draw(size, 0, dtype)
    out = ops.sum_of_squares(flat)
    assert out.dtype is torch.float32 and out.shape == ()
    FP32_REF.check(out, math.fsum(float(x) ** 2 for x in flat))


@BACKENDS
def test_sum_of_squares_of_long_buffers_is_accurate(ops) -> None:
    flat = torch.full((4_000_003,), 0.1, dtype=torch.float32)
    FP32_REF.check(ops.sum_of_squares(flat), 4_000_003 * float(flat[0].double()) ** 2)


@pytest.mark.parametrize("ops", [reference, triton], ids=["reference", "triton"])
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_contributions_are_added_in_rank_order(ops, rank: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Large and small values make the sum depend on its order; rows of the other ranks are not adjacent."""
    total, comm = dtypes
    parts = [(draw(5000, seed) * scale).to(comm) for seed, scale in enumerate((1e8, 1.0, 1e8))]
    memory = torch.full((2, 5100), math.nan, dtype=comm)
    memory[:, :5000] = torch.stack(parts[:rank] + parts[rank + 1 :])
    expected = parts[0].to(total) + parts[1].to(total) + parts[2].to(total)
    out = torch.full((5000,), math.nan, dtype=total)
    for number in (1, 2):
        ops.sum_contributions_(out, parts[rank], memory[:, :5000], rank, accumulate=number > 1)
        EXACT.check(out, expected if number == 1 else expected + expected)
    ops.sum_contributions_(out[:0], parts[rank][:0], memory[:, :0], rank, accumulate=True)


@pytest.mark.parametrize("ops", [reference, triton], ids=["reference", "triton"])
def test_contributions_are_rounded_once(ops) -> None:
    """1 + 2^-8 + 2^-8 in bf16: each of the two small values would be lost if the sum were rounded in between."""
    out, small = torch.ones(3).bfloat16(), torch.full((1, 3), 2.0**-8).bfloat16()
    ops.sum_contributions_(out, small[0], small, 0, accumulate=True)
    EXACT.check(out, torch.full((3,), 1.0078125).bfloat16())
