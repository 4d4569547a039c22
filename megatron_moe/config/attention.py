"""Attention: norms, rotary embeddings, grouped-query attention and multi-latent attention (MLA)."""

import math
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """RMSNorm or LayerNorm over the last dim."""

    kind: Literal["RMSNorm", "LayerNorm"] = "LayerNorm"
    """`--normalization`"""
    eps: float = 1e-5
    """`--norm-epsilon`"""
    zero_centered: bool = False
    """Stores gamma - 1, initialised to 0 (`--apply-layernorm-1p`)."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (arXiv 2104.09864) and its context extensions."""

    dim: int
    """Rotated channels per head: head_dim * rotary_percent, or `qk_rope_dim` of MLA."""
    base: float = 10000.0
    interleaved: bool = False
    """Rotates the channel pairs (0, 1), (2, 3), … instead of (0, D/2), (1, D/2 + 1), …"""
    scaling: Literal["none", "llama3", "linear", "yarn"] = "none"
    scaling_factor: float = 1.0
    """Context extension factor of llama3, linear and yarn scaling."""
    original_max_positions: int = 4096
    """llama3 and yarn only: context length before the extension."""
    low_freq_factor: float = 1.0
    """llama3 only: wavelengths above `original_max_positions` / `low_freq_factor` are scaled by `scaling_factor`."""
    high_freq_factor: float = 4.0
    """llama3 only: wavelengths below `original_max_positions` / `high_freq_factor` are unchanged."""
    beta_fast: float = 32.0
    """yarn only: dims with more rotations than this over the original context keep their frequency."""
    beta_slow: float = 1.0
    """yarn only: dims with fewer rotations than this over the original context are scaled by `scaling_factor`."""
    mscale: float = 1.0
    """yarn only."""
    mscale_all_dim: float = 0.0
    """yarn only; also part of MLA's softmax scale."""
    truncate: bool = True
    """yarn only: rounds the correction range to whole dims (`--yarn-correction-range-round-to-int`)."""
    concentration: float | None = None
    """yarn only: factor on cos and sin (GPT-OSS: 0.1 ln(factor) + 1). None: yarn_mscale(factor, mscale) /
    yarn_mscale(factor, mscale_all_dim)."""


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature correction for a context extended by `factor` (arXiv 2309.00071 equation 22).

    With m = yarn_mscale(factor, mscale_all_dim), MLA's softmax scale is m^2 / sqrt(q_head_dim).
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


ContextExchange = Literal["p2p", "allgather", "a2a", "a2a+p2p"]
"""Exchange of keys and values between context-parallel ranks (`--cp-comm-type`)."""


