"""Parameter counts against the public model table, hand-counted models, and each other."""

from dataclasses import replace

import pytest

from megatron_moe.config.attention import AttentionConfig, CoreAttentionConfig, MLAConfig, NormConfig, RopeConfig
from megatron_moe.config.model import LayerConfig, ModelConfig, MTPConfig
from megatron_moe.config.moe import (
    ActivationConfig,
    ExpertsConfig,
    MLPConfig,
    MoEConfig,
    RouterConfig,
    SharedExpertsConfig,
)
from megatron_moe.cost_model.parameters import ParamCount, count_parameters
from tests.helpers.zoo import ZooRow, model_config, zoo_rows

RMS = NormConfig(kind="RMSNorm")
SWIGLU = ActivationConfig(kind="silu", gated=True)
CORE = CoreAttentionConfig(softmax_scale=0.5)


def gqa(**changes) -> AttentionConfig:
    """Hidden 8, 4 heads of width 4 in 2 groups: q 16, k 8, v 8."""
    config = AttentionConfig(hidden_size=8, num_heads=4, num_query_groups=2, head_dim=4, core=CORE, rope=None)
    return replace(config, **changes)


def mlp(**changes) -> MLPConfig:
    return replace(MLPConfig(hidden_size=8, ffn_hidden_size=10, activation=SWIGLU), **changes)


def moe(**changes) -> MoEConfig:
    """6 experts of width 5, 2 per token."""
    config = MoEConfig(
        router=RouterConfig(hidden_size=8, num_experts=6, topk=2),
        experts=ExpertsConfig(num_experts=6, hidden_size=8, ffn_hidden_size=5, activation=SWIGLU),
    )
    return replace(config, **changes)


def model(mixer=None, feed_forward=None, norm: NormConfig = RMS, num_layers: int = 1, **changes) -> ModelConfig:
    layer = LayerConfig(mixer=mixer or gqa(), feed_forward=feed_forward or mlp(), norm=norm)
    config = ModelConfig(
        hidden_size=8,
        vocab_size=11,
        layers=(layer,) * num_layers,
        norm=norm,
        position_embedding="rope",
        tied_embeddings=False,
    )
    return replace(config, **changes)


@pytest.mark.parametrize("row", zoo_rows(), ids=str)
def test_counts_of_public_models_agree_with_the_table_to_its_last_digit(row: ZooRow):
    """The table leaves multi-token prediction out, and counts embedding and head as active."""
    config = model_config(row)
    total = count_parameters(config).without_mtp.total
    active = count_parameters(config, active=True).without_mtp.total
    assert (f"{total / 1e9:.2f}", f"{active / 1e9:.2f}") == (
        row.cells["computed-total-B"],
        row.cells["computed-active-B"],
    )


def test_the_mtp_module_of_deepseek_v3_holds_the_published_11_5b_and_its_projection():
    """The notes on DeepSeek-V3's weight files give 11.5B without the embedding and the head, which are shared."""
    row = next(row for row in zoo_rows() if str(row) == "DeepSeek-V3")
    assert f"{(count_parameters(model_config(row)).mtp - 2 * 7168**2) / 1e9:.1f}" == "11.5"


def test_a_dense_model_counted_by_hand():
    expected = ParamCount(
        embedding=11 * 8,
        attention=8 * (16 + 8 + 8) + 16 * 8,
        dense_mlp=2 * 10 * 8 + 8 * 10,
        norms=2 * 8 + 8,
        head=11 * 8,
    )
    assert count_parameters(model()) == expected


def test_learned_positions_layer_norm_and_biases_counted_by_hand():
    plain = mlp(activation=ActivationConfig(), bias=True)
    mixer = gqa(qkv_bias=True, out_bias=True)
    config = model(mixer, plain, NormConfig(), position_embedding="learned_absolute", max_positions=7, head_bias=True)
    expected = ParamCount(
        embedding=(11 + 7) * 8,
        attention=8 * 32 + 32 + 16 * 8 + 8,
        dense_mlp=10 * 8 + 10 + 8 * 10 + 8,
        norms=(2 * 8 + 8) * 2,
        head=11 * 8 + 11,
    )
    assert count_parameters(config) == expected


