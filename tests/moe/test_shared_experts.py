"""Shared experts against their formulas."""

import pytest
import torch

from megatron_moe.config.moe import ActivationConfig, MLPConfig, SharedExpertsConfig
from megatron_moe.kernels import reference
from megatron_moe.moe.shared_experts import SharedExperts
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.tolerances import FP64_REF
from tests.moe.routings import draw, fill

HIDDEN, FFN = 4, 3


def make(*, gate: bool, gated: bool = True) -> SharedExperts:
    mlp = MLPConfig(hidden_size=HIDDEN, ffn_hidden_size=FFN, activation=ActivationConfig(kind="silu", gated=gated))
    shared = SharedExperts(SharedExpertsConfig(mlp=mlp, gate=gate), ParallelContext.single(), reference.bundle())
    fill(shared)
    return shared


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("gate", [False, True])
def test_shared_experts_are_an_mlp_times_the_gate_of_the_token(gate: bool, gated: bool) -> None:
    shared, hidden = make(gate=gate, gated=gated), draw(3, 2, HIDDEN)
    wide = hidden @ shared.linear_fc1.weight.T
    inner = wide[..., :FFN] * torch.sigmoid(wide[..., :FFN])
    if gated:
        inner = inner * wide[..., FFN:]
    expected = inner @ shared.linear_fc2.weight.T
    if gate:
        expected = expected / (1 + torch.exp(-(hidden * shared.gate_weight[0]).sum(-1, keepdim=True)))
    FP64_REF.check(shared(hidden), expected)


@pytest.mark.parametrize("gate", [False, True])
def test_shared_experts_have_the_gradients_of_finite_differences(gate: bool) -> None:
    shared = make(gate=gate)
    names, parameters = zip(*shared.named_parameters(), strict=True)

    def run(hidden, *values):
        return torch.func.functional_call(shared, dict(zip(names, values, strict=True)), hidden)

    assert torch.autograd.gradcheck(run, (draw(3, 1, HIDDEN).requires_grad_(), *parameters))


def test_shared_experts_are_named_and_placed_as_attention_parameters() -> None:
    metas = {name: (tuple(p.shape), p.meta) for name, p in make(gate=True).named_parameters()}
    assert {name: shape for name, (shape, _) in metas.items()} == {
        "gate_weight": (1, HIDDEN),
        "linear_fc1.weight": (2 * FFN, HIDDEN),
        "linear_fc2.weight": (HIDDEN, FFN),
    }
    assert all(meta.grid == "attention" and meta.num_experts is None for _, meta in metas.values())
    assert metas["gate_weight"][1].role == "gate" and make(gate=False).gate_weight is None
    assert metas["linear_fc1.weight"][1].splits == (FFN, FFN)
    assert metas["linear_fc2.weight"][1].init == "output"


def test_biases_of_shared_experts_are_refused() -> None:
    mlp = MLPConfig(hidden_size=HIDDEN, ffn_hidden_size=FFN, activation=ActivationConfig(), bias=True)
    with pytest.raises(AssertionError, match="no biases"):
        SharedExperts(SharedExpertsConfig(mlp=mlp), ParallelContext.single(), reference.bundle())
