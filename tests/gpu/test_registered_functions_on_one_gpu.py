"""Registered functions without a fused kernel: the Triton ops compute them in plain torch, without host-device
synchronisation.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_moe.config.imports import import_file
from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.config.moe import RouterConfig
from megatron_moe.kernels.backends.triton import activation, quantize
from megatron_moe.kernels.backends.triton.routing.op import route
from megatron_moe.kernels.reference import backend as reference
from tests.gpu.host_sync import no_host_sync
from tests.gpu.test_hopper_on_one_gpu import draw
from tests.helpers.tolerances import BF16_KERNEL, FP32_REF

pytestmark = pytest.mark.gpu1

EXAMPLES = Path(__file__).parents[1] / "examples"
MISH = ActivationConfig(kind="mish", gated=True)


@pytest.fixture(autouse=True)
def examples_without_synchronisation() -> Iterator[None]:
    for name in ("score_function", "activation"):
        import_file(str(EXAMPLES / f"{name}.py"))
    with no_host_sync():
        yield


def test_routing_with_a_registered_score_function() -> None:
    config = RouterConfig(hidden_size=8, num_experts=64, topk=4, score_function="softsign", scaling_factor=2.5)
    logits_TE = torch.linspace(-3, 3, 256 * 64, device="cuda").sin().view(256, 64)
    found = []
    for function in (route, reference.route):
        leaf_TE = logits_TE.clone().requires_grad_()
        routed = function(leaf_TE, None, config, balance_sets=2, z=True)
        assert routed.balance is not None and routed.z_sum is not None
        loss = (routed.probs_TK.square().sum() + routed.balance.scores_GE.square().sum()) + routed.z_sum
        loss.backward()
        found.append((routed.probs_TK, routed.ids_TK.float(), routed.counts_E.float(), leaf_TE.grad))
    torch.cuda.set_sync_debug_mode("default")
    for got, expected in zip(*found, strict=True):
        FP32_REF.check(got, expected, "routing")


def test_fp8_results_of_a_registered_activation() -> None:
    x_RF, grad_RF = draw(256, 512, seed=1), draw(256, 256, seed=2)
    probs_R = torch.rand(256, device="cuda")
    fmt = quantize.E4M3
    out = activation.quantize_activation(x_RF, probs_R, MISH, fmt)
    grads = activation.quantize_activation_grad(grad_RF, x_RF, probs_R, MISH, fmt)
    expected = reference.quantize_activation_grad(grad_RF, x_RF, probs_R, MISH, fmt)
    plain_RF = reference.activation(x_RF, probs_R, MISH)
    torch.cuda.set_sync_debug_mode("default")
    found, wanted = (each.row_copy.data.view(torch.uint8) for each in (out, quantize.quantize_rows(plain_RF, fmt)))
    assert torch.equal(found, wanted)
    BF16_KERNEL.check(grads.grad_x_RF, expected.grad_x_RF, "gradient")
    BF16_KERNEL.check(grads.grad_probs_R, expected.grad_probs_R, "gradient of the probabilities")
    BF16_KERNEL.check(grads.out_RF, expected.out_RF, "result")
