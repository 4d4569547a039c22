"""Attention: norms, rotary embeddings, grouped-query attention and multi-latent attention (MLA)."""

import math
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """RMSNorm or LayerNorm over the last dim."""

    kind: Literal["RMSNorm", "LayerNorm"] = "LayerNorm"
    """Type of norm (`--normalization`)."""
    eps: float = 1e-5
    """Constant added to the variance or mean square (`--norm-epsilon`)."""
    zero_centered: bool = False
    """Stores the weight as gamma - 1, initialised to 0 (`--apply-layernorm-1p`)."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (arXiv 2104.09864) and its context extensions."""

    dim: int
    """Number of rotated channels per head: head_dim * rotary_percent, or `qk_rope_dim` for MLA."""
    base: float = 10000.0
    interleaved: bool = False
    """Rotates the channel pairs (0, 1), (2, 3), … instead of (0, D/2), (1, D/2 + 1), …"""
    scaling: Literal["none", "llama3", "linear", "yarn"] = "none"
    scaling_factor: float = 1.0
    """llama3, linear and yarn only: factor by which the context is extended."""
    original_max_positions: int = 4096
    """llama3 and yarn only: context length before the extension."""
    low_freq_factor: float = 1.0
    """llama3 only: wavelengths above `original_max_positions / low_freq_factor` are multiplied by `scaling_factor`."""
    high_freq_factor: float = 4.0
    """llama3 only: wavelengths below `original_max_positions / high_freq_factor` are unchanged."""
    beta_fast: float = 32.0
    """yarn only: channel pairs with more rotations than this over the original context keep their frequency."""
    beta_slow: float = 1.0
    """yarn only: channel pairs with fewer rotations than this have their frequency divided by `scaling_factor`."""
    mscale: float = 1.0
    """yarn only: determines, with `mscale_all_dim`, the factor on cos and sin; see `concentration`."""
    mscale_all_dim: float = 0.0
    """yarn only: determines the softmax scale of MLA and, with `mscale`, the factor on cos and sin."""
    truncate: bool = True
    """yarn only: rounds the bounds of the interpolated range to integers (`--yarn-correction-range-round-to-int`)."""
    concentration: float | None = None
    """yarn only: factor on cos and sin (GPT-OSS: 0.1 ln(scaling_factor) + 1). None: the factor is
    yarn_mscale(scaling_factor, mscale) / yarn_mscale(scaling_factor, mscale_all_dim)."""


def yarn_mscale(factor: float, mscale: float) -> float:
    """Attention scale of YaRN for a context extended by `factor` (arXiv 2309.00071 equation 22); 1 if not extended.

    The softmax scale of MLA with YaRN is yarn_mscale(factor, mscale_all_dim)^2 / sqrt(q_head_dim).
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


ContextExchange = Literal["p2p", "allgather", "a2a", "a2a+p2p"]
"""Context-parallel communication (`--cp-comm-type`): ring, all-gather of k and v, all-to-all, or all-to-all + ring."""


@dataclass(frozen=True, kw_only=True)
class CoreAttentionConfig:
    """Softmax attention: softmax(q k^T * softmax_scale + mask) v."""

    softmax_scale: float
    causal: bool = True
    window: tuple[int, int] | None = None
    """Sliding window (left, right): maximum number of visible keys before and after the query's position; -1: no limit.
    (127, 0) is a causal window of 128 tokens. None: no window."""
    sinks: bool = False
    """Adds one learned logit per head to the softmax denominator (`--softmax-type learnable`)."""
    off_by_one: bool = False
    """Adds a constant zero logit to the softmax denominator (`--softmax-type off-by-one`)."""
    dropout: float = 0.0
    context_exchange: ContextExchange = "p2p"
    """Communication of context-parallel attention; has no effect with one context-parallel rank."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Multi-head or grouped-query attention."""

    hidden_size: int
    num_heads: int
    """Number of query heads (`--num-attention-heads`)."""
    num_query_groups: int
    head_dim: int
    core: CoreAttentionConfig
    rope: RopeConfig | None
    """Rotary embedding of q and k. None: no rotation (learned absolute positions or no position embedding)."""
    qk_norm: Literal["none", "per_head", "full", "l2"] = "none"
    """Norm of q and k. per_head: over each head (Qwen3); full: over all heads jointly (OLMoE, MiniMax); l2: over each
    head, without a weight (Llama 4)."""
    norm: NormConfig = NormConfig()
    """Kind and epsilon of the norm that `qk_norm` selects."""
    qkv_bias: bool = False
    out_bias: bool = False
    """Adds a bias to the output projection (`--add-bias-linear`)."""
    output_gate: bool = False
    """Multiplies the output by sigmoid(gate); the QKV projection also computes `gate` (`--attention-output-gate`)."""

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
        """Width of k over all query groups, which is also the width of v."""
        return self.num_query_groups * self.head_dim

    @property
    def keys_values_width(self) -> int:
        """Width of k and v together, over all query groups."""
        return 2 * self.kv_width

    @property
    def qkv_width(self) -> int:
        """Output width of the fused projection to q, the optional output gate, k and v."""
        return (2 if self.output_gate else 1) * self.q_width + 2 * self.kv_width

    @property
    def matrix_elements(self) -> int:
        """Number of elements of all projection matrices."""
        return self.hidden_size * (self.qkv_width + self.q_width)

    def groups_divide_over(self, tp: int) -> bool:
        """True if `tp` ranks can shard the query groups: `tp` divides the number of groups or is a multiple of it."""
        groups = self.num_query_groups
        return groups % tp == 0 or tp % groups == 0 and 2 * self.kv_width % tp == 0

    def shard(self, tp: int) -> "AttentionConfig":
        """Config with the heads and query groups of one of `tp` tensor-parallel ranks. If several ranks share a query
        group, the config has one group, although each rank holds only a part of the group's k and v projection."""
        groups = max(self.num_query_groups // tp, 1)
        return replace(self, num_heads=self.num_heads // tp, num_query_groups=groups)
