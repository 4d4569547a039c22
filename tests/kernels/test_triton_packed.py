"""AdamW on packed state as a Triton kernel, interpreted, against plain torch."""

from itertools import product

import pytest
import torch
from torch import Tensor

from megatron_moe.kernels.backends.triton import backend as triton_kernels
from megatron_moe.kernels.ops import AdamWState
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.precision.optimizer_state import PackedState, pack, unpack
from tests.helpers.kernel_comparison import adamw_step, draw
from tests.helpers.tolerances import FP32_REF

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # numpy, of the interpreter
CPU = torch.device("cpu")
FORMATS = list(product(("plain", "remainder", "fp16"), ("plain", "fp16", "fp8"), ("plain", "fp16", "fp8")))


def make(formats: tuple[str, str, str], size: int) -> dict[str, PackedState | Tensor]:
    """Creates state as it is after some steps."""
    weights = draw(size).bfloat16()
    states = [
        PackedState.zeros(size, name, torch.float32, CPU, root=root and name != "plain")
        for name, root in zip(formats, (False, False, True), strict=True)
    ]
    numbers = (weights.float() + 1e-3 * draw(size, seed=1).float() * weights, draw(size, seed=2).float())
    for state, values in zip(states, (*numbers, draw(size, seed=3).float().square()), strict=True):
        for part, new in zip(state.parts, pack(values, state, weights).parts, strict=True):
            part.copy_(new)
    return {"master": states[0], "exp_avg": states[1], "exp_avg_sq": states[2], "weights": weights}


def step(ops, state: dict[str, PackedState | Tensor], size: int, number: int = 7, *, apply_update: bool = True) -> None:
    grad = draw(size, seed=4).float()
    if not apply_update:
        grad[0] = torch.nan
    *states, weights = state.values()
    ops.adamw_packed_(
        AdamWState(*states), grad, adamw_step(number, apply_update=apply_update, beta2=0.99), weights, first=300
    )


def numbers(state: dict[str, PackedState | Tensor]) -> dict[str, Tensor]:
    weights = state["weights"]
    return {name: unpack(each, weights) if isinstance(each, PackedState) else each for name, each in state.items()}


@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_steps_match_the_reference(formats: tuple[str, str, str]) -> None:
    for size, number in ((1, 1), (130, 100_000), (2500, 7)):
        mine, theirs = make(formats, size), make(formats, size)
        step(triton_kernels, mine, size, number)
        step(reference, theirs, size, number)
        got, expected = numbers(mine), numbers(theirs)
        for name, kind in zip(("master", "exp_avg", "exp_avg_sq"), formats, strict=True):
            # numpy's roots and torch's powers may differ in the last digit, so a number may be rounded in the other
            # direction
            differ = got[name] != expected[name]
            if kind in ("fp16", "fp8"):
                assert float(differ.float().mean()) < 0.01, f"{name} of {size}: {int(differ.sum())} differ"
                differ_little = (got[name] - expected[name]).abs() <= 0.13 * expected[name].abs() + 1e-6
                assert bool(differ_little.all()), f"{name} of {size}"
            else:
                FP32_REF.check(got[name], expected[name], f"{name} of {size}")
        assert float((got["weights"] != expected["weights"]).float().mean()) < 0.01


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("ops", [reference, triton_kernels], ids=["reference", "triton"])
@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_nonfinite_values_set_the_flag_in_all_formats(formats: tuple[str, str, str], ops) -> None:
    size = 1300
    for grad, expected in ((1.0, False), (0.0, True), (1e20, True)):
        state = make(formats, size)
        grads, move = torch.ones(size), adamw_step(1, scale=1.0, eps=0.0, beta1=0.0, beta2=0.0)
        grads[-1] = grad
        *states, weights = state.values()
        ops.adamw_packed_(AdamWState(*states), grads, move, weights)
        assert bool(move.nonfinite) == expected, f"a gradient of {grad}"
