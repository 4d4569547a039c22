"""Kinds of layers whose GEMMs overlap with tensor-parallel communication."""

from dataclasses import replace

import pytest

from megatron_moe.config.model import LayerConfig, MTPConfig
from megatron_moe.config.moe import SharedExpertsConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.tp_overlap import OVERLAPPED, overlapped_gemms, tp_overlap_layer_kind
from tests.helpers import tiny
from tests.helpers.tiny_models import attention_config, layer_config, mla_config, mlp_config, moe_config

PARALLEL = ParallelConfig(tp=2, world_size=2, sequence_parallel=True, tp_comm_overlap=OVERLAPPED)
SHARED = replace(moe_config(), shared=SharedExpertsConfig(mlp=mlp_config(ffn_hidden_size=14)))
MLP = {"linear_fc1": "fc1", "linear_fc2": "fc2"}
CASES = {
    "dense": (layer_config(attention_config(), mlp_config()), MLP | {"linear_qkv": "qkv", "linear_proj": "proj"}),
    "latent attention and shared experts": (
        layer_config(mla_config(), SHARED),
        {"linear_q_up_proj": "qkv", "linear_kv_up_proj": "qkv", "linear_proj": "proj"}
        | {f"shared_experts.{name}": kind for name, kind in MLP.items()},
    ),
    # the kv latent of all positions is computed from the input that q gathers
    "no latent queries": (
        layer_config(mla_config(q_lora_rank=None), mlp_config()), MLP | {"linear_q_proj": "qkv", "linear_proj": "proj"}
    ),
}  # fmt: skip


@pytest.mark.parametrize(("layer", "expected"), CASES.values(), ids=CASES)
def test_sharded_layers_of_mixers_mlps_and_shared_experts_take_part(
    layer: LayerConfig, expected: dict[str, str]
) -> None:
    kinds = {spec.name: tp_overlap_layer_kind(spec) for spec in layer.parameters(PARALLEL)}
    found = {name.removesuffix(".weight").partition(".")[2]: kind for name, kind in kinds.items() if kind}
    assert found == expected


def test_a_layer_overlaps_the_gemms_of_its_kind_only_under_sequence_parallelism() -> None:
    names = {
        name: overlapped_gemms(spec, PARALLEL)
        for spec in layer_config(attention_config()).parameters(PARALLEL)
        if (name := spec.name.partition(".")[2]).startswith("linear")
    }
    assert names["linear_qkv.weight"] == ("qkv_fprop", "qkv_dgrad", "qkv_wgrad")
    assert names["linear_proj.weight"] == ("proj_fprop", "proj_dgrad")
    for other in (replace(PARALLEL, sequence_parallel=False), replace(PARALLEL, tp=1)):
        assert not any(overlapped_gemms(spec, other) for spec in layer_config(attention_config()).parameters(other))


def test_the_input_projection_of_multi_token_prediction_does_not_take_part() -> None:
    """Its output is gathered too, so its input would be twice as wide as those of all other layers."""
    model = replace(tiny.plan().model, mtp=MTPConfig(num_layers=1))
    (weight,) = (spec for spec in model.mtp_parameters(PARALLEL) if spec.name.endswith("eh_proj.weight"))
    assert tp_overlap_layer_kind(weight) == ""
