"""MoE layer: nodes, latent projections, routing replay and kernels. `test_against_loop.py` checks its values."""

import pytest
import torch
from torch import Tensor

from megatron_moe.config.mlp import ActivationConfig, MLPConfig
from megatron_moe.config.moe import CapacityConfig, ExpertsConfig, MoEConfig, RouterConfig, SharedExpertsConfig
from megatron_moe.config.run import KernelConfig
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.layers.node_chain import BoundNodes, LayerState, schedule_steps
from megatron_moe.moe.moe_layer import MoELayer
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.streams import Streams
from megatron_moe.pipeline.overlap import Step
from megatron_moe.pipeline.segment import SegmentedMicrobatch
from tests.helpers import tiny_models
from tests.helpers.modules import module_of
from tests.helpers.tolerances import EXACT, FP32_MODEL, FP64_REF
from tests.moe.routings import draw, fill

HIDDEN, LATENT, EXPERTS, STEPS, BATCH = 8, 4, 6, 5, 2
SWIGLU = ActivationConfig(kind="silu", gated=True)
SHARED = SharedExpertsConfig(mlp=MLPConfig(hidden_size=HIDDEN, ffn_hidden_size=3, activation=SWIGLU), gate=True)


def spec_of(*, latent: int | None = None, capacity=None, shared=None, router=None, **experts) -> MoEConfig:
    return MoEConfig(
        router=RouterConfig(**{"hidden_size": HIDDEN, "num_experts": EXPERTS, "topk": 2, **(router or {})}),
        experts=ExpertsConfig(
            num_experts=EXPERTS, hidden_size=latent or HIDDEN, ffn_hidden_size=5, activation=SWIGLU, **experts
        ),
        capacity=capacity,
        shared=shared,
        latent_size=latent,
    )


def make(config: MoEConfig, *, dtype=torch.float64, kernels=None) -> MoELayer:
    layer = module_of(config, ParallelContext.single(dtype=dtype), kernels)
    fill(layer)
    return layer


def make_mb(hidden_SBH: Tensor, **fields) -> MicrobatchContext:
    steps, batch = hidden_SBH.shape[:2]
    return tiny_models.make_mb(batch, steps, **fields)


def results(layer: MoELayer, hidden: Tensor, **fields) -> dict[str, Tensor]:
    """Runs forward and backward; returns output, input gradient and parameter gradients by name."""
    hidden = hidden.detach().requires_grad_()
    out = layer(hidden, make_mb(hidden, **fields))
    out.backward(draw(*out.shape, seed=3).to(out.dtype))
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"out": out.detach(), "hidden": hidden.grad, **grads}


EVERYTHING = dict(latent=LATENT, shared=SHARED, bias=True, router={"score_function": "sigmoid", "expert_bias": True})


def test_nodes_as_separate_graph_segments_give_the_gradients_of_the_whole() -> None:
    """An overlapped schedule runs the backward of each node separately and passes gradients across the cuts."""
    layer, hidden = make(spec_of(latent=LATENT, shared=SHARED)), draw(STEPS, BATCH, HIDDEN)
    whole = results(layer, hidden)
    layer.zero_grad(set_to_none=True)
    first = Step("embedding", None, lambda x: LayerState(normed_SBH=x))
    steps = schedule_steps([BoundNodes([node], make_mb(hidden)) for node in layer.nodes])
    last = Step("head", None, lambda state: state.out_SBH)
    microbatch = SegmentedMicrobatch([first, *steps, last], hidden, Streams())
    microbatch.forward()
    out = microbatch.output()
    microbatch.begin_backward(draw(*out.shape, seed=3))
    microbatch.backward()
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    FP64_REF.check_all({"out": out, "hidden": microbatch.input_gradient(), **grads}, whole)


@pytest.mark.parametrize("shared", [None, SHARED])
def test_experts_get_the_latent_projection_and_router_and_shared_experts_the_full_width(shared) -> None:
    layer, hidden = make(spec_of(latent=LATENT, shared=shared)), draw(STEPS, BATCH, HIDDEN)
    routing = layer.router(hidden, make_mb(hidden))
    narrow = (hidden @ layer.fc1_latent_proj.weight.T).flatten(0, 1)
    fc1, fc2 = layer.experts.linear_fc1.weight, layer.experts.linear_fc2.weight
    sums = torch.zeros(STEPS * BATCH, LATENT, dtype=torch.float64)
    for t, (ids, probs) in enumerate(zip(routing.ids_TK.tolist(), routing.probs_TK, strict=True)):
        for expert, prob in zip(ids, probs, strict=True):
            gate, up = (fc1[expert] @ narrow[t]).chunk(2)
            sums[t] += prob * (fc2[expert] @ (gate * torch.sigmoid(gate) * up))
    expected = (sums @ layer.fc2_latent_proj.weight.T).view_as(hidden)
    if shared is not None:
        expected = expected + layer.shared_experts(hidden)
    FP64_REF.check(layer(hidden, make_mb(hidden)), expected)


@pytest.mark.parametrize("capacity", [None, CapacityConfig(factor=0.75), CapacityConfig(factor=1.5, pad=True)])
def test_sequential_experts_equal_grouped_experts(capacity) -> None:
    runs = [
        results(make(spec_of(**EVERYTHING, capacity=capacity, grouped=grouped)), draw(STEPS, BATCH, HIDDEN))
        for grouped in (False, True)
    ]
    FP64_REF.check_all(runs[0], runs[1])


