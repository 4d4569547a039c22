"""Counting a spec gives, kind by kind, the number of parameters of the model that is really built from it."""

from collections import Counter
from dataclasses import asdict, replace

import pytest
import torch

from megatron_moe.specs.attention import NormSpec
from megatron_moe.specs.count import count_parameters
from megatron_moe.specs.model import LayerSpec, ModelSpec, MTPSpec
from megatron_moe.specs.moe import ActivationSpec
from tests.tiny_models import attention_spec, build, layer_spec, mla_spec, mlp_spec, model_spec, moe_spec

PLAIN = ActivationSpec(kind="gelu", gated=False)
BIASED = {"qkv_bias": True, "out_bias": True}


def kind_of(name: str) -> str:
    """The kind of a parameter, by its name in Megatron's words."""
    if name.startswith("mtp."):
        return "mtp"
    if "norm" in name:
        return "norms"
    for part, kind in (
        ("embedding.", "embedding"),
        ("output_layer.", "head"),
        (".self_attention.", "attention"),
        (".mlp.router.", "router"),
        (".mlp.experts.", "experts"),
        (".mlp.shared_experts.", "shared"),
        ("_latent_proj.", "latent"),
        (".mlp.", "dense_mlp"),
    ):
        if part in name:
            return kind
    raise AssertionError(f"{name} is of no kind")


def latent_layer() -> LayerSpec:
    moe = moe_spec()
    return layer_spec(feed_forward=replace(moe, latent_size=9, experts=replace(moe.experts, hidden_size=9)))


def biased_moe_layer() -> LayerSpec:
    moe = moe_spec(linear_bias=True, expert_bias=True, score_function="sigmoid")
    gated = replace(moe.shared, gate=True)
    experts = replace(moe.experts, bias=True, grouped=False)
    mixer = attention_spec(qk_norm="full", output_gate=True, core={"sinks": True}, **BIASED)
    return layer_spec(mixer, replace(moe, shared=gated, experts=experts))


def megatron_defaults() -> ModelSpec:
    norm = NormSpec(kind="LayerNorm")
    mixer = attention_spec(rope=None, qk_norm="per_head", norm=norm, **BIASED)
    layer = layer_spec(mixer, mlp_spec(activation=PLAIN, bias=True), norm=norm)
    changes = {"tied_embeddings": True, "head_bias": True, "position_embedding": "learned_absolute"}
    return model_spec(layer, layer, norm=norm, **changes)


SPECS = {
    "dense": model_spec(),
    "learned positions, LayerNorm, biases, tied": megatron_defaults(),
    "latent attention": model_spec(layer_spec(mla_spec()), layer_spec(mla_spec(q_lora_rank=None))),
    "latent attention without norms, with sinks": model_spec(layer_spec(mla_spec(qk_norm=False, core={"sinks": True}))),
    "heads normed without weights": model_spec(layer_spec(attention_spec(qk_norm="l2"))),
    "experts": model_spec(layer_spec(), layer_spec(feed_forward=moe_spec())),
    "experts with everything": model_spec(biased_moe_layer()),
    "latent experts": model_spec(latent_layer()),
    "multi-token prediction": model_spec(layer_spec(feed_forward=moe_spec()), mtp=MTPSpec(num_layers=2)),
    "a repeated layer": model_spec(latent_layer(), mtp=MTPSpec(num_layers=2, repeated_layer=True)),
}


@pytest.mark.parametrize("name", SPECS)
def test_the_count_of_every_kind_is_that_of_the_built_model(name: str):
    built: Counter[str] = Counter()
    for parameter, value in build(SPECS[name]).named_parameters():
        built[kind_of(parameter)] += value.numel()
    counted = asdict(count_parameters(SPECS[name]))
    assert {kind: number for kind, number in counted.items() if number} == dict(built)


def test_active_experts_are_those_that_one_token_reaches():
    """k = 2 of 6."""
    moe = replace(moe_spec(), shared=None)
    spec = model_spec(layer_spec(feed_forward=moe))
    experts = build(spec).decoder.layers["0"].mlp.experts
    weights = dict(experts.named_parameters())
    per_expert = sum(weight[0].numel() for weight in weights.values())
    assert count_parameters(spec, active=True).experts == 2 * per_expert
    assert count_parameters(spec).experts == sum(torch.numel(weight) for weight in weights.values())
