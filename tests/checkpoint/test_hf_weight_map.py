"""Mapping of Hugging Face weights: every transform has an exact inverse, and every name of a model has one mapping."""

import pytest
import torch
from torch import Tensor

from megatron_moe.checkpoint.huggingface.config_map import FAMILIES, model_config_from_hf
from megatron_moe.checkpoint.huggingface.weight_map import (
    COPY,
    GATE_UP,
    INTERLEAVED_GATE_UP,
    TRANSPOSED,
    Transform,
    map_names,
    padded_rows,
    query_key_value,
)
from megatron_moe.config.model import ModelConfig
from tests.checkpoint.hf_models import configs
from tests.helpers.tiny_models import build
from tests.helpers.tolerances import EXACT

CONFIGS = configs()


def numbers(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


@pytest.mark.parametrize(
    "transform, shapes",
    [
        (COPY, [(5, 3)]),
        (GATE_UP, [(4, 3), (4, 3)]),
        (query_key_value(2, 3), [(24, 5), (8, 5), (8, 5)]),
        (query_key_value(2, 3), [(24,), (8,), (8,)]),
        (query_key_value(4, 1), [(8, 5), (8, 5), (8, 5)]),
        (query_key_value(1, 4), [(8, 5), (2, 5), (2, 5)]),
        (TRANSPOSED, [(3, 4, 5)]),
        (INTERLEAVED_GATE_UP, [(3, 4, 10)]),
        (INTERLEAVED_GATE_UP, [(3, 10)]),
        (padded_rows(5, 8), [(5, 3)]),
        (padded_rows(5, 5), [(5, 3)]),
    ],
)
def test_every_transform_is_undone_exactly(transform: Transform, shapes: list[tuple[int, ...]]):
    theirs = [numbers(*shape) + 1000 * index for index, shape in enumerate(shapes)]
    back = transform.to_hf(transform.from_hf(theirs))
    assert len(back) == len(theirs)
    for index, (actual, expected) in enumerate(zip(back, theirs, strict=True)):
        EXACT.check(actual, expected, f"part {index}")


def test_rows_of_q_k_and_v_are_interleaved_per_query_group():
    """Two query groups with two q heads of width 1 each: q0 q1 k0 v0 | q2 q3 k1 v1."""
    q, k, v = torch.tensor([0.0, 1, 2, 3]), torch.tensor([10.0, 11]), torch.tensor([20.0, 21])
    EXACT.check(query_key_value(2, 2).from_hf([q, k, v]), [0.0, 1, 10, 20, 2, 3, 11, 21])


def test_gate_rows_come_before_up_rows():
    EXACT.check(GATE_UP.from_hf([torch.zeros(2, 1), torch.ones(2, 1)]), [[0.0], [0.0], [1.0], [1.0]])


def test_alternating_columns_become_halves_of_rows():
    """One expert with one input: columns g0 u0 g1 u1."""
    EXACT.check(INTERLEAVED_GATE_UP.from_hf([torch.tensor([[[0.0, 10, 1, 11]]])]), [[[0.0], [1], [10], [11]]])
    EXACT.check(INTERLEAVED_GATE_UP.from_hf([torch.tensor([[0.0, 10, 1, 11]])]), [[0.0, 1, 10, 11]])


def test_padding_rows_are_zero():
    EXACT.check(padded_rows(1, 3).from_hf([torch.ones(1, 2)]), [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]])


def spec_and_names(name: str) -> tuple[ModelConfig, list[str]]:
    config = model_config_from_hf(CONFIGS[name].to_dict())
    model = build(config)
    biases = [name for name, _ in model.named_buffers() if name.endswith("expert_bias")]
    return config, [*dict(model.named_parameters()), *biases]


@pytest.mark.parametrize("name", CONFIGS)
def test_names_map_to_disjoint_hf_names(name: str):
    config, ours = spec_and_names(name)
    mappings, unknown = map_names(CONFIGS[name].model_type, ours, config, config)
    theirs = [each for mapping in mappings for each in mapping.hf_names]
    assert unknown == []
    assert {mapping.name for mapping in mappings} == set(ours)
    assert len(theirs) == len(set(theirs))


def test_names_of_kimi_k2_are_those_of_deepseek_v3():
    config, ours = spec_and_names("deepseek_v3, yarn")
    kimi, deepseek = (map_names(family, ours, config, config)[0] for family in ("kimi_k2", "deepseek_v3"))
    assert [each.hf_names for each in kimi] == [each.hf_names for each in deepseek]


def test_a_name_that_the_family_does_not_have_is_reported():
    config, ours = spec_and_names("mixtral")
    foreign = "decoder.layers.0.mlp.shared_experts.linear_fc1.weight"
    _, unknown = map_names("mixtral", [*ours, foreign, "embedding.position_embeddings.weight"], config, config)
    assert unknown == [foreign, "embedding.position_embeddings.weight"]


def test_names_of_published_files_by_example():
    config, ours = spec_and_names("deepseek_v3, yarn")
    mappings, _ = map_names("deepseek_v3", ours, config, config)
    found = {(mapping.name, mapping.expert): mapping.hf_names for mapping in mappings}
    assert found["decoder.layers.2.mlp.experts.linear_fc1.weight", 5] == (
        "model.layers.2.mlp.experts.5.gate_proj.weight",
        "model.layers.2.mlp.experts.5.up_proj.weight",
    )
    assert found["decoder.layers.0.self_attention.linear_kv_down_proj.weight", None] == (
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
    )
    assert found["decoder.layers.1.mlp.router.expert_bias", None] == (
        "model.layers.1.mlp.gate.e_score_correction_bias",
    )


def test_mtp_depth_d_is_the_layer_after_the_last_plus_d():
    config, _ = spec_and_names("glm4_moe")
    ours = ["mtp.layers.1.enorm.weight", "mtp.layers.1.transformer_layer.mlp.router.weight"]
    mappings, _ = map_names("glm4_moe", ours, config, config)
    assert [mapping.hf_names for mapping in mappings] == [
        ("model.layers.4.enorm.weight",),
        ("model.layers.4.mlp.gate.weight",),
    ]


def test_every_family_has_names():
    config, _ = spec_and_names("mixtral")
    for model_type in FAMILIES:
        assert map_names(model_type, ["decoder.final_layernorm.weight"], config, config)[1] == []
