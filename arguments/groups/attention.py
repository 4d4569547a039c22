"""Attention flags."""

from dataclasses import dataclass
from typing import Literal

from arguments.flag import REQUIRED, differs, flag, new_flag, unsupported
from arguments.values import LayerPattern
from megatron_moe.config.linear_attention import CPMode


@dataclass(frozen=True, kw_only=True)
class AttentionFlags:
    """Heads, grouped-query and multi-latent attention, sliding windows, attention sinks."""

    num_attention_heads: int = flag(REQUIRED, least=1, essential=True)
    """Number of query heads."""
    group_query_attention: bool = flag(False)
    """Use grouped-query attention: query heads share key and value heads."""
    num_query_groups: int = flag(1, least=1)
    """Number of key and value heads for `--group-query-attention`."""
    kv_channels: int | None = flag(None, least=1)
    """Head dimension. Default: hidden size divided by the number of query heads."""
    qk_layernorm: bool = flag(False)
    """Normalise queries and keys; in multi-latent attention, normalise the compressed queries, keys and values."""
    qk_layernorm_over: Literal["head", "all-heads"] = new_flag("head")
    """Apply `--qk-layernorm` to each head separately (Qwen3) or over all heads together (OLMoE, MiniMax-M2)."""
    qk_l2_norm: bool = flag(False)
    """L2-normalise queries and keys per head without a weight (Llama 4); overrides `--qk-layernorm`."""
    add_qkv_bias: bool = flag(False)
    """Add biases to the query, key and value projections, even with `--disable-bias-linear`."""
    attention_dropout: float = flag(0.1, least=0, below=1)
    """Dropout probability of attention weights."""
    attention_output_gate: bool = flag(False)
    """Gate the attention output with a sigmoid per channel (Qwen3-Next)."""
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = flag("vanilla")
    """Attention sink in the softmax denominator: none (vanilla), logit 0 (off-by-one), or a learned logit per head."""
    window_size: tuple[int, int] | None = flag(None, least=-1)
    """Sliding window LEFT,RIGHT: number of visible tokens before and after the current one; -1 is unlimited. With 127,0
    a token attends to itself and the 127 tokens before it."""
    window_attn_skip_freq: LayerPattern | None = flag(None)
    """Layers without a sliding window: every n-th layer, or a list with 1 (window) or 0 (no window) per layer."""
    qk_clip: bool = flag(False)
    """After each step, rescale query and key weights of heads whose maximum logit exceeded `--qk-clip-threshold`."""
    qk_clip_alpha: float = flag(0.5, least=0, below=1)
    """Exponent alpha: with f = threshold / max logit, scale query weights by f^alpha and key weights by f^(1-alpha)."""
    qk_clip_threshold: float = flag(100.0, least=0)
    """Attention logit above which the weights of a head are rescaled."""

    multi_latent_attention: bool = flag(False)
    """Use multi-latent attention (DeepSeek)."""
    q_lora_rank: int | None = flag(None, least=1)
    """Rank of the query compression. Default: no query compression."""
    kv_lora_rank: int = flag(32, least=1)
    """Rank of the key and value compression."""
    qk_head_dim: int = flag(128, least=1)
    """Query and key head dimension without the rotary part."""
    qk_pos_emb_head_dim: int = flag(64, least=2)
    """Dimension of the rotary part of a query or key head."""
    v_head_dim: int = flag(128, least=1)
    """Value head dimension."""
    rope_type: Literal["rope", "yarn", "none"] | None = differs(None, "none leaves positions out, as in Kimi-Linear")
    """Rotary embedding of multi-latent attention. Default: yarn."""
    rotary_scaling_factor: float = flag(1.0, least=1)
    """YaRN: factor by which the context is extended."""
    original_max_position_embeddings: int = flag(4096, least=1)
    """YaRN (multi-latent attention): context length before extension."""
    mscale: float = flag(1.0, least=0)
    """YaRN: multiplies cos and sin by 0.1 * mscale * ln(scaling factor) + 1."""
    mscale_all_dim: float = flag(0.0, least=0)
    """YaRN: divides cos and sin by m = 0.1 * mscale_all_dim * ln(scaling factor) + 1; the softmax scale of
    multi-latent attention is multiplied by m^2."""

    experimental_attention_variant: str | None = unsupported(
        None,
        note="of Megatron's variants, gated delta nets and the attention of DeepSeek-V3.2 and V4 are implemented; Kimi "
        "delta attention (kda) is an addition",
        works=("gated_delta_net", "gdn", "kimi_delta_attention", "kda", "dsa", "dsv4_hybrid"),
    )
    """Mixer that replaces softmax attention: a gated delta net or Kimi delta attention in the layers of
    `--linear-attention-freq`, or, in all layers, sparse (dsa) or compressed attention (dsv4_hybrid) instead of
    multi-latent attention."""
    linear_attention_freq: LayerPattern | None = flag(None)
    """Layers with linear attention: all but every n-th layer, or a list with 1 (linear) or 0 (softmax) per layer."""
    linear_conv_kernel_dim: int = flag(4, least=1)
    """Kernel size of the causal convolution of linear attention, in tokens."""
    linear_key_head_dim: int = flag(128, least=1)
    """Key head dimension of linear attention."""
    linear_value_head_dim: int = flag(128, least=1)
    """Value head dimension of linear attention."""
    linear_num_key_heads: int = flag(16, least=1)
    """Number of key heads of linear attention."""
    linear_num_value_heads: int = flag(32, least=1)
    """Number of value heads of linear attention."""
    linear_cp_mode: CPMode = differs(
        "headwise", "also for Mamba; Megatron-LM's default is chunkwise in its development version"
    )
    """Context parallelism of linear attention and Mamba. headwise: all-to-all exchanges give each rank some heads for
    all positions. chunkwise: each rank computes all heads on its positions and gathers the state updates of earlier
    chunks; numbers of heads only have to be multiples of the tensor-parallel size."""

    dsa_indexer_n_heads: int | None = flag(None, least=1)
    """Number of heads of the indexer of sparse or compressed attention."""
    dsa_indexer_head_dim: int | None = flag(None, least=1)
    """Head dimension of the indexer."""
    dsa_indexer_topk: int | None = flag(None, least=1)
    """Number of keys that sparse attention selects per query."""
    dsa_indexer_loss_coeff: float | None = flag(None, least=0)
    """Coefficient of the indexer's loss, which is the KL divergence between its scores and the attention weights.
    Default: no indexer training."""
    dsa_indexer_use_sparse_loss: bool = flag(False)
    """Compute the indexer's loss from the selected keys instead of all keys."""
    dsa_indexer_topk_freq: int = flag(1, least=1)
    """After the first layers (--dsa-indexer-skip-topk-offset), only every N-th layer has an indexer, and the layers
    between attend to the keys that it selects (GLM-5.2: 4)."""
    dsa_indexer_skip_topk_offset: int = flag(0, least=0)
    """Number of first layers that all have an indexer, with --dsa-indexer-topk-freq above 1; 0 means 1."""
    dsa_indexer_rope_interleaved: bool = flag(False)
    """Rotate the indexer's channel pairs (0, 1), (2, 3), ... (GLM-5) instead of halves (DeepSeek-V3.2)."""
    dsa_indexer_rotate_activation: bool = flag(True, off=("--disable-dsa-indexer-rotate-activation",))
    """Multiply the indexer's queries and keys by a Hadamard matrix, which leaves their dot products unchanged."""
    dsa_indexer_scoring_relu: bool = flag(True, off=("--disable-dsa-indexer-scoring-relu",))
    """Apply ReLU to the dot products of queries and keys in the indexer's scores."""
    dsa_indexer_k_norm_epsilon: float | None = flag(None, least=0)
    """Epsilon of the LayerNorm of the indexer's keys. Default: the epsilon of the other norms."""
    csa_compress_ratios: LayerPattern | None = flag(None)
    """Compression ratios of compressed attention (`--experimental-attention-variant dsv4_hybrid`), one per layer and
    optionally one for multi-token prediction: the number of tokens per compressed entry. 0: sliding window only; 4:
    overlapping groups, from which an indexer selects; larger: groups that all later queries attend to."""
    csa_compress_rotary_base: float = flag(40000.0, least=0)
    """Rotary base of layers with compressed entries; other layers use `--rotary-base`."""
    csa_window_size: int = flag(128, least=1)
    """Sliding window of compressed attention in tokens, including the query's own: visible in addition to compressed
    entries."""
    csa_dense_mode: bool = flag(False)
    """Let queries attend to all earlier entries, without an indexer, in layers with ratio 4."""
    o_groups: int = flag(8, least=1)
    """Number of head groups of compressed attention, each with its own low-rank output projection."""
    o_lora_rank: int = flag(1024, least=1)
    """Rank of each head group's output projection."""
