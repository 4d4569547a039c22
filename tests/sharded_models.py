"""Models whose every kind of layer tensor parallelism cuts, in sizes that divide by four."""

from dataclasses import replace

from megatron_moe.specs.attention import NormSpec
from megatron_moe.specs.model import InitSpec, MTPSpec
from megatron_moe.specs.moe import ActivationSpec, SharedExpertsSpec
from tests.tiny_models import attention_spec, layer_spec, microbatch, mla_spec, mlp_spec, model_spec, moe_spec

LAYER_NORM = NormSpec(kind="LayerNorm")
PLAIN_GELU = ActivationSpec(kind="gelu")


def gqa(**changes):
    return attention_spec(**{"num_heads": 8, "num_query_groups": 4, **changes})


def mla(**changes):
    return mla_spec(num_heads=4, **changes)


SHARED = SharedExpertsSpec(mlp=mlp_spec(ffn_hidden_size=28))
NARROW_EXPERTS = replace(moe_spec().experts, hidden_size=12)


def experts(shared=None, latent_size=None, experts=None, **router):
    spec = moe_spec(**router)
    return replace(spec, shared=shared, latent_size=latent_size, experts=experts or spec.experts)


GATED_SHARED = replace(SHARED, gate=True)

DENSE = {
    "plain": model_spec(layer_spec(gqa()), layer_spec(gqa())),
    "tied": model_spec(layer_spec(gqa()), tied_embeddings=True),
    "megatron-defaults": model_spec(
        layer_spec(
            gqa(num_query_groups=8, rope=None, qkv_bias=True, out_bias=True, core={"dropout": 0.2}),
            mlp_spec(activation=PLAIN_GELU, bias=True),
            norm=LAYER_NORM,
            hidden_dropout=0.1,
        ),
        norm=LAYER_NORM,
        position_embedding="learned_absolute",
        max_positions=12,
        tied_embeddings=True,
        head_bias=True,
        embedding_dropout=0.1,
        init=InitSpec(method="unit_gain", embedding_std=0.5),
    ),
    "gated-mlp-bias": model_spec(layer_spec(gqa(), mlp_spec(bias=True)), head_bias=True),
    "qk-norm-per-head": model_spec(layer_spec(gqa(qk_norm="per_head"))),
    "qk-norm-full": model_spec(layer_spec(gqa(qk_norm="full"))),
    "qk-layernorm-full": model_spec(layer_spec(gqa(qk_norm="full", norm=LAYER_NORM))),
    "one-query-group": model_spec(layer_spec(gqa(num_query_groups=1))),
    "two-query-groups": model_spec(
        layer_spec(gqa(num_query_groups=2, qk_norm="full", output_gate=True, qkv_bias=True, core={"dropout": 0.2})),
        layer_spec(gqa(num_query_groups=2, qk_norm="per_head", core={"sinks": True})),
    ),
    "output-gate-and-bias": model_spec(layer_spec(gqa(output_gate=True, qkv_bias=True))),
    "sinks-and-window": model_spec(layer_spec(gqa(core={"sinks": True, "window": (3, 0)}))),
    "mla": model_spec(layer_spec(mla()), layer_spec(mla(q_lora_rank=None, qk_norm=False))),
    "mla-dropout": model_spec(layer_spec(mla(core={"dropout": 0.2}))),
    "mtp": model_spec(layer_spec(gqa()), mtp=MTPSpec(num_layers=2)),
    "mtp-tied-repeated": model_spec(
        layer_spec(mla()), tied_embeddings=True, mtp=MTPSpec(num_layers=2, repeated_layer=True)
    ),
    "mtp-detached-learned": model_spec(
        layer_spec(gqa(rope=None), hidden_dropout=0.1),
        position_embedding="learned_absolute",
        max_positions=12,
        mtp=MTPSpec(num_layers=1, detach_heads=True),
    ),
}
SPARSE = {
    "moe": model_spec(layer_spec(gqa()), layer_spec(gqa(), experts())),
    "shared": model_spec(layer_spec(gqa(), experts(shared=SHARED))),
    "gated-shared-and-latent": model_spec(
        layer_spec(mla(), experts(shared=GATED_SHARED, latent_size=12, experts=NARROW_EXPERTS))
    ),
    "jitter-and-bias": model_spec(
        layer_spec(gqa(), experts(input_jitter_eps=0.1, linear_bias=True, score_function="sigmoid", expert_bias=True))
    ),
    "forced": model_spec(layer_spec(gqa(), experts(force_biased=0.5))),
    "mtp": model_spec(layer_spec(gqa(), experts(shared=SHARED)), mtp=MTPSpec(num_layers=1)),
}


def batches(num_steps=3, **meta):
    """Two microbatches a step, of 12 positions; dropout is drawn anew in each."""
    return [
        [microbatch(2, 12, seed=10 * step + i, random_key=(1, step, i), **meta) for i in range(2)]
        for step in range(num_steps)
    ]
