"""Upcycled MoE layers equal the dense MLP, or `upcycle` reports why they differ."""

from dataclasses import replace

import pytest
import torch

from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.mlp import ActivationConfig, MLPConfig
from megatron_moe.config.moe import CapacityConfig, ExpertsConfig, MoEConfig, RouterConfig, SharedExpertsConfig
from megatron_moe.layers.mlp import MLP
from megatron_moe.moe.upcycling import upcycle
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.modules import module_of
from tests.helpers.tolerances import FP32_MODEL, FP64_REF
from tests.moe.routers import make_mb

HIDDEN, DENSE_FFN, EXPERTS = 8, 24, 8
SWIGLU = ActivationConfig(kind="silu", gated=True)
GPT_OSS = ActivationConfig(kind="quick_gelu", gated=True, clamp=0.5, linear_offset=1.0)


def _config(granularity=1, *, activation=SWIGLU, bias=False, capacity=None, **router) -> MoEConfig:
    return MoEConfig(
        router=RouterConfig(**{"hidden_size": HIDDEN, "num_experts": EXPERTS, "topk": 2, **router}),
        experts=ExpertsConfig(
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


def _dense(ctx: ParallelContext, config: MoEConfig) -> MLP:
    experts = config.experts
    mlp = MLPConfig(hidden_size=HIDDEN, ffn_hidden_size=DENSE_FFN, activation=experts.activation, bias=experts.bias)
    return _fill(module_of(mlp, ctx), 1)


def _outputs(config: MoEConfig, dtype: torch.dtype = torch.float32):
    """Returns the outputs of the dense MLP and of the upcycled layer, and the reason why they may differ."""
    ctx = ParallelContext.single(dtype=dtype)
    dense, layer = _dense(ctx, config), _fill(module_of(config, ctx), 2)
    router = {name: value for name, value in layer.router.state_dict().items() if name != "expert_bias"}
    result = upcycle(dense.state_dict(), router, config)
    missing, unexpected = layer.load_state_dict(result.weights, strict=False)
    assert not unexpected and set(missing) <= {"router.expert_bias"}
    hidden = torch.randn(6, 3, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)
    return dense(hidden), layer(hidden, make_mb(hidden)), result.inexact


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
    [{}, {"activation": ActivationConfig(kind="squared_relu"), "bias": True}, {"activation": GPT_OSS, "bias": True}],
)
def test_moe_output_equals_the_dense_output(router, granularity, experts):
    dense, moe, inexact = _outputs(_config(granularity, **experts, **router))
    assert inexact is None
    FP32_MODEL.check(moe, dense, "fp32 output")
    dense, moe, _ = _outputs(_config(granularity, **experts, **router), torch.float64)
    FP64_REF.check(moe, dense, "fp64 output")


def test_fine_granularity_equals_the_dense_output():
    dense, moe, inexact = _outputs(_config(4, topk=8))
    assert inexact is None
    FP32_MODEL.check(moe, dense, "output")
    dense, moe, inexact = _outputs(_config(1, topk=1, score_function="softmax"))
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
        (1, {"capacity": CapacityConfig(factor=0.5)}, "drop"),
        (1, {"balancing": ("sinkhorn",)}, "sinkhorn"),
        (1, {"balancing": ("expert_choice",)}, "expert_choice"),
    ],
)
def test_inexact_upcycling_has_a_reason(granularity, fields, why):
    dense, moe, inexact = _outputs(_config(granularity, **fields), torch.float64)
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
def test_zero_logits_are_exact_for_all_score_functions(fields):
    """With router logits of 0, upcycling is exact even for routers that are inexact otherwise.

    The scale of the upcycled weights assumes such logits.
    """
    ctx, config = ParallelContext.single(), _config(1, **fields)
    dense, layer = _dense(ctx, config), module_of(config, ctx)
    router = {"weight": torch.zeros(EXPERTS, HIDDEN, dtype=torch.float64)}
    layer.load_state_dict(upcycle(dense.state_dict(), router, config).weights)
    hidden = torch.randn(6, 3, HIDDEN, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    FP64_REF.check(layer(hidden, make_mb(hidden)), dense(hidden), "output")


def test_virtual_groups_share_logits_and_hold_every_slice_once():
    config = _config(2, topk=4)
    dense = _dense(ParallelContext.single(), config).state_dict()
    rows = torch.arange(EXPERTS)[:, None] * torch.ones(1, HIDDEN)
    weights = upcycle(dense, {"weight": rows}, config).weights
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
        (lambda s: replace(s, experts=replace(s.experts, activation=ActivationConfig())), "a plain activation"),
        (lambda s: replace(s, experts=replace(s.experts, bias=True)), "with biases"),
        (lambda s: replace(s, latent_size=4), "latent"),
        (
            lambda s: replace(
                s, shared=SharedExpertsConfig(mlp=MLPConfig(hidden_size=HIDDEN, ffn_hidden_size=8, activation=SWIGLU))
            ),
            "shared experts",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_rejected_with_the_numbers(change, message):
    config = _config()
    dense = _dense(ParallelContext.single(), config).state_dict()
    with pytest.raises(CheckpointProblem, match=message):
        upcycle(dense, {"weight": torch.zeros(EXPERTS, HIDDEN)}, change(config))
