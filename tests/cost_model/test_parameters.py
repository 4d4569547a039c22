"""Parameter counts against the public model table and, by kind, against built models."""

from collections import Counter
from dataclasses import asdict, replace

import pytest

from megatron_moe.config.attention import NormConfig
from megatron_moe.config.component import NoFeedForward, NoMixer, ParamSpec
from megatron_moe.config.gated_delta_net import GatedDeltaNetConfig
from megatron_moe.config.kimi_delta_attention import KimiDeltaAttentionConfig
from megatron_moe.config.mamba import MambaConfig
from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.config.model import LayerConfig, ModelConfig, MTPConfig, with_experts
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.pipeline_layout import even_layout
from megatron_moe.config.registry import FEED_FORWARDS, MIXERS
from megatron_moe.cost_model.parameters import count_parameters
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.model.gpt import GPT
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import named_parameters
from tests.helpers.tiny_models import (
    attention_config,
    build,
    compressed_config,
    dsa_config,
    layer_config,
    mla_config,
    mlp_config,
    model_config,
    moe_config,
)
from tests.helpers.zoo import ZooRow, zoo_rows
from tests.helpers.zoo import model_config as zoo_config

PLAIN = ActivationConfig(kind="gelu", gated=False)
BIASED = {"qkv_bias": True, "out_bias": True}


def kind_of(name: str) -> str:
    """Kind of a parameter by its Megatron name."""
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


def latent_layer() -> LayerConfig:
    moe = moe_config()
    return layer_config(feed_forward=replace(moe, latent_size=9, experts=replace(moe.experts, hidden_size=9)))


def biased_moe_layer() -> LayerConfig:
    moe = moe_config(linear_bias=True, expert_bias=True, score_function="sigmoid")
    gated = replace(moe.shared, gate=True)
    experts = replace(moe.experts, bias=True, grouped=False)
    mixer = attention_config(qk_norm="full", output_gate=True, core={"sinks": True}, **BIASED)
    return layer_config(mixer, replace(moe, shared=gated, experts=experts))


def megatron_defaults() -> ModelConfig:
    norm = NormConfig(kind="LayerNorm")
    mixer = attention_config(rope=None, qk_norm="per_head", norm=norm, **BIASED)
    layer = layer_config(mixer, mlp_config(activation=PLAIN, bias=True), norm=norm)
    changes = {"tied_embeddings": True, "head_bias": True, "position_embedding": "learned_absolute"}
    return model_config(layer, layer, norm=norm, **changes)


def hybrid() -> ModelConfig:
    heads = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 6, "value_head_dim": 5, "conv_width": 3}
    options = {"hidden_size": attention_config().hidden_size, "norm": NormConfig(kind="RMSNorm"), **heads}
    none = NoMixer(hidden_size=attention_config().hidden_size)
    return model_config(
        layer_config(GatedDeltaNetConfig(**options)),
        layer_config(KimiDeltaAttentionConfig(**options)),
        layer_config(MambaConfig(**options), NoFeedForward()),
        layer_config(none, mlp_config()),
    )


MODELS = {
    "linear attention and layers of one module": hybrid(),
    "dense, with a bias of the head": model_config(head_bias=True),
    "learned positions, LayerNorm, biases, tied": megatron_defaults(),
    "latent attention": model_config(layer_config(mla_config()), layer_config(mla_config(q_lora_rank=None))),
    "latent attention without norms, with sinks": model_config(
        layer_config(mla_config(qk_norm=False, core={"sinks": True}))
    ),
    "sparse attention": model_config(layer_config(dsa_config())),
    "compressed attention": model_config(*(layer_config(compressed_config(ratio)) for ratio in (0, 4, 128))),
    "heads normed without weights": model_config(layer_config(attention_config(qk_norm="l2"))),
    "experts": model_config(layer_config(), layer_config(feed_forward=moe_config())),
    "experts with everything": model_config(biased_moe_layer()),
    "latent experts": model_config(latent_layer()),
    "multi-token prediction": model_config(layer_config(feed_forward=moe_config()), mtp=MTPConfig(num_layers=2)),
    "a repeated layer": model_config(latent_layer(), mtp=MTPConfig(num_layers=2, repeated_layer=True)),
}


