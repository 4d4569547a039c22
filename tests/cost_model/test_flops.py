"""FLOPs of the cost model against Megatron's formula and simple identities."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_moe.config.attention import AttentionConfig, CoreAttentionConfig, NormConfig
from megatron_moe.config.component import UNSHARDED
from megatron_moe.config.gated_delta_net import GatedDeltaNetConfig
from megatron_moe.config.kimi_delta_attention import KimiDeltaAttentionConfig
from megatron_moe.config.linear_attention import CHUNK, LinearAttentionConfig
from megatron_moe.config.mamba import MambaConfig
from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.config.model import LayerConfig, ModelConfig, MTPConfig
from megatron_moe.config.moe import MoEConfig
from megatron_moe.cost_model.flops import count_flops, flops_per_step, gemm_flops, peak_flops
from megatron_moe.kernels.reference import backend as reference
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


def linear_attention(kind: type[LinearAttentionConfig], *sizes: int) -> LinearAttentionConfig:
    names = ("hidden_size", "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    return kind(**dict(zip(names, sizes, strict=True)), conv_width=4, norm=NormConfig(kind="RMSNorm", eps=1e-6))


QWEN3_NEXT = linear_attention(GatedDeltaNetConfig, 2048, 16, 32, 128, 128)
NEMOTRON_3_NANO = linear_attention(MambaConfig, 2688, 8, 64, 128, 64)
KIMI_LINEAR = linear_attention(KimiDeltaAttentionConfig, 2304, 32, 32, 128, 128)


@pytest.mark.parametrize(
    ("mixer", "projections", "convolution", "recurrence"),
    [
        # q, k: 2048 each; v, gate: 4096 each; beta, decay: 32 each
        (QWEN3_NEXT, 2048 * (2 * 2048 + 2 * 4096 + 2 * 32) + 4096 * 2048, 4 * (2 * 2048 + 4096), 4 * 32 * 128**2),
        # x, gate: 4096 each; B, C: 1024 each; time steps: 64
        (NEMOTRON_3_NANO, 2688 * (2 * 4096 + 2 * 1024 + 64) + 4096 * 2688, 4 * (4096 + 2 * 1024), 7 * 4096 * 128 // 2),
        # q, k, v: 4096 each; beta: 32; decay and gate: through latents of 128
        (KIMI_LINEAR, 2304 * (3 * 4096 + 32 + 2 * 128) + 2 * 128 * 4096 + 4096 * 2304, 4 * 3 * 4096, 4 * 32 * 128**2),
    ],
    ids=["gated delta net", "Mamba-2", "Kimi delta attention"],
)
def test_linear_attention_costs_projections_convolution_and_recurrence(
    mixer: LinearAttentionConfig, projections: int, convolution: int, recurrence: int
):
    """Multiply-adds per token at published sizes, as Megatron counts them."""
    config = model_config(ROWS["Mixtral-8x2B"])
    before = count_flops(replace(config, layers=config.layers[:1]), 2, 96)
    after = count_flops(replace(config, layers=(replace(config.layers[0], mixer=mixer),)), 2, 96)
    assert after.attention == 6 * 2 * 96 * projections == 2 * gemm_flops(mixer.parameters(UNSHARDED), 96).attention
    assert after.core_attention == 6 * 2 * 96 * (convolution + recurrence)
    assert after.total - before.total == (
        after.attention + after.core_attention - before.attention - before.core_attention
    )


def counted_macs(mixer: LinearAttentionConfig, length: int) -> int:
    """Multiply-adds of the GEMMs in the forward of the reference implementation in chunks."""
    heads, keys = mixer.num_value_heads, mixer.key_head_dim
    q, k = (torch.rand(length, 1, mixer.num_key_heads, keys) for _ in range(2))
    per_channel = (keys,) if isinstance(mixer, KimiDeltaAttentionConfig) else ()
    beta = torch.rand(length, 1, heads) if mixer.solves_systems else None
    v, decay = torch.rand(length, 1, heads, mixer.value_head_dim), -torch.rand(length, 1, heads, *per_channel)
    with FlopCounterMode(display=False) as counter:
        reference.bundle().linear_attention(q, k, v, decay, beta, None, 1.0)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("mixer", [QWEN3_NEXT, NEMOTRON_3_NANO, KIMI_LINEAR], ids=["delta", "mamba", "kda"])
def test_recurrences_cost_about_the_gemms_of_their_chunks(mixer: LinearAttentionConfig):
    """Per head and token, chunks of C tokens need C multiply-adds per channel of a product of two chunks, and K V per
    read or update of the state. At the published sizes, Megatron's count equals that of Mamba-2, and is 8/9 of that of
    the delta rule, without the solution of its systems."""
    keys, values = mixer.key_head_dim, mixer.value_head_dim
    products = 2 if mixer.solves_systems else 1  # q with k; for the delta rule also k with k
    states = 3 if mixer.solves_systems else 2  # read for q, update; for the delta rule also read for k
    chunk = CHUNK * (products * keys + values) + states * keys * values
    small = replace(mixer, num_key_heads=2, num_value_heads=4)
    # with a decay per channel, products between blocks of 16 tokens are GEMMs only below the diagonal
    blocks = products * keys * (CHUNK - sum(range(0, CHUNK, 16)) * 16 // CHUNK)
    expected = chunk - (blocks if isinstance(mixer, KimiDeltaAttentionConfig) else 0)
    assert counted_macs(small, 2 * CHUNK) == 2 * CHUNK * 4 * expected
    model = mixer.recurrence_macs_per_token()
    assert model * (9 if mixer.solves_systems else 8) == 8 * mixer.num_value_heads * chunk


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