def test_a_tied_head_adds_nothing_but_its_bias():
    assert count_parameters(model(tied_embeddings=True)).head == 0
    assert count_parameters(model(tied_embeddings=True, head_bias=True)).head == 11


def test_attention_extras_counted_by_hand():
    base = count_parameters(model())
    sinks = count_parameters(model(gqa(core=replace(CORE, sinks=True))))
    gate = count_parameters(model(gqa(output_gate=True, qkv_bias=True)))
    per_head = count_parameters(model(gqa(qk_norm="per_head", norm=RMS)))
    full = count_parameters(model(gqa(qk_norm="full", norm=RMS)))
    assert sinks.attention - base.attention == 4
    assert gate.attention - base.attention == 8 * 16 + (16 + 16 + 8 + 8)
    assert per_head.norms - base.norms == 4 + 4
    assert full.norms - base.norms == 16 + 8


@pytest.mark.parametrize("q_lora_rank, query", [(None, 8 * 4 * 5), (6, 8 * 6 + 6 * 4 * 5)])
def test_latent_attention_counted_by_hand(q_lora_rank: int | None, query: int):
    mixer = MLAConfig(
        hidden_size=8,
        num_heads=4,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=7,
        qk_head_dim=3,
        qk_rope_dim=2,
        v_head_dim=4,
        core=CORE,
        rope=RopeConfig(dim=2),
        qk_norm=True,
    )
    count = count_parameters(model(mixer))
    assert count.attention == query + 8 * (7 + 2) + 7 * 4 * (3 + 4) + 4 * 4 * 8
    assert count.norms == 3 * 8 + 7 + (q_lora_rank or 0)
    assert count_parameters(model(replace(mixer, qk_norm=False))).norms == 3 * 8


def test_moe_parts_counted_by_hand():
    shared = SharedExpertsConfig(mlp=mlp(ffn_hidden_size=3), gate=True)
    count = count_parameters(model(feed_forward=moe(shared=shared)))
    active = count_parameters(model(feed_forward=moe(shared=shared)), active=True)
    assert (count.router, count.experts, count.shared) == (6 * 8, 6 * 3 * 5 * 8, 3 * 3 * 8 + 8)
    assert active == replace(count, experts=2 * 3 * 5 * 8)


def test_biases_of_router_and_experts_counted_by_hand():
    biased = moe()
    biased = replace(
        biased, router=replace(biased.router, linear_bias=True), experts=replace(biased.experts, bias=True)
    )
    plain, count = count_parameters(model(feed_forward=moe())), count_parameters(model(feed_forward=biased))
    assert count.router - plain.router == 6
    assert count.experts - plain.experts == 6 * (2 * 5 + 8)


def test_the_expert_bias_is_a_buffer_and_does_not_count():
    biased = moe()
    biased = replace(biased, router=replace(biased.router, expert_bias=True))
    assert count_parameters(model(feed_forward=biased)) == count_parameters(model(feed_forward=moe()))


def test_latent_experts_counted_by_hand():
    latent = moe(latent_size=4)
    latent = replace(latent, experts=replace(latent.experts, hidden_size=4))
    count = count_parameters(model(feed_forward=latent))
    assert (count.latent, count.experts) == (2 * 8 * 4, 6 * 3 * 5 * 4)


@pytest.mark.parametrize("depths, repeated, layers", [(1, False, 1), (3, False, 3), (3, True, 1)])
def test_mtp_adds_layers_of_the_last_kind_with_norms_and_projection(depths: int, repeated: bool, layers: int):
    base = model(feed_forward=moe())
    config = replace(base, mtp=MTPConfig(num_layers=depths, repeated_layer=repeated))
    ends = replace(base, layers=())
    layer = count_parameters(base).total - count_parameters(ends).total
    assert count_parameters(config).mtp == layers * (layer + 3 * 8 + 2 * 8 * 8)
    assert count_parameters(config).without_mtp == count_parameters(base)


def test_doubling_the_layers_doubles_what_layers_count():
    one, two = (count_parameters(model(feed_forward=moe(), num_layers=n)) for n in (1, 2))
    ends = count_parameters(model(feed_forward=moe(), layers=()))
    assert two.total - ends.total == 2 * (one.total - ends.total)
