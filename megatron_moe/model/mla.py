"""Multi-latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1).

1. q from the hidden state, directly or through a low-rank latent
2. k and v from a low-rank latent; one rotated key part, shared by all heads, is projected from the hidden state
3. rotary positions on the last `qk_rope_dim` channels of q and on the shared key part
4. attention, whose value width differs from that of q and k
5. output projection
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from megatron_moe.config.mla import MLAConfig
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.kernels import autograd
from megatron_moe.layers.components import Site
from megatron_moe.layers.declared import DeclaredParameters
from megatron_moe.layers.linear import Linear, gathered_linears, norm_copy_format, with_shared_fp8_copy
from megatron_moe.layers.norm import Norm
from megatron_moe.layers.resources import ModelResources
from megatron_moe.model.attention import SoftmaxAttention, rotate
from megatron_moe.parallel.parameter import Parameter
from megatron_moe.parallel.tensor_parallel import enter_tensor_parallel


class MLA(SoftmaxAttention):
    """Multi-latent self-attention.

    Every tensor-parallel rank computes q, k and v of its N heads, and the latents that all heads share. With sequence
    parallelism, it computes the latents only for its local positions, except without a q latent: q then needs the
    hidden state of all positions, from which the rank also computes the kv latent of all positions instead of gathering
    it.
    """

    def __init__(self, config: MLAConfig, site: Site, resources: ModelResources) -> None:
        super().__init__(config, site, resources)
        ctx, kernels = self.ctx, self.kernels
        self.config = config
        declared, q_rank = DeclaredParameters.of(config, resources), config.q_lora_rank
        # q and kv projections read the same input; as shards, they read two copies of it
        shares_input = q_rank is not None or ctx.group("tp").size == 1
        saves_input = not shares_input or self.saved_tensors.is_recomputed("layernorm")
        down = partial(declared.linear, saves_input=saves_input, common_input=True)

        def norm_and_up_projection(name: str, rank: int) -> tuple[nn.Module, Linear]:
            linear = declared.linear(name)
            if not config.qk_norm:
                return nn.Identity(), linear
            return Norm(config.norm, rank, ctx, kernels, copy_format=norm_copy_format([linear])), linear

        if q_rank is None:
            of_q = self.linear_q_proj = down("linear_q_proj")
        else:
            of_q = self.linear_q_down_proj = down("linear_q_down_proj")
            self.q_layernorm, self.linear_q_up_proj = norm_and_up_projection("linear_q_up_proj", q_rank)
        self.linear_kv_down_proj = down("linear_kv_down_proj")
        self.replicates_kv_down_proj = config.replicates_kv_down_proj(ctx.config)
        if not self.replicates_kv_down_proj:
            self.input_linears = (of_q, self.linear_kv_down_proj)
        self.kv_layernorm, self.linear_kv_up_proj = norm_and_up_projection("linear_kv_up_proj", config.kv_lora_rank)
        # core attention saves its output, except if it is recomputed
        saves_output = not self.saved_tensors.is_recomputed("core_attn")
        self.linear_proj = declared.linear("linear_proj", saves_input=saves_output)
        self.sinks = declared.parameter("sinks") if config.core.sinks else None

    def forward(self, hidden_SBH: Tensor, mb: MicrobatchContext) -> Tensor:
        """Applies the mixer to the hidden states [S, B, H] of this rank; returns the same shape."""
        with self.saved_tensors.offload_scope("qkv_linear"):
            q, q_latent, kv_latent = self._down(hidden_SBH)
            latents, up = (q_latent, kv_latent), partial(self._up, mb)
            projected = up(q_latent, kv_latent, q)
            discard = self.saved_tensors.discard_output("mla_up_proj", up, latents, *projected)
        with self.saved_tensors.offload_scope("core_attn"), discard:
            context_SBNE = self._core(mb, hidden_SBH, q_latent, *projected)
        with self.saved_tensors.offload_scope("attn_proj"):
            return self.linear_proj(context_SBNE.flatten(2))

    def _core(self, mb: MicrobatchContext, hidden_SBH: Tensor, q_latent: Tensor, *projected: Tensor) -> Tensor:
        """Computes core attention and returns its output [S, B, N, v_head_dim]. `hidden_SBH` is the input, `q_latent`
        the second result of `_down`, `projected` the result of `_up`."""
        return self.saved_tensors.run("core_attn", partial(self._attend, mb), *projected)

    def logit_factors(self, eta_N: Tensor, alpha: float) -> Iterator[tuple[Parameter, Tensor]]:
        """See `SoftmaxAttention`. The rotated key part, which all heads share, is not scaled; the rotated part of q
        is multiplied by the whole factor."""
        config, eta_N1 = self.config, eta_N[:, None]
        one = torch.ones_like(eta_N1)

        def factors_of_rows(*parts: tuple[Tensor, int]) -> Tensor:
            return torch.cat([factor.expand(-1, number) for factor, number in parts], dim=1).flatten()

        of_q = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        yield of_q.weight, factors_of_rows((eta_N1**alpha, config.qk_head_dim), (eta_N1, config.qk_rope_dim))
        of_k = factors_of_rows((eta_N1 ** (1 - alpha), config.qk_head_dim), (one, config.v_head_dim))
        yield self.linear_kv_up_proj.weight, of_k

    def _down(self, hidden_SBH: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """Returns (q of this rank's heads if `replicates_kv_down_proj`, else None; q latent [S, B, q_lora_rank], or
        the hidden state if q has no latent; [S, B, kv_lora_rank + qk_rope_dim]: the kv latent, then the key part that
        all heads share)."""
        if self.replicates_kv_down_proj:
            # collective over tp: all-gather of S * B * H elements in forward and in backward, and reduce-scatter of the
            # gradient in backward
            q, kv_latent = gathered_linears(hidden_SBH, (self.linear_q_proj, self.linear_kv_down_proj))
            return q, hidden_SBH, kv_latent
        hidden_SBH = with_shared_fp8_copy(hidden_SBH, *self.input_linears)
        q_latent = hidden_SBH if self.config.q_lora_rank is None else self.linear_q_down_proj(hidden_SBH)
        return None, q_latent, self.linear_kv_down_proj(hidden_SBH)

    def _up(
        self, mb: MicrobatchContext, q_latent: Tensor, kv_latent: Tensor, q: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Returns q and k, each [S, B, N, qk_head_dim + qk_rope_dim], and v [S, B, N, v_head_dim] from the latents.
        `q`: result of `linear_q_proj`, if it is known."""
        config, q_SBND = self.config, self._queries(mb, q_latent, q)
        latent, key = kv_latent.split((config.kv_lora_rank, config.qk_rope_dim), dim=-1)
        normed, kv_up = self.kv_layernorm(latent), self.linear_kv_up_proj
        if self.replicates_kv_down_proj:
            # the latent of all positions has a partial gradient, which is summed over tp with that of the hidden state
            kv = autograd.linear(self.kernels, normed, kv_up.weight, quantizer=kv_up.quantizer)
        else:
            # collective over tp: S * B * rope elements in backward; the gradient is partial: each rank's heads read the
            # shared key
            key, kv = enter_tensor_parallel(key, self.ctx), kv_up(normed)
        key_SB1D = rotate(self.kernels, key[:, :, None], config.rope, mb)
        kv_SBNC = kv.unflatten(-1, (self.num_heads, -1))
        return q_SBND, *self.kernels.latent_key_value(kv_SBNC, key_SB1D.squeeze(2), config.qk_head_dim)

    def _queries(self, mb: MicrobatchContext, q_latent: Tensor, q: Tensor | None) -> Tensor:
        """Rotated q [S, B, N, qk_head_dim + qk_rope_dim]."""
        config = self.config
        if q is None and config.q_lora_rank is None:
            q = self.linear_q_proj(q_latent)
        elif q is None:
            q = self.linear_q_up_proj(self.q_layernorm(q_latent))
        q_SBND = q.unflatten(-1, (self.num_heads, config.q_head_dim))
        return rotate(self.kernels, q_SBND, config.rope, mb, start=config.qk_head_dim)