@dataclass(frozen=True, kw_only=True)
class CoreAttentionConfig:
    """Softmax attention: softmax(q k^T * softmax_scale + mask) v."""

    softmax_scale: float
    causal: bool = True
    window: tuple[int, int] | None = None
    """Sliding window: number of keys to the (left, right) of the query's position that it attends to, -1 without limit;
    (127, 0) is a causal window of 128 tokens. None: no window."""
    sinks: bool = False
    """Adds one learned logit per head to the softmax denominator (`--softmax-type learnable`)."""
    off_by_one: bool = False
    """Adds a constant zero logit to the softmax denominator (`--softmax-type off-by-one`)."""
    dropout: float = 0.0
    context_exchange: ContextExchange = "p2p"
    """Exchange of keys and values, used only with several context-parallel ranks."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Multi-head or grouped-query attention."""

    hidden_size: int
    num_heads: int
    """`--num-attention-heads`"""
    num_query_groups: int
    head_dim: int
    core: CoreAttentionConfig
    rope: RopeConfig | None
    """None: no rotation (learned absolute positions, or a layer without position embedding)."""
    qk_norm: Literal["none", "per_head", "full", "l2"] = "none"
    """Norm of q and k. per_head: over each head (Qwen3); full: over all heads jointly (OLMoE, MiniMax); l2: over each
    head, without a weight (Llama 4)."""
    norm: NormConfig = NormConfig()
    """Kind and epsilon of `qk_norm`."""
    qkv_bias: bool = False
    out_bias: bool = False
    """`--add-bias-linear`"""
    output_gate: bool = False
    """Multiplies the attention output by sigmoid(gate), projected with q, k and v (`--attention-output-gate`)."""

    @property
    def q_head_dim(self) -> int:
        return self.head_dim

    @property
    def v_head_dim(self) -> int:
        return self.head_dim

    @property
    def q_width(self) -> int:
        """Width of q over all heads."""
        return self.num_heads * self.head_dim

    @property
    def out_width(self) -> int:
        """Width of the attention output over all heads."""
        return self.q_width

    @property
    def kv_width(self) -> int:
        """Width of k (equal to the width of v) over all query groups."""
        return self.num_query_groups * self.head_dim

    @property
    def keys_values_width(self) -> int:
        """Width of k and v together."""
        return 2 * self.kv_width

    @property
    def qkv_width(self) -> int:
        """Output width of the fused projection to q, the optional output gate, k and v."""
        return (2 if self.output_gate else 1) * self.q_width + 2 * self.kv_width

    @property
    def matrix_elements(self) -> int:
        """Elements of the projections."""
        return self.hidden_size * (self.qkv_width + self.q_width)

    def groups_divide_over(self, tp: int) -> bool:
        """Whether each tensor-parallel rank holds whole query groups, or each group is shared by equally many ranks."""
        groups = self.num_query_groups
        return groups % tp == 0 or tp % groups == 0 and 2 * self.kv_width % tp == 0

    def shard(self, tp: int) -> "AttentionConfig":
        """Config of one tensor-parallel rank's heads, with at least one query group. Ranks that share a query group
        each hold only a part of its k and v projection."""
        groups = max(self.num_query_groups // tp, 1)
        return replace(self, num_heads=self.num_heads // tp, num_query_groups=groups)


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1)."""

    hidden_size: int
    num_heads: int
    """`--num-attention-heads`"""
    q_lora_rank: int | None
    """Width of the compressed q; None: q is projected directly from the hidden state."""
    kv_lora_rank: int
    """Width of the compressed k and v."""
    qk_head_dim: int
    """Channels of a q or k head without position embedding."""
    qk_rope_dim: int
    """Rotated channels per q head, and of the single rotated k head that all heads share (`--qk-pos-emb-head-dim`)."""
    v_head_dim: int
    core: CoreAttentionConfig
    rope: RopeConfig
    qk_norm: bool
    """Normalises the compressed q and the compressed kv (`--qk-layernorm`)."""
    norm: NormConfig = NormConfig(kind="RMSNorm")
    """Kind and epsilon of `qk_norm`."""

    @property
    def q_head_dim(self) -> int:
        return self.qk_head_dim + self.qk_rope_dim

    @property
    def q_width(self) -> int:
        """Width of q over all heads."""
        return self.num_heads * self.q_head_dim

    @property
    def out_width(self) -> int:
        """Width of the attention output over all heads."""
        return self.num_heads * self.v_head_dim

    @property
    def keys_values_width(self) -> int:
        """Width of k and v together, over all heads."""
        return self.q_width + self.out_width

    @property
    def kv_up_width(self) -> int:
        """Output width of the up-projection of the compressed kv: k without its rotated channels, and v."""
        return self.num_heads * (self.qk_head_dim + self.v_head_dim)

    @property
    def matrix_elements(self) -> int:
        """Elements of the projections."""
        down = self.kv_lora_rank + self.qk_rope_dim + self.out_width
        if self.q_lora_rank is None:
            query = self.hidden_size * self.q_width
        else:
            query = self.q_lora_rank * (self.hidden_size + self.q_width)
        return query + self.hidden_size * down + self.kv_lora_rank * self.kv_up_width

    def shard(self, tp: int) -> "MLAConfig":
        """Config of one tensor-parallel rank's heads."""
        return replace(self, num_heads=self.num_heads // tp)
