"""An upcycled MoE layer computes what the dense MLP computed, where that is exact, and says so where it is not."""

from dataclasses import replace

import pytest
import torch

from megatron_moe.kernels import reference
from megatron_moe.model.mlp import MLP
from megatron_moe.moe.layer import MoELayer
from megatron_moe.moe.upcycle import upcycle
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.specs.exitcodes import CheckpointProblem
from megatron_moe.specs.moe import (
    ActivationSpec,
    CapacitySpec,
    ExpertsSpec,
    MLPSpec,
    MoESpec,
    RouterSpec,
    SharedExpertsSpec,
)
from tests.moe.routers import make_meta
from tests.tolerances import FP32_MODEL, FP64_REF

HIDDEN, DENSE_FFN, EXPERTS = 8, 24, 8
SWIGLU = ActivationSpec(kind="silu", gated=True)
GPT_OSS = ActivationSpec(kind="quick_gelu", gated=True, clamp=0.5, linear_offset=1.0)


def _spec(granularity=1, *, activation=SWIGLU, bias=False, capacity=None, **router) -> MoESpec:
    return MoESpec(
        router=RouterSpec(**{"hidden_size": HIDDEN, "num_experts": EXPERTS, "topk": 2, **router}),
        experts=ExpertsSpec(
            num_experts=router.get("num_experts", EXPERTS),
            hidden_size=HIDDEN,
            ffn_hidden_size=DENSE_FFN // granularity,
            activation=activation,
            bias=bias,
        ),
        capacity=capacity,
    )


def _fill(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / parameter.shape[-1] ** 0.5)
    return module


def _dense(ctx: ParallelContext, spec: MoESpec) -> MLP:
    experts = spec.experts
    mlp = MLPSpec(hidden_size=HIDDEN, ffn_hidden_size=DENSE_FFN, activation=experts.activation, bias=experts.bias)
    return _fill(MLP(mlp, ctx, reference.bundle()), 1)


def _outputs(spec: MoESpec, dtype: torch.dtype = torch.float32):
    """(dense output, MoE output, why they may differ)."""
    ctx = ParallelContext.single(dtype=dtype)
    dense, layer = _dense(ctx, spec), _fill(MoELayer(spec, 0, ctx, reference.bundle()), 2)
    router = {name: value for name, value in layer.router.state_dict().items() if name != "expert_bias"}
    result = upcycle(dense.state_dict(), router, spec)
    missing, unexpected = layer.load_state_dict(result.weights, strict=False)
    assert not unexpected and set(missing) <= {"router.expert_bias"}
    hidden = torch.randn(6, 3, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)
    return dense(hidden), layer(hidden, make_meta(hidden)), result.inexact


EXACT_ROUTERS = [
    {},
    {"topk": 4},
    {"scaling_factor": 2.5, "linear_bias": True},
    {"score_function": "sigmoid", "expert_bias": True, "scaling_factor": 1.5},
    {"score_function": "sqrtsoftplus", "topk": 4},
    {"num_groups": 2, "group_topk": 1},
]


@pytest.mark.parametrize("router", EXACT_ROUTERS)
@pytest.mark.parametrize("granularity", [1, 2])
@pytest.mark.parametrize(
    "experts",
    [{}, {"activation": ActivationSpec(kind="squared_relu"), "bias": True}, {"activation": GPT_OSS, "bias": True}],
)
def test_moe_output_equals_the_dense_output(router, granularity, experts):
    dense, moe, inexact = _outputs(_spec(granularity, **experts, **router))
    assert inexact is None
    FP32_MODEL.check(moe, dense, "fp32 output")
    dense, moe, _ = _outputs(_spec(granularity, **experts, **router), torch.float64)
    FP64_REF.check(moe, dense, "fp64 output")


def test_fine_granularity_equals_the_dense_output():
    dense, moe, inexact = _outputs(_spec(4, topk=8))
    assert inexact is None
    FP32_MODEL.check(moe, dense, "output")
    dense, moe, inexact = _outputs(_spec(1, topk=1, score_function="softmax"))
    assert inexact is None
    FP32_MODEL.check(moe, dense, "top-1 after softmax over one choice")


