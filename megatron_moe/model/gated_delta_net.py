"""Gated delta net (arXiv 2412.06464), as in Qwen3-Next.

1. one projection to q, k, v, an output gate z, and for each value head a beta and a decay
2. short causal convolution of q, k and v with SiLU
3. linear attention with the gated delta rule, whose q and k are normalised per head
4. norm of each head's output, multiplied by silu(z)
5. output projection
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_moe.config.gated_delta_net import GatedDeltaNetConfig
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.layers.linear import Linear
from megatron_moe.layers.norm import Norm
from megatron_moe.layers.resources import ModelResources
from megatron_moe.parallel.context import ProcessGroup
from megatron_moe.parallel.context_parallel import SequencePart, by_rank, gather_heads, in_order, scatter_heads
from megatron_moe.parallel.parameter import Parameter, new_parameter

KEY_EPS = 1e-6
"""Added to the squared norms by which rows of q and k are divided."""


class _Heads(NamedTuple):
    """Inputs of the recurrence and parameters of the same heads."""

    mixed_SBC: Tensor
    """q, k and v before the convolution."""
    beta_SBM: Tensor
    decay_SBM: Tensor
    filters_CK: Tensor
    dt_bias_M: Tensor
    A_log_M: Tensor


class GatedDeltaNet(nn.Module):
    """Gated delta net.

    Heads are sharded over tensor-parallel ranks. Under context parallelism, an all-to-all gathers the positions and
    scatters the heads before the convolution, and another one reverses this after the recurrence (arXiv 2309.14509).
    """

    def __init__(self, config: GatedDeltaNetConfig, site: str, resources: ModelResources) -> None:
        super().__init__()
        self.ctx, self.kernels = resources.ctx, resources.kernels
        ctx, kernels = self.ctx, self.kernels
        self.config = config
        self.local = config.shard(ctx.group("tp").size)
        self.in_proj = Linear(config.hidden_size, sum(config.sections), ctx, kernels, tp_dim=0, splits=config.sections)
        specs = {spec.name: spec for spec in config.parameters(ctx.config)}

        def parameter(name: str) -> Parameter:
            return new_parameter(specs[name].shape, specs[name].meta, ctx)

        self.conv1d = nn.Module()
        self.conv1d.weight = parameter("conv1d.weight")
        self.dt_bias, self.A_log = parameter("dt_bias"), parameter("A_log")
        self.out_norm = Norm(config.norm, config.value_head_dim, ctx, kernels, over_heads=True)
        self.out_proj = Linear(config.value_width, config.hidden_size, ctx, kernels, tp_dim=1, init="output")

    def forward(self, hidden_SBH: Tensor, mb: MicrobatchContext) -> Tensor:
        """[S, B, H] -> [S, B, H]"""
        local, part = self.local, mb.tokens.part
        sizes = (sum(local.mixed_sections), *local.sections[3:])
        mixed_SBC, gate_SBC, beta_SBM, decay_SBM = self.in_proj(hidden_SBH).split(sizes, dim=-1)
        heads = _Heads(mixed_SBC, beta_SBM, decay_SBM, self.conv1d.weight, self.dt_bias, self.A_log)
        if part is not None and len(part.of_ranks) > 1:
            group = self.ctx.group(part.group)
            # cp: S * B * (q, k, v, beta and decay) elements here, S * B * v back; backward: the same
            scattered = self._scattered(heads, part, group)
            out_SBMV = self._recurrence(scattered, mb.tokens.whole_segments_BS, group.size)
            out_SBMV = gather_heads(by_rank(out_SBMV, part.of_ranks), group)
        else:
            assert part is not None or self.ctx.group("cp").size == 1, "TokenMeta.part is not set"
            out_SBMV = self._recurrence(heads, mb.tokens.segments_BS)
        gate_SBMV = gate_SBC.unflatten(-1, (local.num_value_heads, -1))
        normed_SBMV = self.kernels.gated_rms_norm(out_SBMV, gate_SBMV, self.out_norm.weight, self.config.norm.eps, True)
        return self.out_proj(normed_SBMV.flatten(2))

    def _recurrence(self, heads: _Heads, segments_BS: Tensor | None, num_parts: int = 1) -> Tensor:
        """Convolution and gated delta rule of 1 / `num_parts` of the local heads: output [S, B, M, V]."""
        config, local = self.config, self.local.shard(num_parts)
        conv_SBC = self.kernels.short_conv(heads.mixed_SBC, heads.filters_CK, None, segments_BS)
        q_SBC, k_SBC, v_SBC = conv_SBC.split(local.mixed_sections, dim=-1)
        q_SBND, k_SBND = (x.unflatten(-1, (-1, config.key_head_dim)) for x in (q_SBC, k_SBC))
        wide = internal_dtype(conv_SBC.dtype)
        rate_SBM = F.softplus(heads.decay_SBM.to(wide) + heads.dt_bias_M.to(wide))
        return self.kernels.linear_attention(
            q_SBND,
            k_SBND,
            v_SBC.unflatten(-1, (-1, config.value_head_dim)),
            -heads.A_log_M.to(wide).exp() * rate_SBM,
            heads.beta_SBM.to(wide).sigmoid(),
            segments_BS,
            config.key_head_dim**-0.5,
            KEY_EPS,
        )

    def _scattered(self, heads: _Heads, part: SequencePart, group: ProcessGroup) -> _Heads:
        """All positions, in order, of this context-parallel rank's share of the heads."""

        def sections(x: Tensor, dim: int) -> list[Tensor]:
            return list(x.split(self.local.mixed_sections, dim))

        channels = (*sections(heads.mixed_SBC, -1), heads.beta_SBM, heads.decay_SBM)
        packed_SBNC = torch.cat([x.unflatten(-1, (group.size, -1)) for x in channels], dim=-1)
        own_SBC = in_order(scatter_heads(packed_SBNC, group).squeeze(2), part.of_ranks)
        num_heads = self.local.num_value_heads // group.size
        mixed_SBC, beta_SBM, decay_SBM = own_SBC.split(
            (own_SBC.shape[-1] - 2 * num_heads, num_heads, num_heads), dim=-1
        )
        filters_CK = torch.cat([x.chunk(group.size)[group.rank] for x in sections(heads.filters_CK, 0)])
        dt_bias_M, A_log_M = (x.chunk(group.size)[group.rank] for x in (heads.dt_bias_M, heads.A_log_M))
        return _Heads(mixed_SBC, beta_SBM, decay_SBM, filters_CK, dt_bias_M, A_log_M)