@pytest.mark.parametrize("name", MODELS)
def test_counts_by_kind_equal_those_of_the_built_model(name: str):
    built: Counter[str] = Counter()
    for parameter, value in build(MODELS[name]).named_parameters():
        built[kind_of(parameter)] += value.numel()
    counted = asdict(count_parameters(MODELS[name]))
    assert {kind: number for kind, number in counted.items() if number} == dict(built)


LAYOUTS = {
    "one rank": ParallelConfig(),
    "tp": ParallelConfig(tp=2, world_size=2, sequence_parallel=True),
    "tp without sequence parallelism": ParallelConfig(tp=2, world_size=2),
    "tp beyond the query groups": ParallelConfig(tp=6, world_size=6),
    "ep": ParallelConfig(ep=4, world_size=4),
    "ep and etp": ParallelConfig(tp=2, ep=2, etp=2, world_size=4, sequence_parallel=True),
    "pp": ParallelConfig(pp=2, world_size=2),
}


def specs_of(model: ModelConfig, parallel: ParallelConfig) -> dict[str, ParamSpec]:
    """Parameters declared by the config, by global name."""
    groups = {
        "embedding": model.embedding_parameters(parallel),
        "decoder": model.final_norm_parameters(parallel),
        "output_layer": model.head_parameters(),
    }
    groups |= {f"decoder.layers.{index}": layer.parameters(parallel) for index, layer in enumerate(model.layers)}
    for depth in range(model.mtp.num_distinct_layers if model.mtp else 0):
        groups[f"mtp.layers.{depth}"] = model.mtp_parameters(parallel)
    return {f"{prefix}.{spec.name}": spec for prefix, specs in groups.items() for spec in specs}


def test_the_models_have_all_registered_components():
    layers = [layer for model in MODELS.values() for layer in model.layers]
    assert {layer.mixer.registered_as for layer in layers} == {*MIXERS.names()} - {"auto"}
    assert {layer.feed_forward.registered_as for layer in layers} == {*FEED_FORWARDS.names()} - {"auto"}


def divides(model: ModelConfig, parallel: ParallelConfig) -> bool:
    replicated = parallel.tp > 1 and not parallel.sequence_parallel and bool(model.moe_configs)
    return not replicated and all(layer.layout_problem(parallel) is None for layer in model.layers)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_declared_parameters_are_those_of_the_built_model(name: str, layout: str):
    """Compares names, global shapes, metadata, and the number of elements per rank."""
    model, parallel = MODELS[name], LAYOUTS[layout]
    model = with_experts(model, lambda moe: replace(moe, dispatcher="allgather"))
    if not divides(model, parallel):
        return
    context = ParallelContext.fake(parallel, parallel.world_size - 1)
    try:
        stages = even_layout(len(model.layers), num_mtp=model.num_mtp).stages
        built = dict(named_parameters(GPT(model, context, reference.bundle(), chunks=stages)))
    finally:
        context.stop()
    declared = specs_of(model, parallel)
    assert {name: (spec.shape, spec.meta, spec.local_numel(parallel)) for name, spec in declared.items()} == {
        name: (parameter.global_shape, parameter.meta, parameter.numel()) for name, parameter in built.items()
    }


def test_active_parameters_have_topk_experts():
    config = model_config(layer_config(feed_forward=moe_config()))
    experts = build(config).decoder.layers["0"].mlp.experts
    per_expert = sum(weight[0].numel() for weight in experts.parameters())
    count = count_parameters(config)
    assert count.experts == 8 * per_expert
    assert count_parameters(config, active=True) == replace(count, experts=2 * per_expert)


@pytest.mark.parametrize("row", zoo_rows(), ids=str)
def test_counts_of_public_models_equal_the_table(row: ZooRow):
    """The table excludes multi-token prediction and counts embedding and head as active."""
    config = zoo_config(row)
    total = count_parameters(config).without_mtp.total
    active = count_parameters(config, active=True).without_mtp.total
    assert (f"{total / 1e9:.2f}", f"{active / 1e9:.2f}") == (
        row.cells["computed-total-B"],
        row.cells["computed-active-B"],
    )


def test_mtp_parameters_of_deepseek_v3_are_the_published_11_5b_and_the_projection():
    """DeepSeek-V3's documentation of its weight files states 11.5B without the shared embedding and head."""
    row = next(row for row in zoo_rows() if str(row) == "DeepSeek-V3")
    assert f"{(count_parameters(zoo_config(row)).mtp - 2 * 7168**2) / 1e9:.1f}" == "11.5"
