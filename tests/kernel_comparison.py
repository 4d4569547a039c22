"""A backend's op against the reference, result and gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_moe.kernels import reference
from megatron_moe.kernels.ops import AdamWStep, Routed
from megatron_moe.specs.moe import RouterSpec
from tests.tolerances import BF16_KERNEL, FP32_REF, Tolerance

REFERENCE = reference.bundle()
BARS = {torch.float32: FP32_REF, torch.bfloat16: BF16_KERNEL}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def adamw_step(
    number: int,
    *,
    scale: float | Tensor = 0.5,
    proceed: bool = True,
    device: torch.device | str = "cpu",
    **numbers: float,
) -> AdamWStep:
    """Update `number`, with the numbers of a usual group where others are not given."""
    usual = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    return AdamWStep(
        **{**usual, **numbers},
        step=torch.tensor(number, device=device),
        grad_scale=torch.as_tensor(scale, device=device),
        proceed=torch.tensor(proceed, device=device),
    )


def with_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Result and input gradients, for a fixed incoming gradient."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    out = function(*leaves)
    grads = torch.autograd.grad(out, leaves, draw(*out.shape, seed=99).to(out.dtype))
    return [out.detach(), *grads]


def compare(
    kernels: Any, op: Callable[[Any], Callable[..., Tensor]], inputs: Sequence[Tensor], dtype: torch.dtype
) -> None:
    """`kernels` in `dtype` against the reference in fp64 on the same rounded inputs. In bf16 it may also be off by
    twice what the reference itself is off in bf16."""
    rounded = [x.to(dtype) for x in inputs]
    actual = with_gradients(op(kernels), rounded, dtype)
    exact = with_gradients(op(REFERENCE), rounded, torch.float64)
    plain = with_gradients(op(REFERENCE), rounded, dtype)
    for number, (a, e, p) in enumerate(zip(actual, exact, plain, strict=True)):
        what = "result" if number == 0 else f"gradient {number}"
        assert a.dtype is p.dtype, f"{what}: {a.dtype}, the contract says {p.dtype}"
        slack = 2 * float((p.double() - e).abs().max()) if e.numel() else 0.0
        bar = BARS[dtype]
        Tolerance(bar.rtol, max(bar.atol, slack), bar.why).check(a, e, what)


def differentiable(routed: Routed) -> list[Tensor]:
    """Weights, sums of scores and sum of squares, as far as they were asked for."""
    scores_GE = None if routed.balance is None else routed.balance.scores_GE
    return [part for part in (routed.probs_TK, scores_GE, routed.z_sum) if part is not None]


def route_and_pull(
    kernels: Any, logits_TE: Tensor, bias_E: Tensor | None, spec: RouterSpec, *, only: int | None = None, **fields: Any
) -> tuple[Routed, Tensor]:
    """What is routed, and the gradient of the logits for fixed incoming gradients, of one result alone if told."""
    leaf = logits_TE.detach().requires_grad_()
    routed = kernels.route(leaf, bias_E, spec, **fields)
    results = differentiable(routed)
    grads = [draw(*x.shape, seed=90 + number).to(x) for number, x in enumerate(results)]
    if only is not None:
        results, grads = [results[only]], [grads[only]]
    (grad,) = torch.autograd.grad(results, leaf, grads)
    return routed, grad
