"""FLOPs of the cost model against Megatron's formula and simple identities."""

from dataclasses import replace

import pytest

from megatron_moe.config.attention import AttentionConfig, CoreAttentionConfig
from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.config.model import LayerConfig, ModelConfig, MTPConfig
from megatron_moe.config.moe import MoEConfig
from megatron_moe.cost_model.flops import count_flops, flops_per_step, peak_flops
from tests.helpers.zoo import ZooRow, model_config, zoo_rows

ROWS = {str(row): row for row in zoo_rows()}


def megatron_formula(row: ZooRow, batch: int, seq: int) -> float:
    """Megatron's closed formula for FLOPs per step, computed from flags without iterating over layers."""
    hidden, heads, depths = map(row.integer, ("hidden-size", "num-attention-heads", "mtp-num-layers"))
    pattern = row.cells["moe-layer-freq"]
    num_dense = 0 if pattern == "1" else int(pattern.split("[0]")[1].split("+")[0].strip("*") or 1)
    num_layers = row.integer("num-layers") + depths
    num_moe = num_layers - num_dense
    gated = 3
    mlp = num_dense * row.integer("ffn-hidden-size") * gated
    routed = num_moe * row.integer("moe-ffn-hidden-size") * row.integer("moe-router-topk") * gated
    shared = num_moe * row.integer("moe-shared-expert-intermediate-size") * gated
    if row.is_mla:
        qk, rope, v = (row.integer(f) for f in ("qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim"))
        rank, kv_rank = row.integer_or_none("q-lora-rank"), row.integer("kv-lora-rank")
        query = hidden * heads * (qk + rope) if rank is None else rank * (hidden + heads * (qk + rope) + 1)
        linear = 6 * (query + kv_rank * (hidden + heads * (qk + v) + 1) + hidden * rope + heads * v * hidden)
        core = 6 * (heads * (qk + rope) / 2 + heads * v / 2)
    else:
        q, kv = row.integer("kv-channels") * heads, row.integer("kv-channels") * row.integer("num-query-groups")
        linear, core = 6 * (hidden * (q + 2 * kv) + q * hidden), 6 * q
    per_token = 6 * hidden * (mlp + routed + shared) + linear * num_layers
    per_token += 6 * depths * (3 * hidden + 2 * hidden**2) + 6 * hidden * row.integer("vocab-size") * (depths + 1)
    return batch * seq * per_token + batch * seq**2 * core * num_layers


@pytest.mark.parametrize("row", [row for row in zoo_rows() if row.cells["window-size"] == "-"], ids=str)
def test_causal_flops_of_public_models_equal_megatrons_formula(row: ZooRow):
    assert flops_per_step(model_config(row), 3, 4096) == megatron_formula(row, 3, 4096)


@pytest.mark.parametrize("name", ["GPT-OSS-20B", "GPT-OSS-120B"])
def test_keys_outside_the_window_are_not_counted(name: str):
    """Every second layer attends to 128 tokens: w S - w^2 / 2 pairs instead of S^2 / 2."""
    row, seq, window = ROWS[name], 4096, 128
    hidden_pairs = seq * seq / 2 - (window * seq - window * window / 2)
    q_width = row.integer("kv-channels") * row.integer("num-attention-heads")
    excess = 12 * q_width * hidden_pairs * row.integer("num-layers") / 2
    assert flops_per_step(model_config(row), 1, seq) == megatron_formula(row, 1, seq) - excess


def test_a_window_as_long_as_the_sequence_hides_nothing():
    row, seq = ROWS["GPT-OSS-20B"], 128
    assert flops_per_step(model_config(row), 1, seq) == megatron_formula(row, 1, seq)


def test_every_mtp_depth_costs_a_layer_a_projection_and_a_head():
    config = model_config(ROWS["GLM-4.5-Air"])
    without = count_flops(replace(config, mtp=None), 1, 512)
    two = count_flops(replace(config, mtp=MTPConfig(num_layers=2)), 1, 512)
    layer = count_flops(replace(config, layers=config.layers[-1:], mtp=None), 1, 512)
    own = 6 * 512 * (2 * 4096**2 + 3 * 4096)
    assert two.head == 3 * without.head
    assert two.mtp == 2 * (layer.total - layer.head + own)


def test_latent_experts_cost_their_width_and_two_projections():
    config = model_config(ROWS["Mixtral-8x2B"])
    moe = config.layers[0].feed_forward
    assert isinstance(moe, MoEConfig)
    latent = replace(moe, latent_size=512, experts=replace(moe.experts, hidden_size=512))
    count = count_flops(replace(config, layers=(replace(config.layers[0], feed_forward=latent),)), 1, 16)
    assert count.experts == 16 * 6 * 2048 * (5440 * 2 * 3 * 512 // 2048 + 2 * 512)


def test_an_ungated_mlp_has_two_matrices_and_an_output_gate_is_a_third_query():
    config = model_config(ROWS["Mixtral-8x2B"])
    moe, mixer = config.layers[0].feed_forward, config.layers[0].mixer
    assert isinstance(moe, MoEConfig) and isinstance(mixer, AttentionConfig)
    plain = replace(moe, experts=replace(moe.experts, activation=ActivationConfig(kind="squared_relu")))
    layer = LayerConfig(mixer=replace(mixer, output_gate=True), feed_forward=plain, norm=config.norm)
    before, after = (count_flops(replace(config, layers=(each,)), 1, 16) for each in (config.layers[0], layer))
    assert 3 * after.experts == 2 * before.experts
    assert after.attention - before.attention == 16 * 6 * 2048 * 2048


def test_attention_without_a_mask_counts_every_pair():
    config: ModelConfig = model_config(ROWS["Mixtral-8x2B"])
    mixer = config.layers[0].mixer
    config = replace(config, layers=config.layers[:1])
    open_core = CoreAttentionConfig(softmax_scale=1.0, causal=False)
    unmasked = replace(config, layers=(replace(config.layers[0], mixer=replace(mixer, core=open_core)),))
    assert count_flops(unmasked, 1, 64).core_attention == 2 * count_flops(config, 1, 64).core_attention


@pytest.mark.parametrize(
    "device, dtype, peak",
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H200", "fp32", 67e12),
        ("NVIDIA GH200 480GB", "bf16", 989e12),
        ("NVIDIA B200", "bf16", 2250e12),
        ("NVIDIA GB200", "bf16", 2500e12),
        ("NVIDIA A100-SXM4-80GB", "fp16", 312e12),
        ("NVIDIA H20", "bf16", 148e12),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("cpu", "fp32", None),
        ("AMD EPYC 9654", "fp64", None),
    ],
)
def test_peaks_are_dense_and_absent_where_unknown(device: str, dtype: str, peak: float | None):
    assert peak_flops(device, dtype) == peak
