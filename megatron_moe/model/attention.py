"""Multi-head and grouped-query attention (arXiv 1706.03762, 2305.13245).

1. one projection to q, k, v and optionally an output gate, with rows ordered by query group
2. optional norm of q and k, per head or over all heads together
3. rotary position embedding of q and k
4. softmax(q k^T * scale + mask) v, optionally with a sliding window and sinks
5. optional sigmoid gate per channel
6. output projection
"""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from megatron_moe.config.attention import AttentionConfig, RopeConfig, SoftmaxMixerConfig
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.kernels.ops import Kernels, QueryKeyTransform, internal_dtype
from megatron_moe.layers.components import Mixer, Site
from megatron_moe.layers.declared import DeclaredParameters
from megatron_moe.layers.norm import Norm, UnitNorm
from megatron_moe.layers.resources import ModelResources
from megatron_moe.model.core_attention import LogitMaxima, core_attention
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import Parameter
from megatron_moe.parallel.tensor_parallel import all_gather


def local_heads(number: int, ctx: ParallelContext) -> int:
    """Number of heads or query groups on this tensor-parallel rank; `number`: total over all ranks."""
    num_ranks = ctx.group("tp").size
    assert number % num_ranks == 0, (
        f"{number} heads or query groups cannot be divided among {num_ranks} tensor-parallel ranks"
    )
    return number // num_ranks


def rotate(
    kernels: Kernels, x_SBND: Tensor, config: RopeConfig | None, mb: MicrobatchContext, start: int = 0
) -> Tensor:
    """Applies rotary embedding to channels start .. start + config.dim - 1 of every head. No-op if `config` is None."""
    if config is None:
        return x_SBND
    assert mb.rotary is not None, "the rotary tables are not attached to the context"
    cos_SBD, sin_SBD = mb.rotary[config]
    return kernels.rope(x_SBND, cos_SBD, sin_SBD, config.interleaved, start)


class SoftmaxAttention(Mixer):
    """Base class of mixers that compute softmax attention."""

    sinks: Parameter | None
    max_logits: Tensor | None
    """Largest logit of each local head since the last reset, in the internal dtype; None if they are not computed."""

    def __init__(self, config: SoftmaxMixerConfig, site: Site, resources: ModelResources) -> None:
        super().__init__(site, resources)
        self.core = config.core
        self.context_peers = resources.context_peers
        self.num_heads = local_heads(config.num_heads, self.ctx)
        self.register_buffer("max_logits", None, persistent=False)
        self._least_logit = -math.inf

    def track_max_logits(self, least: float) -> None:
        """Makes training forwards record the largest logits. `least`: smallest logit of interest; maxima below it may
        not be recorded."""
        self._least_logit, dtype = least, internal_dtype(self.ctx.dtype)
        self.max_logits = torch.full((self.num_heads,), -math.inf, dtype=dtype, device=self.ctx.device)

    def logit_factors(self, eta_N: Tensor, alpha: float) -> Iterator[tuple[Parameter, Tensor]]:
        """Yields (parameter, factor of each row of this rank's shard) that multiply the logits of head n by eta_N[n],
        or by less if another head shares its keys. q is multiplied by eta^alpha and k by eta^(1 - alpha)."""
        raise NotImplementedError

    def _attend(self, mb: MicrobatchContext, q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor) -> Tensor:
        """Computes core attention and returns its output [S, B, N, E]."""
        maxima = None
        if self.max_logits is not None and mb.training:
            maxima = LogitMaxima(self.max_logits, self._least_logit)
        state = self.core, mb, self.site, self.ctx, self.kernels
        return core_attention(q_SBND, k_SBGD, v_SBGE, self.sinks, *state, self.context_peers, maxima)


