"""The MoE layer equals a loop over tokens and experts (`oracle.py`) in fp64: output, gradients, losses, counts.

Every router variant is combined with every capacity and every kind of shared expert. The objective is a random
projection of the output plus the balancing losses, whose gradients the layer adds in backward.
"""

import itertools

import pytest
import torch

from megatron_moe.config.mlp import ActivationConfig, MLPConfig
from megatron_moe.config.moe import CapacityConfig, ExpertsConfig, MoEConfig, RouterConfig, SharedExpertsConfig
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.modules import module_of
from tests.helpers.thinned import thinned
from tests.helpers.tolerances import EXACT, FP64_REF
from tests.moe.oracle import loop_moe
from tests.moe.routers import make_mb

HIDDEN, FFN, EXPERTS, STEPS, BATCH = 4, 3, 8, 4, 2
SWIGLU = ActivationConfig(kind="silu", gated=True)
SCORES = {
    "softmax_after": {},
    "softmax_before": {"pre_softmax": True},
    "sigmoid": {"score_function": "sigmoid"},
    "sigmoid_bias": {"score_function": "sigmoid", "expert_bias": True},
    "renormalized_softmax_bias": {"score_function": "renormalized_softmax", "expert_bias": True},
    "sqrtsoftplus": {"score_function": "sqrtsoftplus"},
    "sqrtsoftplus_bias": {"score_function": "sqrtsoftplus", "expert_bias": True},
}
GROUPS = {"all": {}, "groups": {"num_groups": 4, "group_topk": 2}}
CAPACITIES = {
    "dropless": None,
    "probs": CapacityConfig(factor=0.75),
    "position": CapacityConfig(factor=0.75, policy="position"),
    "padded": CapacityConfig(factor=1.25, pad=True),
}
SHARED = {
    "none": None,
    "shared": SharedExpertsConfig(mlp=MLPConfig(hidden_size=HIDDEN, ffn_hidden_size=5, activation=SWIGLU)),
    "gated": SharedExpertsConfig(mlp=MLPConfig(hidden_size=HIDDEN, ffn_hidden_size=5, activation=SWIGLU), gate=True),
}
KINDS = ("aux_loss", "seq_aux_loss", "global_aux_loss")


def _router_variants():
    for score, group, scaling, topk in itertools.product(SCORES, GROUPS, (None, 2.5), (1, 2, 4)):
        if topk == 1 and (group == "groups" or score == "softmax_after"):
            continue  # group-limited routing selects two experts at least; a softmax over one choice is constant
        fields = {**SCORES[score], **GROUPS[group], "scaling_factor": scaling, "topk": topk}
        yield pytest.param(fields, id=f"{score}-{group}-x{scaling}-k{topk}")


def make_config(
    router: dict, capacity: CapacityConfig | None, shared: SharedExpertsConfig | None, **experts
) -> MoEConfig:
    return MoEConfig(
        router=RouterConfig(hidden_size=HIDDEN, num_experts=EXPERTS, **router),
        experts=ExpertsConfig(
            **{"num_experts": EXPERTS, "hidden_size": HIDDEN, "ffn_hidden_size": FFN, "activation": SWIGLU, **experts}
        ),
        capacity=capacity,
        shared=shared,
    )


def compare(config: MoEConfig, *, seed: int = 5, valid_BS: torch.Tensor | None = None) -> None:
    """Runs layer and loop on the same weights and input, and compares output, gradients, losses and counts."""
    draw = torch.Generator().manual_seed(seed)
    layer = module_of(config, ParallelContext.single())
    with torch.no_grad():
        for tensor in (*layer.parameters(), *(b for b in layer.buffers() if b.is_floating_point())):
            tensor.copy_(torch.randn(tensor.shape, generator=draw, dtype=torch.float64))
    weights = {
        name: value.detach().double().clone().requires_grad_(not name.endswith("expert_bias"))
        for name, value in layer.state_dict().items()
    }
    hidden = torch.randn(STEPS, BATCH, HIDDEN, generator=draw, dtype=torch.float64).requires_grad_()
    loop_hidden = hidden.detach().clone().requires_grad_()
    push = torch.randn(hidden.shape, generator=draw, dtype=torch.float64)

    loop = loop_moe(config, weights, loop_hidden, valid_BS)
    ((loop.output_SBH * push).sum() + 0.5 * loop.objective).backward()

    metrics = MetricAccumulator()
    mb = make_mb(hidden, metrics=metrics, valid_BS=valid_BS, aux_loss_scale=0.5)
    output = layer(hidden, mb)
    (output * push).sum().backward()

    FP64_REF.check(output, loop.output_SBH, "output")
    FP64_REF.check(hidden.grad, loop_hidden.grad, "gradient of the input")
    FP64_REF.check_all(
        {name: parameter.grad for name, parameter in layer.named_parameters()},
        {name: value.grad for name, value in weights.items() if value.requires_grad},
        "gradients",
    )
    recorded = metrics.take_all().entries
    for name, loss in loop.losses.items():
        FP64_REF.check(recorded[name, 0].value, loss, name)
    with torch.no_grad():
        routing = layer.router(hidden, mb)
    EXACT.check(routing.counts_E, loop.counts, "counts")
    none = [-1] * config.router.topk
    assert routing.chosen_TK.tolist() == [choices or none for choices in loop.choices]
    assignments = [[e for e in ids if e >= 0] for ids in routing.ids_TK.tolist()]
    assert assignments == [[e for e, _ in assigned] for assigned in loop.assignments]


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("router", thinned(_router_variants()))
def test_layer_equals_the_loop(router, capacity, shared):
    compare(make_config(router, CAPACITIES[capacity], SHARED[shared]))


def test_shared_experts_with_a_plain_activation_equal_the_loop():
    mlp = MLPConfig(hidden_size=HIDDEN, ffn_hidden_size=5, activation=ActivationConfig(kind="silu"))
    compare(make_config({"topk": 2}, None, SharedExpertsConfig(mlp=mlp, gate=True)))


@pytest.mark.parametrize("padding", [False, True], ids=["full", "padding"])
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("score", SCORES)
def test_losses_and_their_gradients_equal_the_loop(score, capacity, padding):
    valid_BS = None
    if padding:
        valid_BS = torch.ones(BATCH, STEPS, dtype=torch.bool)
        valid_BS[0, 2:] = False
        valid_BS[1, :1] = False
    losses = {"balancing": KINDS, "aux_loss_coeffs": (0.3, 0.2, 0.1), "z_loss_coeff": 0.05}
    compare(make_config({**SCORES[score], **losses, "topk": 2}, CAPACITIES[capacity], None), valid_BS=valid_BS)


@pytest.mark.parametrize("kind", KINDS)
def test_each_loss_alone_equals_the_loop(kind):
    compare(make_config({"topk": 2, "balancing": (kind,), "aux_loss_coeffs": (0.3,)}, None, None))


@pytest.mark.parametrize(
    "experts",
    [
        {"bias": True},
        {"grouped": False},
        {"grouped": False, "bias": True},
        {"activation": ActivationConfig(kind="silu")},
        {"activation": ActivationConfig(kind="silu", gated=True, linear_offset=1.0), "bias": True},
    ],
)
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_kinds_of_experts_equal_the_loop(experts, capacity):
    router = {"topk": 2, "linear_bias": True}
    compare(make_config(router, CAPACITIES[capacity], None, **experts))
