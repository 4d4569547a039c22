"""What a mixer (attention) is: narrow frozen specs, no torch."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """RMSNorm or LayerNorm."""

    kind: Literal["RMSNorm", "LayerNorm"] = "LayerNorm"
    eps: float = 1e-5
    zero_centered: bool = False
    """The stored weight is gamma - 1 (`--apply-layernorm-1p`), initialised to 0."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of one attention kind."""

    dim: int
    """Width that is rotated: head_dim * percent, or the rope part of an MLA head."""
    base: float = 10000.0
    interleaved: bool = False
    """Pairs are (0,1), (2,3) … instead of (0, D/2), (1, D/2+1) …"""
    scaling: Literal["none", "llama3", "linear", "yarn"] = "none"
    scaling_factor: float = 1.0
    """Context extension factor of llama3, linear and yarn scaling."""
    original_max_positions: int = 4096
    low_freq_factor: float = 1.0
    """llama3 only."""
    high_freq_factor: float = 4.0
    """llama3 only."""
    beta_fast: float = 32.0
    """yarn only."""
    beta_slow: float = 1.0
    """yarn only."""
    mscale: float = 1.0
    """yarn only."""
    mscale_all_dim: float = 0.0
    """yarn only; also enters the softmax scale of MLA."""
    truncate: bool = True
    """yarn only: round the correction range to whole dims (GPT-OSS does not)."""
    concentration: float | None = None
    """yarn only: factor on cos and sin instead of the mscale ratio (GPT-OSS: 0.1 ln(factor) + 1); None: the ratio."""


def yarn_mscale(factor: float, mscale: float) -> float:
    """How much YaRN raises attention logits when the context grows by `factor` (arXiv 2309.00071 equation 22).

    With m = yarn_mscale(factor, mscale_all_dim) the softmax scale of MLA is m^2 / sqrt(q_head_dim).
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


ContextExchange = Literal["p2p", "allgather", "a2a", "a2a+p2p"]
"""How context-parallel ranks exchange keys and values (`--cp-comm-type`)."""


@dataclass(frozen=True, kw_only=True)
class CoreAttentionConfig:
    """softmax(q k^T * scale + mask) v."""

    softmax_scale: float
    causal: bool = True
    window: tuple[int, int] | None = None
    """(left, right) tokens beside the own one that are visible; (127, 0) is a window of 128; -1 is unbounded."""
    sinks: bool = False
    """One learned logit per head that joins the softmax denominator (`--softmax-type learnable`)."""
    off_by_one: bool = False
    """A fixed zero logit joins the denominator (`--softmax-type off-by-one`)."""
    dropout: float = 0.0
    context_exchange: ContextExchange = "p2p"
    """Without effect on one context-parallel rank."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Multi-head and grouped-query attention."""

    hidden_size: int
    num_heads: int
    num_query_groups: int
    head_dim: int
    core: CoreAttentionConfig
    rope: RopeConfig | None
    """None: no rotation (learned absolute positions, or a layer without positions)."""
    qk_norm: Literal["none", "per_head", "full", "l2"] = "none"
    """Norm of q and k over one head (Qwen3), over all heads together (OLMoE, MiniMax), or over one head with no weight
    (Llama 4)."""
    norm: NormConfig = NormConfig()
    """Of qk_norm."""
    qkv_bias: bool = False
    out_bias: bool = False
    output_gate: bool = False

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of k, and of v."""
        return self.num_query_groups * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Outputs of the matrix that makes q, the output gate if there is one, k and v."""
        return (2 if self.output_gate else 1) * self.q_width + 2 * self.kv_width

    def groups_divide_over(self, tp: int) -> bool:
        """Whether tensor-parallel ranks hold whole query groups, or equally many ranks share each group."""
        groups = self.num_query_groups
        return groups % tp == 0 or tp % groups == 0 and 2 * self.kv_width % tp == 0


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1)."""

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_rope_dim: int
    v_head_dim: int
    core: CoreAttentionConfig
    rope: RopeConfig
    qk_norm: bool
    """Norm of the compressed q and kv (`--qk-layernorm`)."""
    norm: NormConfig = NormConfig(kind="RMSNorm")

    @property
    def q_head_dim(self) -> int:
        return self.qk_head_dim + self.qk_rope_dim
