"""Attention: grouped queries, multi-latent, windows, sinks."""

from dataclasses import dataclass
from typing import Literal

from arguments.flag import REQUIRED, flag
from arguments.values import LayerPattern


@dataclass(frozen=True, kw_only=True)
class AttentionFlags:
    """Heads, grouped-query and multi-latent attention, windows, sinks."""

    num_attention_heads: int = flag(REQUIRED, least=1, essential=True)
    """Query heads."""
    group_query_attention: bool = flag(False)
    """Several query heads share one key and value head."""
    num_query_groups: int = flag(1, least=1)
    """Key and value heads with `--group-query-attention`."""
    kv_channels: int | None = flag(None, least=1)
    """Width of a head. Not set: hidden size / heads."""
    qk_layernorm: bool = flag(False)
    """Norm of queries and keys; with multi-latent attention of the compressed queries, keys and values."""
    qk_layernorm_over: Literal["head", "all-heads"] = flag("head", status="ours")
    """`--qk-layernorm` over every head by itself (Qwen3) or over all heads together (OLMoE, MiniMax-M2)."""
    qk_l2_norm: bool = flag(False)
    """Norm of queries and keys over every head, without a weight (Llama 4); wins over `--qk-layernorm`."""
    add_qkv_bias: bool = flag(False)
    """Bias on the projection to queries, keys and values alone."""
    attention_dropout: float = flag(0.1, least=0, below=1)
    """Dropout on attention probabilities."""
    attention_output_gate: bool = flag(False)
    """A sigmoid gate per channel on the output of attention (Qwen3-Next)."""
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = flag("vanilla")
    """Sinks: none, a fixed zero logit, or one learned logit per head in the softmax denominator."""
    window_size: tuple[int, int] | None = flag(None, least=-1)
    """Sliding window LEFT,RIGHT: visible tokens on either side of the own one, -1 is no limit; 127,0 sees 128."""
    window_attn_skip_freq: LayerPattern | None = flag(None)
    """Layers with full attention among windowed ones: every n-th, or a list with 1 for a window."""
    qk_clip: bool = flag(False, status="not yet", note="logits are left alone")
    """Shrink query and key weights of heads whose largest logit exceeds a threshold."""
    qk_clip_alpha: float = flag(0.5, status="not yet", note="logits are left alone")
    """Share of the shrinking that falls on the queries."""
    qk_clip_threshold: float = flag(100.0, status="not yet", note="logits are left alone")
    """Largest logit that is left alone."""

    multi_latent_attention: bool = flag(False)
    """Multi-latent attention (DeepSeek)."""
    q_lora_rank: int | None = flag(None, least=1)
    """Width of compressed queries. Not set: queries are not compressed."""
    kv_lora_rank: int = flag(32, least=1)
    """Width of compressed keys and values."""
    qk_head_dim: int = flag(128, least=1)
    """Width of the part of a query or key head without rotation."""
    qk_pos_emb_head_dim: int = flag(64, least=2)
    """Width of the rotated part of a query or key head."""
    v_head_dim: int = flag(128, least=1)
    """Width of a value head."""
    rope_type: Literal["rope", "yarn"] | None = flag(None)
    """Rotation of multi-latent attention. Not set: yarn."""
    rotary_scaling_factor: float = flag(1.0, least=1)
    """YaRN: factor by which the context is extended."""
    original_max_position_embeddings: int = flag(4096, least=1)
    """YaRN in multi-latent attention: context length before extension."""
    mscale: float = flag(1.0, least=0)
    """YaRN: growth of cos and sin with the logarithm of the factor."""
    mscale_all_dim: float = flag(0.0, least=0)
    """YaRN: growth that is divided out of cos and sin again; in multi-latent attention its square joins the softmax
    scale."""

    experimental_attention_variant: str | None = flag(None, status="not yet", note="only softmax attention exists")
    """Another mixer in place of attention, such as gated_delta_net."""
    linear_attention_freq: LayerPattern | None = flag(None, status="not yet", note="only softmax attention exists")
    """Layers with linear attention."""
    linear_conv_kernel_dim: int = flag(4, status="not yet", harmless=True, note="only softmax attention exists")
    """Width of the convolution in linear attention."""
    linear_key_head_dim: int = flag(128, status="not yet", harmless=True, note="only softmax attention exists")
    """Width of a key head of linear attention."""
    linear_value_head_dim: int = flag(128, status="not yet", harmless=True, note="only softmax attention exists")
    """Width of a value head of linear attention."""
    linear_num_key_heads: int = flag(16, status="not yet", harmless=True, note="only softmax attention exists")
    """Key heads of linear attention."""
    linear_num_value_heads: int = flag(32, status="not yet", harmless=True, note="only softmax attention exists")
    """Value heads of linear attention."""

    dsa_indexer_n_heads: int | None = flag(None, status="not yet", note="only softmax attention over all tokens exists")
    """Heads of the indexer of sparse attention."""
    dsa_indexer_head_dim: int | None = flag(
        None, status="not yet", note="only softmax attention over all tokens exists"
    )
    """Width of an indexer head."""
    dsa_indexer_topk: int | None = flag(None, status="not yet", note="only softmax attention over all tokens exists")
    """Tokens that sparse attention keeps per query."""
    dsa_indexer_loss_coeff: float | None = flag(
        None, status="not yet", note="only softmax attention over all tokens exists"
    )
    """Weight of the indexer's loss."""
    dsa_indexer_use_sparse_loss: bool = flag(
        False, status="not yet", note="only softmax attention over all tokens exists"
    )
    """Compute that loss on kept tokens only."""
    csa_compress_ratios: str | None = flag(None, status="not yet", note="only softmax attention over all tokens exists")
    """Compression of keys and values per layer."""
    csa_compress_rotary_base: float = flag(
        40000.0, status="not yet", note="only softmax attention over all tokens exists"
    )
    """Base of the rotation of compressed keys."""
    csa_window_size: int = flag(128, status="not yet", note="only softmax attention over all tokens exists")
    """Window beside compressed attention."""
    o_groups: int = flag(8, status="not yet", note="one output projection exists")
    """Groups of the low-rank output projection."""
    o_lora_rank: int = flag(1024, status="not yet", note="one output projection exists")
    """Width of the low-rank output projection."""
