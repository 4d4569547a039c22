"""Tiny model configs and microbatches. All sizes differ, so that swapped dimensions cause errors."""

from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.attention import AttentionConfig, CoreAttentionConfig, NormConfig, RopeConfig
from megatron_moe.config.compressed_attention import CompressedAttentionConfig
from megatron_moe.config.dsa import DSAConfig, IndexerConfig
from megatron_moe.config.gated_delta_net import GatedDeltaNetConfig
from megatron_moe.config.hyper_connections import HyperConnectionsConfig
from megatron_moe.config.kimi_delta_attention import KimiDeltaAttentionConfig
from megatron_moe.config.mamba import MambaConfig
from megatron_moe.config.mla import MLAConfig
from megatron_moe.config.mlp import MLPConfig
from megatron_moe.config.model import InitConfig, LayerConfig, ModelConfig
from megatron_moe.config.moe import MoEConfig, SharedExpertsConfig
from megatron_moe.data.batch import MicroBatch, MicrobatchContext, TokenMeta
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.model.gpt import GPT
from megatron_moe.model.init import init_parameters
from megatron_moe.parallel.context import ParallelContext
from tests.helpers import tiny

RMS = tiny.NORM
HIDDEN, VOCAB, SWIGLU = tiny.HIDDEN, tiny.VOCAB, tiny.SWIGLU
UNIT_GAIN = InitConfig(method="unit_gain")


def attention_config(**changes: Any) -> AttentionConfig:
    """Attention with six query heads in two groups and RoPE. `core` changes fields of the core attention."""
    core = replace(tiny.attention().core, **changes.pop("core", {}))
    return tiny.attention(**{"num_heads": 6, "core": core, **changes})


def mla_config(**changes: Any) -> MLAConfig:
    """Multi-latent attention with three heads and latents for q and kv."""
    core = changes.pop("core", {})
    config = MLAConfig(
        hidden_size=HIDDEN,
        num_heads=3,
        q_lora_rank=10,
        kv_lora_rank=8,
        qk_head_dim=5,
        qk_rope_dim=4,
        v_head_dim=7,
        core=CoreAttentionConfig(**{"softmax_scale": 9**-0.5, **core}),
        rope=RopeConfig(dim=4, interleaved=True),
        qk_norm=True,
        norm=RMS,
    )
    return replace(config, **changes)


def dsa_config(*, indexer: Any = None, **changes: Any) -> DSAConfig:
    """Multi-latent attention to the 3 keys that an indexer with 8 heads selects. `indexer` changes its fields."""
    config = IndexerConfig(
        num_heads=8,
        head_dim=8,
        topk=3,
        rope=RopeConfig(dim=4),
        norm=NormConfig(kind="LayerNorm", eps=1e-6),
        indexer_loss_coeff=0.5,
    )
    return DSAConfig.of(mla_config(**changes), replace(config, **(indexer or {})))


def compressed_config(ratio: int = 4, *, indexer: Any = None, **changes: Any) -> CompressedAttentionConfig:
    """Attention with four heads in two groups, a window of 3 tokens and, with ratio 4, two selected entries. `indexer`
    changes the indexer's fields; False leaves it out."""
    rope = RopeConfig(
        dim=4,
        base=500.0,
        interleaved=True,
        scaling="yarn",
        scaling_factor=4.0,
        original_max_positions=64,
        beta_fast=4.0,
        concentration=1.0,
    )
    chooser = IndexerConfig(num_heads=8, head_dim=8, topk=2, rope=rope, norm=RMS, indexer_loss_coeff=0.5)
    config = CompressedAttentionConfig(
        hidden_size=HIDDEN,
        num_heads=4,
        head_dim=10,
        q_lora_rank=12,
        csa_window_size=3,
        ratio=ratio,
        indexer=replace(chooser, **(indexer or {})) if ratio == 4 and indexer is not False else None,
        o_groups=2,
        o_lora_rank=6,
        rope=rope if ratio else RopeConfig(dim=4, interleaved=True),
        norm=RMS,
    )
    return replace(config, **changes)


_LINEAR_SIZES = {
    "hidden_size": HIDDEN,
    "num_key_heads": 4,
    "num_value_heads": 8,
    "key_head_dim": 24,
    "value_head_dim": 5,
    "conv_width": 4,
    # with 1e-6, rounding grows by a factor of 3,000 in three steps, because the first outputs of a state are small
    "norm": NormConfig(kind="RMSNorm", eps=1e-3),
}
LINEAR_ATTENTION = MappingProxyType(
    {
        "delta": GatedDeltaNetConfig(**_LINEAR_SIZES),
        "mamba": MambaConfig(**_LINEAR_SIZES),
        "kda": KimiDeltaAttentionConfig(**_LINEAR_SIZES),
    }
)
"""Mixers with linear attention, by name: four key heads, each shared by two value heads."""