class Attention(SoftmaxAttention):
    """Multi-head or grouped-query self-attention.

    N and G are the numbers of heads and query groups on this tensor-parallel rank. If there are fewer query groups than
    ranks, G is 1: several ranks share a group, and each computes an equal part of the group's heads. In this case
    each rank holds an equal share of the rows of `linear_qkv`, whose outputs are all-gathered, as in Megatron-Core.
    """

    def __init__(self, config: AttentionConfig, site: Site, resources: ModelResources) -> None:
        super().__init__(config, site, resources)
        ctx, kernels = self.ctx, self.kernels
        self.config = config
        self.ranks_per_group = max(ctx.group("tp").size // config.num_query_groups, 1)
        self.num_groups = local_heads(config.num_query_groups * self.ranks_per_group, ctx)
        self.heads_per_group = self.num_heads // self.num_groups
        declared = DeclaredParameters.of(config, resources)
        saves_input = self.saved_tensors.is_recomputed("layernorm")
        self.linear_qkv = declared.linear("linear_qkv", saves_input=saves_input)
        self.input_linears = (self.linear_qkv,)
        # core attention saves its output anyway, unless a gate multiplies it or it is recomputed
        saves_output = not config.output_gate and not self.saved_tensors.is_recomputed("core_attn")
        self.linear_proj = declared.linear("linear_proj", saves_input=saves_output)
        self.q_layernorm: Norm | UnitNorm
        self.k_layernorm: Norm | UnitNorm
        if config.qk_norm == "l2":
            self.q_layernorm, self.k_layernorm = (UnitNorm(config.norm.eps, kernels) for _ in range(2))
        elif config.qk_norm != "none":
            full = config.qk_norm == "full"
            widths = (config.q_width, config.kv_width) if full else (config.head_dim, config.head_dim)
            norms = (Norm(config.norm, width, ctx, kernels, over_heads=True) for width in widths)
            self.q_layernorm, self.k_layernorm = norms
        self.sinks = declared.parameter("sinks") if config.core.sinks else None

    def forward(self, hidden_SBH: Tensor, mb: MicrobatchContext) -> Tensor:
        """Applies the mixer to the hidden states [S, B, H] of this rank; returns the same shape."""
        with self.saved_tensors.offload_scope("qkv_linear"):
            qkv_SBGC = self._own_groups(self.linear_qkv(hidden_SBH))
        gate_SBND = None
        if self.config.is_fused:
            q_SBND, k_SBGD, v_SBGD = self._fused_qkv(qkv_SBGC, mb)
        else:
            q_SBND, gate_SBND, k_SBGD, v_SBGD = self._unfused_qkv(qkv_SBGC, mb)
        with self.saved_tensors.offload_scope("core_attn"):
            context_SBND = self.saved_tensors.run("core_attn", partial(self._attend, mb), q_SBND, k_SBGD, v_SBGD)
        if gate_SBND is not None:
            wide = internal_dtype(context_SBND.dtype)
            context_SBND = (context_SBND.to(wide) * torch.sigmoid(gate_SBND.to(wide))).to(context_SBND.dtype)
        with self.saved_tensors.offload_scope("attn_proj"):
            return self.linear_proj(context_SBND.flatten(2))

    def logit_factors(self, eta_N: Tensor, alpha: float) -> Iterator[tuple[Parameter, Tensor]]:
        """See `SoftmaxAttention`. The heads of a query group share a key, so that the smallest eta applies to all."""
        eta_G1 = eta_N.view(self.num_groups, -1).amin(dim=1, keepdim=True)
        one, num_rows = torch.ones_like(eta_G1), self.config.group_rows
        gate = (one,) if self.config.output_gate else ()
        of_parts = (eta_G1**alpha, *gate, eta_G1 ** (1 - alpha), one)
        rows = torch.cat([part.expand(-1, n) for part, n in zip(of_parts, num_rows, strict=True)], dim=1).flatten()
        yield self.linear_qkv.weight, rows
        if self.linear_qkv.bias is not None:
            yield self.linear_qkv.bias, rows

    def _own_groups(self, qkv_SBC: Tensor) -> Tensor:
        """Converts the local output of `linear_qkv` to [S, B, G, C]: C channels for each query group of this rank."""
        if self.ranks_per_group == 1:
            return qkv_SBC.unflatten(-1, (self.num_groups, -1))
        tp = self.ctx.group("tp")
        group, part = divmod(tp.rank, self.ranks_per_group)
        # collective over tp: all-gather of S * B * (N + 2 G) * D elements of the whole model; backward reduce-scatter,
        # which sums the gradients of k and v over the ranks that share a group
        whole_SBGC = all_gather(qkv_SBC, tp, dim=-1).unflatten(-1, (self.config.num_query_groups, -1))
        *of_q, k_SBD, v_SBD = whole_SBGC[:, :, group].split(self.config.group_rows, dim=-1)
        own = [x.chunk(self.ranks_per_group, dim=-1)[part] for x in of_q]
        return torch.cat([*own, k_SBD, v_SBD], dim=-1).unsqueeze(2)

    def _fused_qkv(self, qkv_SBGC: Tensor, mb: MicrobatchContext) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q [S, B, N, D], k [S, B, G, D] and v [S, B, G, D], after norm and rotary embedding of q and k."""
        config = self.config
        assert config.rope is not None and mb.rotary is not None, "the rotary tables are not attached to the context"
        cos_SBD, sin_SBD = mb.rotary[config.rope]
        norms = (self.q_layernorm, self.k_layernorm) if config.qk_norm != "none" else (None, None)
        q_weight, k_weight = (norm.weight if isinstance(norm, Norm) else None for norm in norms)
        eps, zero_centered, interleaved = config.norm.eps, config.norm.zero_centered, config.rope.interleaved
        transform = QueryKeyTransform(eps, zero_centered, cos_SBD, sin_SBD, interleaved, self.heads_per_group)
        return self.kernels.query_key_value(qkv_SBGC, q_weight, k_weight, transform)

    def _unfused_qkv(self, qkv_SBGC: Tensor, mb: MicrobatchContext) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Returns q [S, B, N, D], the output gate [S, B, N, D] or None, k [S, B, G, D] and v [S, B, G, D]."""
        *of_q, k_SBGD, v_SBGD = qkv_SBGC.split(self.config.shard(self.ctx.group("tp").size).group_rows, dim=-1)
        q_SBND, *gate_SBND = (x.flatten(2).unflatten(-1, (self.num_heads, self.config.head_dim)) for x in of_q)
        if self.config.qk_norm != "none":
            q_SBND = self._norm(self.q_layernorm, q_SBND)
            k_SBGD = self._norm(self.k_layernorm, k_SBGD, self.ranks_per_group)
        q_SBND = rotate(self.kernels, q_SBND, self.config.rope, mb)
        k_SBGD = rotate(self.kernels, k_SBGD, self.config.rope, mb)
        return q_SBND, gate_SBND[0] if gate_SBND else None, k_SBGD, v_SBGD

    def _norm(self, norm: Norm | UnitNorm, x_SBND: Tensor, num_copies: int = 1) -> Tensor:
        """Applies the norm of q or k. `num_copies`: number of adjacent tensor-parallel ranks that hold the same
        heads."""
        if self.config.qk_norm != "full":
            return norm(x_SBND)
        tp = self.ctx.group("tp")
        # collective over tp: all-gather of S * B * N * D elements, backward reduce-scatter; the norm is over the heads
        # of all ranks.
        whole_SBC = all_gather(x_SBND.flatten(2), tp, dim=-1)
        if num_copies > 1:
            whole_SBC = torch.cat(whole_SBC.chunk(tp.size, dim=-1)[::num_copies], dim=-1)
        own_SBC = norm(whole_SBC).chunk(tp.size // num_copies, dim=-1)[tp.rank // num_copies]
        return own_SBC.reshape(x_SBND.shape)
