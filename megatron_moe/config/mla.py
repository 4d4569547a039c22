"""Multi-latent attention (MLA)."""

from dataclasses import dataclass, replace

from megatron_moe.config.attention import CoreAttentionConfig, NormConfig, RopeConfig


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1)."""

    hidden_size: int
    num_heads: int
    """Number of heads of q, k and v (`--num-attention-heads`)."""
    q_lora_rank: int | None
    """Width of the compressed q. None: q is projected from the hidden state without compression."""
    kv_lora_rank: int
    """Width of the joint compression of k and v."""
    qk_head_dim: int
    """Channels per q or k head that are not rotated."""
    qk_rope_dim: int
    """Rotated channels per q or k head (`--qk-pos-emb-head-dim`). All k heads share the same rotated channels."""
    v_head_dim: int
    core: CoreAttentionConfig
    rope: RopeConfig
    qk_norm: bool
    """Normalises the compressed q and the compressed kv (`--qk-layernorm`)."""
    norm: NormConfig = NormConfig(kind="RMSNorm")
    """Kind and epsilon of the norm that `qk_norm` enables."""

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
        """Output width of the up-projection of the compressed kv, which computes v and the unrotated channels of k."""
        return self.num_heads * (self.qk_head_dim + self.v_head_dim)

    @property
    def matrix_elements(self) -> int:
        """Number of elements of all projection matrices."""
        down = self.kv_lora_rank + self.qk_rope_dim + self.out_width
        if self.q_lora_rank is None:
            query = self.hidden_size * self.q_width
        else:
            query = self.q_lora_rank * (self.hidden_size + self.q_width)
        return query + self.hidden_size * down + self.kv_lora_rank * self.kv_up_width

    def shard(self, tp: int) -> "MLAConfig":
        """Config with the heads of one of `tp` tensor-parallel ranks."""
        return replace(self, num_heads=self.num_heads // tp)