def mlp_config(**changes: Any) -> MLPConfig:
    return replace(MLPConfig(hidden_size=HIDDEN, ffn_hidden_size=20, activation=SWIGLU), **changes)


def moe_config(**router: Any) -> MoEConfig:
    """MoE with eight experts, two per token, and a shared expert, without balancing loss."""
    router = {"balancing": ("none",), "aux_loss_coeffs": (0.0,), **router}
    return tiny.moe(tiny.router(**router), shared=SharedExpertsConfig(mlp=mlp_config(ffn_hidden_size=13)))


def layer_config(
    mixer: AttentionConfig | MLAConfig | None = None, feed_forward: Any = None, **changes: Any
) -> LayerConfig:
    return LayerConfig(
        mixer=mixer or attention_config(), feed_forward=feed_forward or mlp_config(), **{"norm": RMS, **changes}
    )


def model_config(*layers: LayerConfig, **changes: Any) -> ModelConfig:
    """Model with RoPE and untied embeddings, and two dense layers unless layers are given."""
    return tiny.model(layers=layers or (layer_config(), layer_config()), **changes)


def with_streams_and_hash(config: ModelConfig, num_hash: int = 2) -> ModelConfig:
    """Adds three residual streams to all layers, and selects experts by token id in the first `num_hash` layers."""
    streams = HyperConnectionsConfig(num_streams=3, sinkhorn_iterations=4, init_gating_factor=0.5)
    layers = [replace(layer, residual=streams) for layer in config.layers]
    for index, layer in enumerate(layers[:num_hash]):
        if layer.moe is not None:
            router = replace(layer.moe.router, hash_vocab_size=config.vocab_size, expert_bias=False)
            layers[index] = replace(layer, feed_forward=replace(layer.moe, router=router))
    return replace(config, layers=tuple(layers))


def dense_ancestor(config: ModelConfig, granularity: int) -> ModelConfig:
    """Dense model from which an MoE is upcycled: one MLP as wide as `granularity` experts instead of the experts."""

    def dense(layer: LayerConfig) -> LayerConfig:
        if not isinstance(layer.feed_forward, MoEConfig):
            return layer
        experts = layer.feed_forward.experts
        width = experts.ffn_hidden_size * granularity
        mlp = mlp_config(
            hidden_size=experts.hidden_size, ffn_hidden_size=width, activation=experts.activation, bias=experts.bias
        )
        return replace(layer, feed_forward=mlp)

    return replace(config, layers=tuple(map(dense, config.layers)))


def build(config: ModelConfig, *, seed: int = 7, **stage: Any) -> GPT:
    """fp64 model on the reference kernels, with the initialisation of its config."""
    model = GPT(config, ParallelContext.single(), reference.bundle(), **stage)
    init_parameters(model, seed, config.init)
    return model


def make_mb(batch: int, seq: int, *, positions_BS: Tensor | None = None, **changes: Any) -> MicrobatchContext:
    """Context with positions 0 .. S-1 unless given, without dropout and metrics.

    `changes`: fields of the context or of its tokens.
    """
    if positions_BS is None:
        positions_BS = torch.arange(seq).repeat(batch, 1)
    names = {field.name for field in fields(TokenMeta)} & set(changes)
    tokens = TokenMeta(positions_BS=positions_BS, **{name: changes.pop(name) for name in names})
    return MicrobatchContext(tokens=tokens, **changes)


def microbatch(batch: int = 2, seq: int = 9, *, seed: int = 3, vocab: int = VOCAB, **changes: Any) -> MicroBatch:
    """Random tokens, some of which do not count in the loss."""
    generator = torch.Generator().manual_seed(seed)
    stream = torch.randint(vocab, (batch, seq + 1), generator=generator)
    mask = (torch.rand(batch, seq, generator=generator) > 0.2).double()
    return MicroBatch(
        tokens_BS=stream[:, :-1], labels_BS=stream[:, 1:], loss_mask_BS=mask, context=make_mb(batch, seq, **changes)
    )


def randn(*shape: int, seed: int = 11) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Weight gradients by name; every parameter must have one."""
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert not missing, f"no gradient reached {missing}"
    return {name: p.grad for name, p in model.named_parameters()}
