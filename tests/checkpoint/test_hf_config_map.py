"""Model configs from config.json: equality with the flags of the public model table, and rejected configs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from megatron_moe.checkpoint.huggingface.config_map import FAMILIES, model_config_from_hf, with_latent_norms_of
from megatron_moe.config.attention import AttentionConfig, yarn_mscale
from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.model_differences import config_differences
from megatron_moe.cost_model.parameters import count_parameters
from tests.helpers.zoo import model_config, zoo_rows

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data_files" / "hf_configs.json").read_text()
)
ROWS = {str(row): row for row in zoo_rows() if str(row) in PUBLISHED}

LATENT_NORM = {
    name: [f"layers {layers} mixer norm eps: 1e-05, published 1e-06"]
    for name, layers in (("Moonlight-16B-A3B", "0-26"), ("GLM-4.7-Flash", "0-46"))
}
"""The flags have one epsilon; the published code always normalises the latents of attention with 1e-6."""


@pytest.mark.parametrize("name", ROWS)
def test_a_published_config_means_the_same_as_the_flags_of_its_recipe(name: str):
    flags, published = model_config(ROWS[name]), model_config_from_hf(PUBLISHED[name], mtp=True)
    assert config_differences(flags, published) == LATENT_NORM.get(name, [])


@pytest.mark.parametrize("name", ROWS)
def test_a_published_config_gives_the_published_number_of_parameters(name: str):
    config, row = model_config_from_hf(PUBLISHED[name]), ROWS[name]
    assert config.mtp is None
    assert f"{count_parameters(config).total / 1e9:.2f}" == row.cells["computed-total-B"]
    assert f"{count_parameters(config, active=True).total / 1e9:.2f}" == row.cells["computed-active-B"]


def test_mtp_layers_are_included_on_request():
    assert model_config_from_hf(PUBLISHED["DeepSeek-V3"], mtp=True).mtp.num_layers == 1
    assert model_config_from_hf(PUBLISHED["Mixtral-8x7B"], mtp=True).mtp is None


def test_layers_of_deepseek_v4():
    """Number of parameters: see the recipe in docs/recipes.md."""
    values = PUBLISHED["DeepSeek-V4-Flash"]
    model = model_config_from_hf(values, mtp=True)
    assert f"{count_parameters(replace(model, mtp=None)).total / 1e9:.2f}" == "284.33"
    assert [layer.mixer.ratio for layer in (*model.layers, model.mtp.layer)] == values["compress_ratios"]
    assert [layer.moe.router.hash_vocab_size for layer in model.layers] == [129280] * 3 + [None] * 40
    assert {layer.mixer.rope.concentration for layer in model.layers if layer.mixer.ratio} == {1.0}
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    listed = {key: value for key, value in values.items() if key not in ("compress_ratios", "num_hash_layers")}
    listed |= {"layer_types": [kinds[ratio] for ratio in values["compress_ratios"][:43]]}
    listed |= {"mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40}
    assert model_config_from_hf(listed, mtp=True) == model


@pytest.mark.parametrize(("width", "rotated"), [(64, True), (96, False)])
def test_heads_of_an_indexer_without_a_hadamard_matrix_are_not_rotated(width: int, rotated: bool):
    """Leaving out the rotation is exact, because an orthogonal rotation of q and k does not change q k^T."""
    model = model_config_from_hf({**PUBLISHED["DeepSeek-V4-Flash"], "index_head_dim": width})
    assert {layer.mixer.indexer.rotate_activation for layer in model.layers if layer.mixer.indexer} == {rotated}


def test_a_window_of_128_counts_the_own_token_in_every_second_layer():
    layers = model_config_from_hf(PUBLISHED["GPT-OSS-20B"]).layers
    assert [layer.mixer.core.window for layer in layers] == [(127, 0), None] * 12


def test_both_spellings_of_rope_settings_mean_the_same():
    old = PUBLISHED["GPT-OSS-20B"]
    new = {key: value for key, value in old.items() if not key.startswith("rope")}
    new["rope_parameters"] = {**old["rope_scaling"], "rope_theta": old["rope_theta"]}
    assert model_config_from_hf(new) == model_config_from_hf(old)


@pytest.mark.parametrize(
    "settings, concentration",
    [
        ({}, yarn_mscale(8.0, 1.0)),
        ({"mscale": 2.0}, yarn_mscale(8.0, 1.0)),
        ({"mscale": 2.0, "mscale_all_dim": 0.0}, yarn_mscale(8.0, 1.0)),
        ({"mscale": 2.0, "mscale_all_dim": 0.5}, None),
        ({"mscale": 2.0, "mscale_all_dim": 0.5, "attention_factor": 1.5}, 1.5),
    ],
)
def test_yarn_concentration_follows_the_published_rule(settings: dict[str, float], concentration: float | None):
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, **settings}
    rope = model_config_from_hf({**PUBLISHED["Qwen3-30B-A3B"], "rope_scaling": yarn}).layers[0].mixer.rope
    assert (rope.scaling, rope.concentration) == ("yarn", concentration)


def test_yarn_without_a_factor_stretches_to_the_longest_position():
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 4096, "factor": None}
    rope = model_config_from_hf({**PUBLISHED["Qwen3-30B-A3B"], "rope_scaling": yarn}).layers[0].mixer.rope
    assert rope.scaling_factor == 10.0


@pytest.mark.parametrize(
    "name, change, said",
    [
        ("Mixtral-8x7B", {"model_type": "llama"}, "llama, which is not supported. Supported model types: mixtral,"),
        ("Mixtral-8x7B", {"model_type": "llama", "num_hidden_layers": "32"}, "llama, which is not supported"),
        ("Mixtral-8x7B", {"model_type": "phimoe"}, "model type phimoe mixes two experts by thresholds"),
        ("Mixtral-8x7B", {"model_type": "granitemoe"}, "multiplies embeddings, residual branches and logits"),
        ("Mixtral-8x7B", {"model_type": "hunyuan_v1_moe"}, "normalises q and k after their rotation"),
        ("Mixtral-8x7B", {"model_type": "minimax"}, "has attention with a constant decay, and scaled residuals"),
        ("Mixtral-8x7B", {"model_type": "ernie4_5_moe", "use_bias": True}, "use_bias"),
        ("Mixtral-8x7B", {"hidden_act": "gelu"}, "activation gelu"),
        ("Mixtral-8x7B", {"hidden_size": None}, "has no hidden_size"),
        ("Mixtral-8x7B", {"hidden_size": "4096"}, "hidden_size = '4096'"),
        ("Mixtral-8x7B", {"rope_scaling": {"type": "longrope"}}, "rope type longrope"),
        ("Mixtral-8x7B", {"rope_scaling": {"type": "linear"}}, "has no factor"),
        ("Qwen2-57B-A14B", {"use_sliding_window": True}, "use_sliding_window"),
        ("OLMoE-1B-7B", {"clip_qkv": 8.0}, "clip_qkv"),
        ("GPT-OSS-20B", {"swiglu_alpha": 1.0}, "sigmoid gain of 1.0"),
        ("DeepSeek-V3", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("DeepSeek-V3", {"attention_bias": True}, "attention_bias"),
        ("DeepSeek-V3", {"topk_group": 2}, "best 2 experts at top-8 in 2 groups"),
        ("DeepSeek-V3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("DeepSeek-V3", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ("Moonlight-16B-A3B", {"num_experts_per_tok": 1}, "renormalises the score of a single expert"),
        ("GLM-4.5-Air", {"num_experts_per_tok": 1}, "renormalises the score of a single expert"),
        ("GPT-OSS-20B", {"layer_types": ["chunked_attention", "full_attention"] * 12}, "types chunked_attention"),
        ("GPT-OSS-20B", {"layer_types": ["full_attention"] * 23}, "has 24 layers and 23 layer_types"),
        ("DeepSeek-V2-Lite", {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        ("DeepSeek-V4-Flash", {"compress_ratios": [0] * 42}, "has 43 layers and 42 compression ratios"),
        ("DeepSeek-V4-Flash", {"compress_ratios": [1] * 43}, "groups of 1 tokens"),
        ("DeepSeek-V4-Flash", {"layer_types": ["full_attention"] * 43}, "types full_attention (layer_types)"),
        ("DeepSeek-V4-Flash", {"mlp_layer_types": ["dense"] * 43}, "types dense (mlp_layer_types)"),
        (
            "DeepSeek-V4-Flash",
            {
                "layer_types": ["heavily_compressed_attention"] * 43,
                "compress_rates": {"heavily_compressed_attention": 4},
            },
            "has the compress_rates {'heavily_compressed_attention': 4}",
        ),
        ("DeepSeek-V4-Flash", {"n_shared_experts": 2}, "has 2 shared experts"),
        ("DeepSeek-V2-Lite", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
        ("DeepSeek-V2-Lite", {"norm_topk_prob": True}, "norm_topk_prob"),
        (
            "GPT-OSS-20B",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "RoPE parameters for full_attention",
        ),
        ("Mixtral-8x7B", {"num_hidden_layers": 10**30}, "has num_hidden_layers = 1000"),
        ("Mixtral-8x7B", {"num_hidden_layers": "32"}, "invalid value"),
        ("Mixtral-8x7B", {"rms_norm_eps": "small"}, "invalid value: could not convert string to float"),
        ("Qwen3-30B-A3B", {"decoder_sparse_step": 0}, "invalid value"),
        ("Qwen3-30B-A3B", {"rope_scaling": "yarn"}, "invalid value"),
        (
            "DeepSeek-V2-Lite",
            {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3},
            "best expert at top-6 in 3 groups",
        ),
    ],
)
def test_unsupported_options_are_rejected(name: str, change: dict[str, Any], said: str):
    with pytest.raises(CheckpointProblem, match="config.json") as caught:
        model_config_from_hf({**PUBLISHED[name], **change})
    assert said in str(caught.value)


def test_moe_layer_freq_selects_the_moe_layers():
    config = model_config_from_hf({**PUBLISHED["DeepSeek-V3"], "moe_layer_freq": 2, "num_hidden_layers": 8})
    assert [index for index, layer in enumerate(config.layers) if layer.is_moe] == [4, 6]


@pytest.mark.parametrize(("given", "dim"), [({}, 64), ({"partial_rotary_factor": 0.25}, 32)])
def test_glm_rotates_half_of_a_head_by_default(given: dict[str, float], dim: int):
    silent = {key: value for key, value in PUBLISHED["GLM-4.5-Air"].items() if key != "partial_rotary_factor"}
    assert model_config_from_hf({**silent, **given}).layers[0].mixer.rope.dim == dim


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"kimi_k2"}))
def test_missing_keys_have_the_defaults_of_transformers(family: str):
    """Lists of layers and RoPE settings, which every file has, are left out, and so are keys without which a file is
    rejected."""
    always = {"model_type", "layer_types", "layers_block_type", "mlp_layer_types", "rope_parameters"}
    options = {"dots1": {"norm_topk_prob": True, "n_routed_experts": 128, "num_experts_per_tok": 6}}
    options["deepseek_v2"] = {"num_experts_per_tok": 6}
    own = transformers.CONFIG_MAPPING[family](**options.get(family, {})).to_dict()
    values = {key: value for key, value in own.items() if value is not None}
    model = model_config_from_hf(values)
    for key in sorted(set(values) - always):
        try:
            found = model_config_from_hf({name: value for name, value in values.items() if name != key})
        except CheckpointProblem as problem:
            assert "add it to the file" in str(problem), key
        else:
            assert config_differences(found, model) == [], key


def test_a_window_without_a_size_is_that_of_the_family():
    config = model_config_from_hf({**PUBLISHED["Qwen3-30B-A3B"], "use_sliding_window": True})
    assert config.layers[0].mixer.core.window == (4095, 0)


def test_only_latent_norms_may_take_the_epsilon_of_a_config():
    published = model_config_from_hf(PUBLISHED["Moonlight-16B-A3B"])
    flags = model_config(ROWS["Moonlight-16B-A3B"])
    assert config_differences(flags, with_latent_norms_of(flags, published)) == []
    odd = replace(flags.layers[0].mixer, norm=replace(flags.layers[0].mixer.norm, eps=1e-3))
    other = replace(flags, layers=(replace(flags.layers[0], mixer=odd), *flags.layers[1:]))
    assert config_differences(other, with_latent_norms_of(other, published)) == [
        "layer 0 mixer norm eps: 0.001, published 1e-06"
    ]
    assert config_differences(flags, with_latent_norms_of(replace(flags, layers=flags.layers[:4]), published)) == [
        "layers 4-26 mixer norm eps: 1e-05, published 1e-06"
    ]


def test_differences_name_the_layer_the_field_and_both_values():
    published = model_config_from_hf(PUBLISHED["Mixtral-8x7B"])
    last = published.layers[-1]
    mixer = last.mixer
    assert isinstance(mixer, AttentionConfig)
    wrong = replace(last, mixer=replace(mixer, rope=replace(mixer.rope, base=10000.0), num_query_groups=4))
    ours = replace(published, layers=(*published.layers[:-1], wrong), tied_embeddings=True)
    assert config_differences(ours, published) == [
        "tied_embeddings: True, published False",
        "layer 31 mixer num_query_groups: 4, published 8",
        "layer 31 mixer rope base: 10000.0, published 1000000.0",
    ]
    assert config_differences(replace(ours, layers=ours.layers[:4]), published) == ["number of layers: 4, published 32"]


def test_layers_that_differ_alike_share_a_line():
    published = model_config_from_hf(PUBLISHED["GPT-OSS-20B"])
    unwindowed = replace(published, layers=(published.layers[1],) * 24)
    windows = ", ".join(str(layer) for layer in range(0, 24, 2))
    assert config_differences(unwindowed, published) == [
        f"layers {windows} mixer core window: None, published (127, 0)"
    ]


def test_training_options_are_not_differences():
    published = model_config_from_hf(PUBLISHED["DeepSeek-V3"])
    layer = published.layers[-1]
    moe = layer.feed_forward
    router = replace(moe.router, balancing=("seq_aux_loss",), aux_loss_coeffs=(1e-4,), z_loss_coeff=1e-3, dtype=None)
    ours = replace(layer, feed_forward=replace(moe, router=router, experts=replace(moe.experts, grouped=False)))
    assert (
        config_differences(replace(published, layers=(*published.layers[:-1], ours), vocab_size=129536), published)
        == []
    )


def test_shared_keys_of_glm_are_read_in_every_form():
    names = {"q_lora_rank": 64, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8, "num_hidden_layers": 7}
    glm = {**PUBLISHED["DeepSeek-V3"], **names, "model_type": "glm_moe_dsa", "first_k_dense_replace": 1}
    kinds = [False, False, True, False, True, False, True]
    for given in (
        {"index_topk_freq": 2, "index_skip_topk_offset": 2},
        {"index_topk_pattern": "FFSFSFS"},
        {"indexer_types": ["shared" if kind else "full" for kind in kinds]},
    ):
        layers = model_config_from_hf({**glm, **given}).layers
        assert [layer.mixer.reuses_topk for layer in layers] == kinds
        assert (layers[0].mixer.indexer.topk_freq, layers[0].mixer.indexer.skip_topk_offset) == (2, 2)
    with pytest.raises(CheckpointProblem, match="indexers in layers that --dsa-indexer-topk-freq does not describe"):
        model_config_from_hf({**glm, "index_topk_pattern": "FSFFFFF"})
