"""Activations and the loss of the reference against formulas written out with scalars."""

import math

import pytest
import torch
from torch import Tensor

from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.kernels.reference import backend as reference
from tests.helpers.tolerances import EXACT, FP64_REF

KERNELS = reference.bundle()

FORMULAS = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x / 2 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + math.exp(-1.702 * x)),
    "relu": lambda x: max(x, 0.0),
    "squared_relu": lambda x: max(x, 0.0) ** 2,
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def table(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("kind", FORMULAS)
def test_ungated_activations_follow_their_formulas(kind: str) -> None:
    x = draw(3, 4)
    expected = table([[FORMULAS[kind](float(v)) for v in row] for row in x])
    FP64_REF.check(KERNELS.activation(x, None, ActivationConfig(kind=kind)), expected)


@pytest.mark.parametrize("clamp", [None, 0.5])
@pytest.mark.parametrize("kind", FORMULAS)
def test_gated_activation_clamps_then_multiplies_then_weighs(kind: str, clamp: float | None) -> None:
    x, probs = draw(3, 8), draw(3, seed=1).abs()
    config = ActivationConfig(kind=kind, gated=True, clamp=clamp, linear_offset=1.0)
    limit = math.inf if clamp is None else clamp
    expected = [
        [
            FORMULAS[kind](min(float(x[r, f]), limit))
            * (min(max(float(x[r, 4 + f]), -limit), limit) + 1.0)
            * float(probs[r])
            for f in range(4)
        ]
        for r in range(3)
    ]
    FP64_REF.check(KERNELS.activation(x, probs, config), table(expected))


@pytest.mark.parametrize("kind", FORMULAS)
@pytest.mark.parametrize("gated", [False, True])
def test_activation_has_the_gradients_of_finite_differences(kind: str, gated: bool) -> None:
    config = ActivationConfig(kind=kind, gated=gated, clamp=0.9 if gated else None)
    x, probs = draw(3, 4).requires_grad_(), draw(3, seed=1).abs().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, p: KERNELS.activation(x, p, config), (x, probs))


@pytest.mark.parametrize("gated", [False, True])
def test_rows_without_probability_have_zero_results_and_gradients(gated: bool) -> None:
    x, probs = draw(4, 6), torch.tensor([0.5, 0.0, 2.0, 0.0], dtype=torch.float64)
    x[1], x[3] = torch.nan, torch.inf
    x.requires_grad_(), probs.requires_grad_()
    out = KERNELS.activation(x, probs, ActivationConfig(kind="silu", gated=gated, linear_offset=1.0 if gated else 0.0))
    grad_x, grad_probs = torch.autograd.grad(out.sum(), (x, probs))
    empty = [1, 3]
    for what, value in (("result", out[empty]), ("grad of x", grad_x[empty]), ("grad of probs", grad_probs[empty])):
        EXACT.check(value, torch.zeros_like(value), what)
    assert out[[0, 2]].isfinite().all() and grad_x[[0, 2]].abs().min() > 0


def test_cross_entropy_is_the_negative_log_likelihood_of_the_label() -> None:
    logits, labels = draw(3, 7), torch.tensor([0, 6, 3])
    expected = [
        -math.log(math.exp(float(row[label])) / sum(math.exp(float(x)) for x in row))
        for row, label in zip(logits, labels, strict=True)
    ]
    FP64_REF.check(KERNELS.cross_entropy(logits, labels), expected)
    assert torch.autograd.gradcheck(lambda x: KERNELS.cross_entropy(x, labels), (logits.requires_grad_(),))


def test_cross_entropy_of_large_and_bf16_logits_is_finite_in_fp32() -> None:
    logits = torch.tensor([[3000.0, 0.0], [0.0, 3000.0]], dtype=torch.bfloat16)
    out = KERNELS.cross_entropy(logits, torch.tensor([0, 0]))
    assert out.dtype is torch.float32
    EXACT.check(out, torch.tensor([0.0, logits[1, 1].item()]))