@pytest.mark.parametrize(
    ("granularity", "fields", "why"),
    [
        (2, {"topk": 3}, "whole virtual groups"),
        (4, {"topk": 2}, "whole virtual groups"),
        (1, {"pre_softmax": True}, "before top-k"),
        (1, {"topk": 1, "score_function": "sigmoid"}, "not normalised"),
        (4, {"num_experts": 12, "topk": 4, "num_groups": 2, "group_topk": 1}, "expert groups of 6 cut"),
        (1, {"capacity": CapacitySpec(factor=0.5)}, "drop"),
        (1, {"balancing": ("sinkhorn",)}, "sinkhorn"),
        (1, {"balancing": ("expert_choice",)}, "expert_choice"),
    ],
)
def test_where_it_is_not_exact_the_reason_is_given(granularity, fields, why):
    dense, moe, inexact = _outputs(_spec(granularity, **fields), torch.float64)
    assert why in inexact
    assert FP32_MODEL.problem(moe, dense, "output") is not None, "said to be inexact, but is exact"


@pytest.mark.parametrize(
    "fields",
    [
        {"pre_softmax": True, "topk": 4, "scaling_factor": 2.0},
        {"topk": 1, "score_function": "sigmoid"},
        {"topk": 1, "score_function": "sqrtsoftplus"},
        {"balancing": ("sinkhorn",)},
        {"balancing": ("sinkhorn",), "topk": 1},
    ],
)
def test_an_undecided_router_is_exact_whatever_its_scores(fields):
    """With all logits 0 the weights are those that the scale was made for."""
    ctx, spec = ParallelContext.single(), _spec(1, **fields)
    dense, layer = _dense(ctx, spec), MoELayer(spec, 0, ctx, reference.bundle())
    router = {"weight": torch.zeros(EXPERTS, HIDDEN, dtype=torch.float64)}
    layer.load_state_dict(upcycle(dense.state_dict(), router, spec).weights)
    hidden = torch.randn(6, 3, HIDDEN, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    FP64_REF.check(layer(hidden, make_meta(hidden)), dense(hidden), "output")


def test_virtual_groups_share_their_logits_and_hold_every_slice_once():
    spec = _spec(2, topk=4)
    dense = _dense(ParallelContext.single(), spec).state_dict()
    rows = torch.arange(EXPERTS)[:, None] * torch.ones(1, HIDDEN)
    weights = upcycle(dense, {"weight": rows}, spec).weights
    assert weights["router.weight"][:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    gate, up = dense["linear_fc1.weight"].chunk(2)
    for expert in range(EXPERTS):
        part = slice(12 * (expert % 2), 12 * (expert % 2) + 12)
        assert torch.equal(weights["experts.linear_fc1.weight"][expert], torch.cat([gate[part], up[part]]))
        assert torch.equal(weights["experts.linear_fc2.weight"][expert], 2 * dense["linear_fc2.weight"][:, part])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: replace(s, experts=replace(s.experts, ffn_hidden_size=7)), "24 is not a multiple of .* 7"),
        (lambda s: replace(s, experts=replace(s.experts, ffn_hidden_size=48)), "24 is not a multiple of .* 48"),
        (lambda s: replace(s, experts=replace(s.experts, ffn_hidden_size=8)), "8 experts .* 3 slices"),
        (lambda s: replace(s, experts=replace(s.experts, hidden_size=4)), "hidden size 4"),
        (lambda s: replace(s, experts=replace(s.experts, activation=ActivationSpec())), "a plain activation"),
        (lambda s: replace(s, experts=replace(s.experts, bias=True)), "with biases"),
        (lambda s: replace(s, latent_size=4), "latent"),
        (
            lambda s: replace(
                s,
                shared=SharedExpertsSpec(mlp=MLPSpec(hidden_size=HIDDEN, ffn_hidden_size=8, activation=SWIGLU)),
            ),
            "shared experts",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(change, message):
    spec = _spec()
    dense = _dense(ParallelContext.single(), spec).state_dict()
    with pytest.raises(CheckpointProblem, match=message):
        upcycle(dense, {"weight": torch.zeros(EXPERTS, HIDDEN)}, change(spec))
