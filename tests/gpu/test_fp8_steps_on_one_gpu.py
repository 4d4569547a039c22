"""Training steps with blockwise FP8 GEMMs on one GPU.

Steps are compared with the recipe on dequantised operands, run without host-device synchronisation, are bitwise
reproducible, and can be captured in CUDA graphs.
"""

import os
from itertools import compress

import pytest
import torch
from torch import Tensor

from arguments.read import read_plan
from benchmarks.harness.timed_run import TimedRun
from megatron_moe.data.tokenizer import vocab_size_of
from megatron_moe.kernels.backends.hopper import fp8_linear
from megatron_moe.kernels.backends.triton import quantize
from megatron_moe.kernels.reference import backend as reference
from tests.gpu.host_sync import no_host_sync
from tests.gpu.test_hopper_on_one_gpu import draw
from tests.gpu.test_step_on_one_gpu import LAYERS, SMALL
from tests.helpers.tolerances import EXACT, FP8_KERNEL, FP8_SUM

pytestmark = pytest.mark.gpu1

FP8 = "--fp8-format e4m3 --fp8-recipe blockwise"
MOST_NOISE, LEAST_LIMIT = 2.0, 0.02
"""Limit of the relative error of a gradient, in the Frobenius norm: a multiple of the noise, and a lower
bound of the limit."""


def start(recipe: str, *more: str, precision: str = FP8) -> TimedRun:
    flags = ["--recipe", recipe, *SMALL.split(), *LAYERS[recipe].split(), *precision.split(), *more]
    plan = read_plan(flags, os.environ, vocab_size_of=vocab_size_of)
    os.environ.update(plan.environment)
    return TimedRun(plan)


def gradients(recipe: str, *more: str) -> dict[str, Tensor]:
    run = start(recipe, "--seed", "3", *more)
    run.step()
    found = {each.name: each.main_grad.clone() for each in run.trainer.buffers.main_grads}
    run.close()
    return found


@pytest.mark.parametrize("weight_grad", ["--no-fp8-wgrad", "--fp8-wgrad"])
@pytest.mark.parametrize("recipe", LAYERS)
def test_gradients_match_dequantised_operands(recipe: str, weight_grad: str) -> None:
    """Another order of sums changes bf16 values, whose FP8 values then differ by up to 1/8. This noise is measured by
    emulated runs with other kernels for all other ops."""
    emulated = "--emulate-low-precision"
    expected = gradients(recipe, weight_grad, emulated)
    noise = differences(gradients(recipe, weight_grad, emulated, "--kernel-backend", "reference"), expected)
    errors = differences(gradients(recipe, weight_grad), expected)
    table = [f"{name}: {error:.3e}, noise {noise[name]:.3e}" for name, error in errors.items()]
    print("\n".join(table))
    exceeded = [error > max(MOST_NOISE * noise[name], LEAST_LIMIT) for name, error in errors.items()]
    assert not any(exceeded), "\n".join(compress(table, exceeded))


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative difference of each gradient in the Frobenius norm."""
    return {name: ((found[name] - grad).norm() / grad.norm()).item() for name, grad in expected.items()}


@pytest.mark.parametrize(
    "precision",
    [f"{FP8} --no-fp8-wgrad", "--fp4-format e2m1 --emulate-low-precision"],
    ids=["blockwise", "nvfp4, emulated"],
)
def test_steps_run_without_host_sync(precision: str) -> None:
    run = start("m8", precision=precision)
    for _ in range(2):
        run.step()
    batches = run.loader.next_step()
    with no_host_sync():
        outcome = run.trainer.step(batches, run.state)
    assert torch.isfinite(outcome.loss)
    run.close()


@pytest.mark.parametrize(
    "more",
    [(), ("--cuda-graph-impl", "full_iteration", "--cuda-graph-warmup-steps", "2"), ("--overlap-optimizer-step",)],
    ids=["same", "whole steps as graphs", "updates in the forward"],
)
def test_runs_are_bitwise_reproducible(more: tuple[str, ...]) -> None:
    weights = []
    for others in ((), more):
        run = start("m8", "--no-fp8-wgrad", "--deterministic-mode", *others)
        for _ in range(5):
            run.step()
        run.trainer.optimizer.finish_gather()
        weights.append({name: value.detach().clone() for name, value in run.trainer.model.named_parameters()})
        run.close()
    for name, value in weights[0].items():
        EXACT.check(weights[1][name], value, name)


@pytest.mark.parametrize("shape", [(256, 512, 384), (4096, 2048, 576), (130, 256, 272), (132, 1408, 272)])
def test_dense_gemms(shape: tuple[int, int, int]) -> None:
    """Rows, inputs and outputs that cuBLAS supports, and a number of rows that it does not."""
    rows, inputs, outputs = shape
    x, grad, weight = draw(rows, inputs, seed=1), draw(rows, outputs, seed=2), draw(outputs, inputs, seed=3)
    x_q, grad_q = (quantize.quantize_rows(each) for each in (x, grad))
    weight_q = quantize.quantize_weight(weight)
    FP8_KERNEL.check(
        fp8_linear.quantized_linear_forward(x_q, weight_q, None).double(),
        reference.quantized_linear_forward(x_q, weight_q, None).double(),
        "forward",
    )
    FP8_KERNEL.check(
        fp8_linear.quantized_linear_input_grad(grad_q, weight_q).double(),
        reference.quantized_linear_input_grad(grad_q, weight_q).double(),
        "input gradient",
    )


@pytest.mark.parametrize("shape", [(256, 512, 384), (4096, 2048, 576), (144, 256, 272)])
def test_dense_weight_gradients(shape: tuple[int, int, int]) -> None:
    rows, inputs, outputs = shape
    x, grad = draw(rows, inputs, seed=1), draw(rows, outputs, seed=2)
    x_q, grad_q = (quantize.quantize_rows(each, rowwise=False, columnwise=True) for each in (x, grad))
    found, expected = (torch.ones(outputs, inputs, device="cuda") for _ in range(2))
    fp8_linear.quantized_linear_weight_grad(grad_q, x_q, found, True)
    reference.quantized_linear_weight_grad(grad_q, x_q, expected, True)
    FP8_SUM.check(found.double(), expected.double(), "weight gradient")
