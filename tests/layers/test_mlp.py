"""Dense MLP against its formula, one token at a time."""

import pytest
import torch

from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.model.init import init_parameters
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.modules import module_of
from tests.helpers.tiny_models import HIDDEN, UNIT_GAIN, mlp_config, randn
from tests.helpers.tolerances import FP64_REF
from tests.moe.oracle import ACTIVATIONS, loop_mlp

CASES = {
    **{kind: ActivationConfig(kind=kind) for kind in ACTIVATIONS},
    "SwiGLU": ActivationConfig(kind="silu", gated=True),
    "GeGLU": ActivationConfig(kind="gelu", gated=True),
    "quick-GeGLU clamped with offset": ActivationConfig(kind="quick_gelu", gated=True, clamp=0.7, linear_offset=1.0),
}


@pytest.mark.parametrize("activation", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("bias", [False, True])
def test_an_mlp_equals_its_formula_in_values_and_gradients(activation, bias):
    config = mlp_config(activation=activation, bias=bias)
    module = module_of(config, ParallelContext.single())
    init_parameters(module, 5, UNIT_GAIN)
    weights = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    x, oracle_x = randn(4, 2, HIDDEN).requires_grad_(), randn(4, 2, HIDDEN).requires_grad_()
    probe = randn(4, 2, HIDDEN, seed=2)

    out = module(x)
    stacks = ("linear_fc1", "linear_fc2")
    matrices, biases = ([weights.get(f"{name}.{kind}") for name in stacks] for kind in ("weight", "bias"))
    tokens = [loop_mlp(v, matrices, biases, activation) for v in oracle_x.flatten(0, 1)]
    expected = torch.stack(tokens).view_as(out)
    (out * probe).sum().backward()
    (expected * probe).sum().backward()

    FP64_REF.check(out, expected, "output")
    FP64_REF.check(x.grad, oracle_x.grad, "input gradient")
    actual = {name: p.grad for name, p in module.named_parameters()}
    FP64_REF.check_all(actual, {name: w.grad for name, w in weights.items()}, "gradients")


def test_tensor_parallelism_shards_gate_and_up_separately():
    module = module_of(mlp_config(bias=True), ParallelContext.single())
    for parameter in (module.linear_fc1.weight, module.linear_fc1.bias):
        assert (parameter.meta.tp_dim, parameter.meta.splits) == (0, (20, 20))
    assert module.linear_fc2.weight.meta.tp_dim == 1
    assert module.linear_fc2.bias.meta.tp_dim is None
