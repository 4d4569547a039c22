"""Comparison of a backend's op with the reference: results and gradients."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_moe.config.moe import RouterConfig
from megatron_moe.kernels.kernel_set import OPS
from megatron_moe.kernels.ops import AdamWStep, RoutedTokens
from megatron_moe.kernels.reference import backend as reference
from tests.helpers.tolerances import BF16_KERNEL, EXACT, FP32_REF, Tolerance

REFERENCE = reference.bundle()
BARS = {torch.float32: FP32_REF, torch.bfloat16: BF16_KERNEL}


def provided_ops(backend: ModuleType) -> tuple[str, ...]:
    """Ops that an imported backend defines or imports."""
    return tuple(op for op in OPS if hasattr(backend, op))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def adamw_step(
    number: int,
    *,
    scale: float | Tensor = 0.5,
    apply_update: bool = True,
    device: torch.device | str = "cpu",
    **numbers: float,
) -> AdamWStep:
    """Scalars of update `number`, with usual values unless given."""
    usual = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    return AdamWStep(
        **{**usual, **numbers},
        step=torch.tensor(number, device=device),
        grad_scale=torch.as_tensor(scale, device=device),
        apply_update=torch.tensor(apply_update, device=device),
        nonfinite=torch.tensor(False, device=device),
    )


class Overflow(NamedTuple):
    """AdamW scalars of one element for which a step stores a non-finite number."""

    master: float
    exp_avg_sq: float
    grad: float
    eps: float


OVERFLOWS: Mapping[str, Overflow] = MappingProxyType(
    {
        "weight": Overflow(master=1.0, exp_avg_sq=0.0, grad=0.0, eps=0.0),
        "second moment alone": Overflow(master=1.0, exp_avg_sq=1.0, grad=1e20, eps=1e-8),
        "rounded weight alone": Overflow(master=3.4e38, exp_avg_sq=1.0, grad=1.0, eps=1e-8),
    }
)


def check_nonfinite_flag(ops: Any, what: str, device: torch.device | str = "cpu") -> None:
    """Checks that an applied step that stores one non-finite element sets the flag, and that no other step does."""
    size, case = 2500, OVERFLOWS[what]
    rounded = what == "rounded weight alone"
    for place in (0, size - 1):
        for bad, apply_update in ((True, True), (True, False), (False, True)):
            master, grad = draw(size).float().to(device), draw(size, seed=1).float().to(device)
            exp_avg, exp_avg_sq = torch.zeros(size, device=device), torch.ones(size, device=device)
            if bad:
                master[place], exp_avg_sq[place], grad[place] = case.master, case.exp_avg_sq, case.grad
            weights = master.bfloat16() if rounded else None
            numbers = {"eps": case.eps, "lr": 1e-3, "weight_decay": 0.0}
            move = adamw_step(1, scale=1.0, apply_update=apply_update, device=device, **numbers)
            ops.adamw_(master, grad, exp_avg, exp_avg_sq, move, weights)
            assert bool(move.nonfinite) == (bad and apply_update), (
                f"{what} at {place}: bad {bad}, apply_update {apply_update}"
            )
            stored = [each for each in (master, exp_avg, exp_avg_sq, weights) if each is not None]
            if bad and apply_update:
                num_bad = sum(int((~each.isfinite()).sum()) for each in stored)
                # torch's fused CUDA kernel makes the weight NaN too when it divides by an infinite root
                assert num_bad == 1 or (num_bad == 2 and master.is_cuda), f"{num_bad} numbers are not finite"
            ops.adamw_(*(torch.ones(3, device=device) for _ in range(4)), move)
            assert bool(move.nonfinite) == (bad and apply_update), "the flag was reset, or set by finite numbers"


def with_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    """Computes result and input gradients for a fixed output gradient on `device`; returns them on the CPU."""
    leaves = [x.to(device, dtype, copy=True).requires_grad_() for x in inputs]  # a backward may overwrite its input
    out = function(*leaves)
    grads = torch.autograd.grad(out, leaves, draw(*out.shape, seed=99).to(out))
    return [x.cpu() for x in (out.detach(), *grads)]


def compare(
    kernels: Any,
    op: Callable[[Any], Callable[..., Tensor]],
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    """Checks `kernels` in `dtype` on `device` against the fp64 reference on the CPU, on the same rounded inputs. The
    error may be twice that of the reference in the same dtype and on the same device."""
    rounded = [x.to(dtype) for x in inputs]
    actual = with_gradients(op(kernels), rounded, dtype, device)
    exact = with_gradients(op(REFERENCE), rounded, torch.float64)
    plain = with_gradients(op(REFERENCE), rounded, dtype, device)
    for number, (a, e, p) in enumerate(zip(actual, exact, plain, strict=True)):
        what = "result" if number == 0 else f"gradient {number}"
        assert a.dtype is p.dtype, f"{what}: {a.dtype}, the contract says {p.dtype}"
        slack = 2 * float((p.double() - e).abs().max()) if e.numel() else 0.0
        bar = BARS[dtype]
        Tolerance(bar.rtol, max(bar.atol, slack), bar.why).check(a, e, what)


def differentiable(routed: RoutedTokens) -> list[Tensor]:
    """Differentiable results: probabilities, and if requested sums of scores and sum of squares."""
    scores_GE = None if routed.balance is None else routed.balance.scores_GE
    return [part for part in (routed.probs_TK, scores_GE, routed.z_sum) if part is not None]


def route_and_pull(
    kernels: Any,
    logits_TE: Tensor,
    bias_E: Tensor | None,
    config: RouterConfig,
    *,
    only: int | None = None,
    **fields: Any,
) -> tuple[RoutedTokens, Tensor]:
    """Returns the routing and the logits' gradient, for output gradients of all results or of result `only`."""
    leaf = logits_TE.detach().requires_grad_()
    routed = kernels.route(leaf, bias_E, config, **fields)
    results = differentiable(routed)
    grads = [draw(*x.shape, seed=90 + number).to(x) for number, x in enumerate(results)]
    if only is not None:
        results, grads = [results[only]], [grads[only]]
    (grad,) = torch.autograd.grad(results, leaf, grads)
    return routed, grad


def check_norm_with_input(kernels: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Checks that a norm that also returns its input adds the gradients of both as autograd would, bit for bit.

    On a GPU, this holds for dtypes narrower than fp32: in fp32, the compiler fuses the last multiplication and the sum
    into an FMA, which rounds once instead of twice.
    """
    tolerance = FP32_REF if device.type == "cuda" and dtype == torch.float32 else EXACT
    shapes = [(6, 40), (40,), (6, 40), (6, 40)]
    x, weight, *grads = (draw(*shape, seed=seed).to(device, dtype) for seed, shape in enumerate(shapes))
    leaves = x.requires_grad_(), weight.requires_grad_()
    total, normed = kernels.add_rms_norm(None, *leaves, 1e-6, False)
    plain = kernels.rms_norm(*leaves, 1e-6, False)
    fused = torch.autograd.grad((total, normed), leaves, grads)
    apart = torch.autograd.grad((x.view_as(x), plain), leaves, grads)
    for actual, expected in zip((total, normed, *fused), (x, plain, *apart), strict=True):
        tolerance.check(actual, expected)
