"""Multi-latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1).

1. q from the hidden state, directly or through a low-rank latent
2. k and v from a low-rank latent; one rotated key part, shared by all heads, comes straight from the hidden state
3. rotary positions on the last `qk_rope_dim` channels of q and on the shared key part
4. attention, whose value width differs from that of q and k
5. output matrix
"""

from functools import partial

from torch import Tensor, nn

from megatron_moe.data.batch import TokenMeta
from megatron_moe.kernels.ops import Kernels
from megatron_moe.memory.keeping import Keeping
from megatron_moe.model.attention import new_sinks, rotate, share_of_heads
from megatron_moe.model.core_attention import core_attention
from megatron_moe.model.norm import Norm
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.tensor import enter_tensor_parallel
from megatron_moe.precision.linear import Linear
from megatron_moe.specs.attention import MLASpec


class MLA(nn.Module):
    """Self-attention through latents. `site` names its dropout: the module's path in the model.

    Every tensor parallel rank makes the latents, under sequence parallelism those of its own positions, and from them
    the q, k and v of its own heads: N below is its own.
    """

    def __init__(
        self, spec: MLASpec, site: str, ctx: ParallelContext, kernels: Kernels, keeping: Keeping | None = None
    ) -> None:
        super().__init__()
        self.keeping = keeping or Keeping()
        self.spec = spec
        self.site = site
        self.ctx = ctx
        self.kernels = kernels
        self.num_heads = share_of_heads(spec.num_heads, "heads", ctx)
        hidden, heads, q_rank, kv_rank = spec.hidden_size, spec.num_heads, spec.q_lora_rank, spec.kv_lora_rank
        if q_rank is None:
            self.linear_q_proj = Linear(hidden, heads * spec.q_head_dim, ctx, kernels, tp_dim=0)
        else:
            self.linear_q_down_proj = Linear(hidden, q_rank, ctx, kernels)
            self.q_layernorm = Norm(spec.norm, q_rank, ctx, kernels) if spec.qk_norm else nn.Identity()
            self.linear_q_up_proj = Linear(q_rank, heads * spec.q_head_dim, ctx, kernels, tp_dim=0)
        self.linear_kv_down_proj = Linear(hidden, kv_rank + spec.qk_rope_dim, ctx, kernels)
        self.kv_layernorm = Norm(spec.norm, kv_rank, ctx, kernels) if spec.qk_norm else nn.Identity()
        self.linear_kv_up_proj = Linear(kv_rank, heads * (spec.qk_head_dim + spec.v_head_dim), ctx, kernels, tp_dim=0)
        self.linear_proj = Linear(heads * spec.v_head_dim, hidden, ctx, kernels, tp_dim=1, init="output")
        self.sinks = new_sinks(heads, ctx) if spec.core.sinks else None

    def forward(self, hidden_SBH: Tensor, meta: TokenMeta) -> Tensor:
        """[S, B, H] -> [S, B, H]"""
        with self.keeping.region("qkv_linear"):
            latents = self._down(hidden_SBH)
            up = partial(self._up, meta)
            q_SBND, k_SBND, v_SBNE = up(*latents)
            forget = self.keeping.forget("mla_up_proj", up, latents, q_SBND, k_SBND, v_SBNE)
        with self.keeping.region("core_attn"), forget:
            context_SBNE = self.keeping.run("core_attn", partial(self._attend, meta), q_SBND, k_SBND, v_SBNE)
        with self.keeping.region("attn_proj"):
            return self.linear_proj(context_SBNE.flatten(2))

    def _down(self, hidden_SBH: Tensor) -> tuple[Tensor, Tensor]:
        """What q is made of: its latent [S, B, q_lora_rank], or the hidden state; the latent of k and v, with the key
        part that all heads share, [S, B, kv_lora_rank | rope]"""
        q_latent = hidden_SBH if self.spec.q_lora_rank is None else self.linear_q_down_proj(hidden_SBH)
        return q_latent, self.linear_kv_down_proj(hidden_SBH)

    def _up(self, meta: TokenMeta, q_latent: Tensor, kv_latent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k [S, B, N, nope | rope], v [S, B, N, E]"""
        return self._query(q_latent, meta), *self._key_value(kv_latent, meta)

    def _attend(self, meta: TokenMeta, q_SBND: Tensor, k_SBND: Tensor, v_SBNE: Tensor) -> Tensor:
        """[S, B, N, E]"""
        return core_attention(
            q_SBND, k_SBND, v_SBNE, self.sinks, self.spec.core, meta, self.site, self.ctx, self.kernels
        )

    def _query(self, latent: Tensor, meta: TokenMeta) -> Tensor:
        """[S, B, N, nope | rope]"""
        spec = self.spec
        if spec.q_lora_rank is None:
            q = self.linear_q_proj(latent)
        else:
            q = self.linear_q_up_proj(self.q_layernorm(latent))
        q_SBND = q.unflatten(-1, (self.num_heads, spec.q_head_dim))
        return rotate(self.kernels, q_SBND, spec.rope, meta, start=spec.qk_head_dim)

    def _key_value(self, latent: Tensor, meta: TokenMeta) -> tuple[Tensor, Tensor]:
        """k [S, B, N, nope | rope], v [S, B, N, E]"""
        spec = self.spec
        latent, turned = latent.split((spec.kv_lora_rank, spec.qk_rope_dim), dim=-1)
        # tp: S * B * rope channels; the gradient is partial, since every rank's heads read the shared key part.
        turned_SB1D = rotate(self.kernels, enter_tensor_parallel(turned, self.ctx)[:, :, None], spec.rope, meta)
        kv = self.linear_kv_up_proj(self.kv_layernorm(latent)).unflatten(-1, (self.num_heads, -1))
        return self.kernels.latent_key_value(kv, turned_SB1D.squeeze(2), spec.qk_head_dim)
