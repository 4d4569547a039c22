"""Models with every kind of tensor-parallel layer, in sizes divisible by four."""

from dataclasses import replace

from megatron_moe.config.attention import NormConfig
from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.config.model import InitConfig, MTPConfig
from megatron_moe.config.moe import SharedExpertsConfig
from megatron_moe.parallel.rng import RNGKey
from tests.helpers.tiny_models import (
    attention_config,
    layer_config,
    microbatch,
    mla_config,
    mlp_config,
    model_config,
    moe_config,
)

LAYER_NORM = NormConfig(kind="LayerNorm")
PLAIN_GELU = ActivationConfig(kind="gelu")


def gqa(**changes):
    return attention_config(**{"num_heads": 8, "num_query_groups": 4, **changes})


def mla(**changes):
    return mla_config(num_heads=4, **changes)


SHARED = SharedExpertsConfig(mlp=mlp_config(ffn_hidden_size=28))
NARROW_EXPERTS = replace(moe_config().experts, hidden_size=12)


def experts(shared=None, latent_size=None, experts=None, **router):
    config = moe_config(**router)
    return replace(config, shared=shared, latent_size=latent_size, experts=experts or config.experts)


GATED_SHARED = replace(SHARED, gate=True)

DENSE = {
    "plain": model_config(layer_config(gqa()), layer_config(gqa())),
    "tied": model_config(layer_config(gqa()), tied_embeddings=True),
    "megatron-defaults": model_config(
        layer_config(
            gqa(num_query_groups=8, rope=None, qkv_bias=True, out_bias=True, core={"dropout": 0.2}),
            mlp_config(activation=PLAIN_GELU, bias=True),
            norm=LAYER_NORM,
            hidden_dropout=0.1,
        ),
        norm=LAYER_NORM,
        position_embedding="learned_absolute",
        max_positions=12,
        tied_embeddings=True,
        head_bias=True,
        embedding_dropout=0.1,
        init=InitConfig(method="unit_gain", embedding_std=0.5),
    ),
    "gated-mlp-bias": model_config(layer_config(gqa(), mlp_config(bias=True)), head_bias=True),
    "qk-norm-per-head": model_config(layer_config(gqa(qk_norm="per_head"))),
    "qk-norm-full": model_config(layer_config(gqa(qk_norm="full"))),
    "qk-layernorm-full": model_config(layer_config(gqa(qk_norm="full", norm=LAYER_NORM))),
    "one-query-group": model_config(layer_config(gqa(num_query_groups=1))),
    "two-query-groups": model_config(
        layer_config(gqa(num_query_groups=2, qk_norm="full", output_gate=True, qkv_bias=True, core={"dropout": 0.2})),
        layer_config(gqa(num_query_groups=2, qk_norm="per_head", core={"sinks": True})),
    ),
    "output-gate-and-bias": model_config(layer_config(gqa(output_gate=True, qkv_bias=True))),
    "sinks-and-window": model_config(layer_config(gqa(core={"sinks": True, "window": (3, 0)}))),
    "mla": model_config(layer_config(mla()), layer_config(mla(q_lora_rank=None, qk_norm=False))),
    "mla-dropout": model_config(layer_config(mla(core={"dropout": 0.2}))),
    "mtp": model_config(layer_config(gqa()), mtp=MTPConfig(num_layers=2)),
    "mtp-tied-repeated": model_config(
        layer_config(mla()), tied_embeddings=True, mtp=MTPConfig(num_layers=2, repeated_layer=True)
    ),
    "mtp-detached-learned": model_config(
        layer_config(gqa(rope=None), hidden_dropout=0.1),
        position_embedding="learned_absolute",
        max_positions=12,
        mtp=MTPConfig(num_layers=1, detach_heads=True),
    ),
}
SPARSE = {
    "moe": model_config(layer_config(gqa()), layer_config(gqa(), experts())),
    "shared": model_config(layer_config(gqa(), experts(shared=SHARED))),
    "gated-shared-and-latent": model_config(
        layer_config(mla(), experts(shared=GATED_SHARED, latent_size=12, experts=NARROW_EXPERTS))
    ),
    "jitter-and-bias": model_config(
        layer_config(gqa(), experts(input_jitter_eps=0.1, linear_bias=True, score_function="sigmoid", expert_bias=True))
    ),
    "forced": model_config(layer_config(gqa(), experts(force_biased=0.5))),
    "mtp": model_config(layer_config(gqa(), experts(shared=SHARED)), mtp=MTPConfig(num_layers=1)),
}


def batches(num_steps=3, **fields):
    """Creates batches of two microbatches of 12 positions per step, each with its own dropout masks."""
    return [
        [microbatch(2, 12, seed=10 * step + i, rng=RNGKey(1, step, i), **fields) for i in range(2)]
        for step in range(num_steps)
    ]
