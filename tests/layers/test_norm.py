"""RMSNorm and LayerNorm against the formula of one vector."""

from dataclasses import replace

import pytest
import torch

from megatron_moe.config.attention import NormConfig
from megatron_moe.config.model import InitConfig
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.layers.norm import Norm
from megatron_moe.model.init import init_parameters
from megatron_moe.parallel.context import ParallelContext
from tests.helpers import naive_layers
from tests.helpers.tiny_models import UNIT_GAIN, randn
from tests.helpers.tolerances import EXACT, FP64_REF


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_norm_equals_its_formula_in_values_and_gradients(kind, zero_centered):
    config = NormConfig(kind=kind, eps=1e-3, zero_centered=zero_centered)
    module = Norm(config, 10, ParallelContext.single(), reference.bundle())
    init_parameters(module, 5, UNIT_GAIN)
    weights = {f"norm.{name}": p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    x, oracle_x, probe = randn(4, 3, 10).requires_grad_(), randn(4, 3, 10).requires_grad_(), randn(4, 3, 10, seed=2)

    out = module(x)
    expected = torch.stack([naive_layers.norm(v, config, weights, "norm") for v in oracle_x.flatten(0, 1)]).view_as(out)
    (out * probe).sum().backward()
    (expected * probe).sum().backward()

    FP64_REF.check(out, expected, "output")
    FP64_REF.check(x.grad, oracle_x.grad, "input gradient")
    for name, parameter in module.named_parameters():
        FP64_REF.check(parameter.grad, weights[f"norm.{name}"].grad, name)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_a_zero_centred_norm_starts_as_the_plain_one(kind):
    plain = NormConfig(kind=kind)
    outputs = []
    for config in (plain, replace(plain, zero_centered=True)):
        module = Norm(config, 10, ParallelContext.single(), reference.bundle())
        init_parameters(module, 5, InitConfig())
        outputs.append(module(randn(4, 10)))
    EXACT.check(outputs[1], outputs[0], "output")
    assert not module.weight.any(), "a zero-centred weight starts at 0"