@pytest.mark.parametrize("capacity", [None, CapacityConfig(factor=0.75), CapacityConfig(factor=1.5, pad=True)])
def test_native_kernels_equal_the_reference(capacity) -> None:
    config, native = (
        spec_of(**EVERYTHING, capacity=capacity),
        select_kernels(KernelConfig(), torch.device("cpu"), torch.float32),
    )
    hidden = draw(STEPS, BATCH, HIDDEN)
    fast = results(make(config, dtype=torch.float32, kernels=native), hidden.float())
    FP32_MODEL.check_all(fast, results(make(config), hidden))


def test_padding_to_capacity_keeps_the_results() -> None:
    runs = [
        results(make(spec_of(**EVERYTHING, capacity=CapacityConfig(factor=0.75, pad=pad))), draw(STEPS, BATCH, HIDDEN))
        for pad in (False, True)
    ]
    FP64_REF.check_all(runs[0], runs[1])


def test_routing_can_be_replayed_with_other_router_weights() -> None:
    layer, hidden = make(spec_of()), draw(STEPS, BATCH, HIDDEN)
    routing = layer.router(hidden, make_mb(hidden))
    EXACT.check(layer(hidden, make_mb(hidden), routing.chosen_TK), layer(hidden, make_mb(hidden)), "same weights")
    with torch.no_grad():
        layer.router.weight.mul_(-1)
    replayed = layer.router(hidden, make_mb(hidden), routing.chosen_TK)
    EXACT.check(replayed.ids_TK, routing.ids_TK, "replayed ids")
    assert (layer.router(hidden, make_mb(hidden)).ids_TK != routing.ids_TK).any()


def test_probabilities_on_the_input_with_one_expert_per_token() -> None:
    router = {"topk": 1, "score_function": "sigmoid"}
    layer, hidden = make(spec_of(router=router, probs_on_input=True)), draw(STEPS, BATCH, HIDDEN)
    routing = layer.router(hidden, make_mb(hidden))
    fc1, fc2 = layer.experts.linear_fc1.weight, layer.experts.linear_fc2.weight
    expected = torch.zeros(STEPS * BATCH, HIDDEN, dtype=torch.float64)
    for t, token in enumerate(hidden.flatten(0, 1)):
        expert = int(routing.ids_TK[t, 0])
        gate, up = (fc1[expert] @ (token * routing.probs_TK[t, 0])).chunk(2)
        expected[t] = fc2[expert] @ (gate * torch.sigmoid(gate) * up)
    FP64_REF.check(layer(hidden, make_mb(hidden)), expected.view_as(hidden))


def test_padding_tokens_have_zero_output_and_no_gradient() -> None:
    layer, hidden = make(spec_of()), draw(STEPS, BATCH, HIDDEN)
    valid = torch.arange(STEPS).expand(BATCH, STEPS) < 3
    run = results(layer, hidden, valid_BS=valid)
    EXACT.check(run["out"][3:], torch.zeros(2, BATCH, HIDDEN, dtype=torch.float64), "output of padding")
    EXACT.check(run["hidden"][3:], torch.zeros(2, BATCH, HIDDEN, dtype=torch.float64), "gradient of padding")
    layer.zero_grad(set_to_none=True)
    push = draw(STEPS, BATCH, HIDDEN, seed=3)[:3]
    alone = hidden[:3].detach().requires_grad_()
    layer(alone, make_mb(alone)).backward(push)
    FP64_REF.check(run["experts.linear_fc1.weight"], layer.experts.linear_fc1.weight.grad, "gradient of experts")


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("capacity", [None, CapacityConfig(factor=1.0, pad=True)])
def test_single_token_and_microbatch_of_padding_have_finite_gradients(capacity, grouped) -> None:
    for fields in ({}, {"valid_BS": torch.zeros(1, 1, dtype=torch.bool)}):
        layer = make(spec_of(**EVERYTHING, capacity=capacity, grouped=grouped))
        run = results(layer, draw(1, 1, HIDDEN), **fields)
        assert all(value is not None and value.isfinite().all() for value in run.values())


def test_bf16_layers_run_with_fp32_routing_and_stay_bf16() -> None:
    for kernels in (reference.bundle(), select_kernels(KernelConfig(), torch.device("cpu"), torch.bfloat16)):
        layer = make(spec_of(shared=SHARED, router={"dtype": "fp32"}), dtype=torch.bfloat16, kernels=kernels)
        run = results(layer, draw(STEPS, BATCH, HIDDEN).bfloat16())
        assert all(value.dtype is torch.bfloat16 and value.isfinite().all() for value in run.values())


def test_parameter_names_are_those_of_the_checkpoint() -> None:
    names = {name for name, _ in make(spec_of(**EVERYTHING)).named_parameters()}
    assert names == {
        "router.weight",
        "experts.linear_fc1.weight",
        "experts.linear_fc1.bias",
        "experts.linear_fc2.weight",
        "experts.linear_fc2.bias",
        "shared_experts.linear_fc1.weight",
        "shared_experts.linear_fc2.weight",
        "shared_experts.gate_weight",
        "fc1_latent_proj.weight",
        "fc2_latent_proj.weight",
    }


def test_shared_experts_are_attention_parameters() -> None:
    shared = make(spec_of(shared=SHARED)).shared_experts
    metas = {name: p.meta for name, p in shared.named_parameters()}
    assert all(meta.grid == "attention" and meta.num_experts is None for meta in metas.values())
    assert metas["gate_weight"].role == "gate" and metas["linear_fc1.weight"].splits == (3, 3)
    assert metas["linear_fc2.weight"].init == "output"
