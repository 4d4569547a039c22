"""The router on one GPU: same values as on the CPU, without host-device synchronisation."""

from contextlib import nullcontext

import pytest
import torch

from megatron_moe.config.moe import CapacityConfig
from megatron_moe.data.batch import ForcedRouting
from megatron_moe.kernels.backends.triton import backend as triton_kernels
from megatron_moe.kernels.kernel_set import OPS, KernelSet
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.moe.balancing import update_routers
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.rng import RNGKey
from tests.gpu.host_sync import no_host_sync
from tests.helpers.tolerances import EXACT, FP64_REF
from tests.moe.routers import make_hidden, make_mb, make_router

pytestmark = pytest.mark.gpu1

LOSSES = {
    "balancing": ("aux_loss", "seq_aux_loss", "global_aux_loss"),
    "aux_loss_coeffs": (0.3, 0.2, 0.1),
    "z_loss_coeff": 0.05,
}
BIASED = {"score_function": "sigmoid", "expert_bias": True, "num_groups": 4, "group_topk": 2, "scaling_factor": 2.5}
CASES = [
    ({**LOSSES}, None),
    ({**LOSSES, **BIASED}, None),
    ({**LOSSES, "linear_bias": True}, CapacityConfig(factor=0.75)),
    ({**LOSSES}, CapacityConfig(factor=0.75, policy="position", pad=True)),
    ({"balancing": ("sinkhorn",)}, None),
    ({"balancing": ("quantile_balancing",)}, None),
    ({"balancing": ("expert_choice",)}, None),
]
HASHED = {"score_function": "sqrtsoftplus", "hash_vocab_size": 50, "scaling_factor": 1.5}


def _step(device: str, fields: dict, capacity: CapacityConfig | None, *, ours: bool = False, given: bool = False):
    """Routes a microbatch with padding and updates the router; returns routing, metrics, router and input gradient.

    Args:
        ours: whether to use the Triton kernels, which also support fp64, although no run uses them in fp64.
        given: whether the experts of two of three tokens are given.
    """
    ctx = ParallelContext.single(device=device)
    router = make_router(ctx=ctx, capacity=capacity, **fields)
    if ours:
        plain = {op: getattr(router.kernels, op) for op in OPS}
        router.kernels = KernelSet.of({**plain, "route": triton_kernels.route}, ())
    hidden = make_hidden(64, 2).detach().to(device).requires_grad_()
    valid = torch.arange(128, device=device).view(2, 64) % 5 > 0
    scale = torch.full((), 0.5, device=device)
    apply_update = torch.ones((), dtype=torch.bool, device=device)
    forced = None
    if given:
        ids_TK = (torch.arange(128, device=device)[:, None] + torch.arange(2, device=device)) % 8
        forced = ForcedRouting(ids={3: ids_TK}, forced_T=torch.arange(128, device=device) % 3 > 0)
    mb = make_mb(
        hidden,
        valid_BS=valid,
        ids_BS=torch.arange(128, device=device).view(2, 64) * 7 % 50,
        metrics=MetricAccumulator(),
        aux_loss_scale=scale,
        forced_routing=forced,
    )
    with nullcontext() if device == "cpu" else no_host_sync():
        routing = router(hidden, mb)
        weights = routing.probs_TE if routing.probs_TK is None else routing.probs_TK
        weights.square().sum().backward()
        update_routers([router], ctx, apply_update=apply_update)
    return routing, mb.metrics, router, hidden.grad


def _check_against_cpu(fields: dict, capacity: CapacityConfig | None, *, ours: bool, given: bool = False) -> None:
    routing, metrics, router, gradient = _step("cuda", fields, capacity, ours=ours, given=given)
    expected, expected_metrics, expected_router, expected_gradient = _step("cpu", fields, capacity, given=given)
    for name in ("ids_TK", "map_TE", "counts_E", "chosen_TK"):
        if getattr(expected, name) is not None:
            EXACT.check(getattr(routing, name), getattr(expected, name), name)
    FP64_REF.check(gradient, expected_gradient, "input gradient")
    FP64_REF.check(router.weight.grad, expected_router.weight.grad, "gate gradient")
    entries = metrics.take_all().entries
    for key, entry in expected_metrics.take_all().entries.items():
        FP64_REF.check(entries[key].value, entry.value, str(key))
    for name, buffer in expected_router.named_buffers():
        FP64_REF.check(dict(router.named_buffers())[name], buffer, name)


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize(("fields", "capacity"), CASES)
def test_router_matches_the_cpu_without_host_sync(fields, capacity, ours):
    _check_against_cpu(fields, capacity, ours=ours)


@pytest.mark.parametrize("ours", [False, True])
def test_hash_layers_match_the_cpu_without_host_sync(ours):
    _check_against_cpu(HASHED, None, ours=ours)


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize(("fields", "capacity"), CASES[:4])
def test_given_experts_of_some_tokens_match_the_cpu_without_host_sync(fields, capacity, ours):
    _check_against_cpu(fields, capacity, ours=ours, given=True)


def test_forced_logits_and_jitter_without_host_sync():
    router = make_router(ctx=ParallelContext.single(device="cuda"), force_biased=1.0, input_jitter_eps=0.1)
    hidden = make_hidden(64, 2).detach().cuda().requires_grad_()
    mb = make_mb(hidden, rng=RNGKey(1, 2, 3))
    with no_host_sync():
        router(hidden, mb).probs_TK[:, 0].sum().backward()
    assert router.weight.grad.abs().max() > 0
