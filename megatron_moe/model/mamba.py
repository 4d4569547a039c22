"""Mamba-2 (arXiv 2405.21060).

1. one projection to an output gate z, x, B, C, and a time step for each head
2. short causal convolution of x, B and C with SiLU
3. state space model: linear attention with queries C, keys B, values x times time step, and a skip of D x
4. norm of the output times silu(z) over the heads of each group
5. output projection
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from megatron_moe.config.mamba import MambaConfig
from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.layers.components import Site
from megatron_moe.layers.resources import ModelResources
from megatron_moe.model.linear_attention import LinearAttention, WeightAndBias
from megatron_moe.model.linear_scan import Scan


class Mamba(LinearAttention):
    """Mamba-2 mixer; see `LinearAttention`."""

    def __init__(self, config: MambaConfig, site: Site, resources: ModelResources) -> None:
        super().__init__(config, site, resources)
        self.config = config
        self.conv1d.bias = self.declared.parameter("conv1d.bias")
        self.dt_bias, self.D = self.declared.parameter("dt_bias"), self.declared.parameter("D")
        self.norm = WeightAndBias()
        self.norm.weight = self.declared.parameter("norm.weight")

    def project(self, hidden_SBH: Tensor) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        sizes = (self.local.value_width, sum(self.local.conv_input_widths), self.local.num_value_heads)
        gate_SBC, mixed_SBC, step_SBM = self.in_proj(hidden_SBH).split(sizes, dim=-1)
        return mixed_SBC, gate_SBC, [step_SBM]

    def recurrence(self, mixed_SBC: Tensor, others: Sequence[Tensor], scan: Scan) -> Tensor:
        (step_SBM,), config, mixed = others, self.config, self.local.conv_input_widths
        filters_CK, bias_C = (scan.slice_for_local_heads(x, mixed) for x in (self.conv1d.weight, self.conv1d.bias))
        conv_SBC = scan.short_conv(mixed_SBC, filters_CK, bias_C)
        widths = self.local.shard(scan.num_shares).conv_input_widths
        x_SBC, k_SBC, q_SBC = conv_SBC.split(widths, dim=-1)
        x_SBMV, wide = x_SBC.unflatten(-1, (-1, config.value_head_dim)), internal_dtype(conv_SBC.dtype)
        step_SBM = F.softplus(step_SBM.to(wide) + scan.slice_for_local_heads(self.dt_bias).to(wide))
        out_SBMV = scan.linear_attention(
            q_SBC.unflatten(-1, (-1, config.key_head_dim)),
            k_SBC.unflatten(-1, (-1, config.key_head_dim)),
            (x_SBMV * step_SBM[..., None]).to(x_SBMV.dtype),
            -scan.slice_for_local_heads(self.A_log).to(wide).exp() * step_SBM,
            None,
            1.0,
        )
        return out_SBMV + x_SBMV * scan.slice_for_local_heads(self.D)[:, None]

    def gated_norm(self, out_SBMV: Tensor, gate_SBC: Tensor) -> Tensor:
        groups = (self.local.num_key_heads, -1)
        out_SBGW, gate_SBGW = (x.unflatten(-1, groups) for x in (out_SBMV.flatten(2), gate_SBC))
        weight_GW = self.norm.weight.unflatten(0, groups)
        return self.kernels.gated_rms_norm(out_SBGW, gate_SBGW, weight_GW, self.config.norm.eps, False).flatten(2)
