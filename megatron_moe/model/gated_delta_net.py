"""Gated delta net (arXiv 2412.06464), as in Qwen3-Next.

1. one projection to q, k, v, an output gate z, and for each value head a beta and a decay
2. short causal convolution of q, k and v with SiLU
3. linear attention with the gated delta rule, whose q and k are normalised per head
4. norm of each head's output, multiplied by silu(z)
5. output projection
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from megatron_moe.config.gated_delta_net import GatedDeltaNetConfig
from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.layers.components import Site
from megatron_moe.layers.norm import Norm
from megatron_moe.layers.resources import ModelResources
from megatron_moe.model.linear_attention import LinearAttention
from megatron_moe.model.linear_scan import Scan

KEY_EPS = 1e-6
"""Epsilon of the L2 normalisation of q and k, added to the squared norms."""


class GatedDeltaNet(LinearAttention):
    """Gated delta net; see `LinearAttention`."""

    gate_activation: ClassVar[Literal["silu", "sigmoid"]] = "silu"

    def __init__(self, config: GatedDeltaNetConfig, site: Site, resources: ModelResources) -> None:
        super().__init__(config, site, resources)
        self.config = config
        self.dt_bias = self.declared.parameter("dt_bias")
        self.out_norm = Norm(config.norm, config.value_head_dim, self.ctx, self.kernels, over_heads=True)

    def project(self, hidden_SBH: Tensor) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        sizes = (sum(self.local.conv_input_widths), *self.local.in_proj_widths[3:])
        mixed_SBC, gate_SBC, *others = self.in_proj(hidden_SBH).split(sizes, dim=-1)
        return mixed_SBC, gate_SBC, others

    def recurrence(self, mixed_SBC: Tensor, others: Sequence[Tensor], scan: Scan) -> Tensor:
        (beta_SBM, decay_SBC), config = others, self.config
        filters_CK = scan.slice_for_local_heads(self.conv1d.weight, self.local.conv_input_widths)
        conv_SBC = scan.short_conv(mixed_SBC, filters_CK, None)
        widths = self.local.shard(scan.num_shares).conv_input_widths
        q_SBC, k_SBC, v_SBC = conv_SBC.split(widths, dim=-1)
        return scan.linear_attention(
            q_SBC.unflatten(-1, (-1, config.key_head_dim)),
            k_SBC.unflatten(-1, (-1, config.key_head_dim)),
            v_SBC.unflatten(-1, (-1, config.value_head_dim)),
            self.log_decay(decay_SBC, scan),
            beta_SBM.to(internal_dtype(beta_SBM.dtype)).sigmoid(),
            config.key_head_dim**-0.5,
            KEY_EPS,
        )

    def log_decay(self, decay_SBC: Tensor, scan: Scan) -> Tensor:
        """Logarithms of the decays in the internal dtype, [S, B, M], or [S, B, M, K] for one per channel of k."""
        wide = internal_dtype(decay_SBC.dtype)
        rate_SBM = F.softplus(decay_SBC.to(wide) + scan.slice_for_local_heads(self.dt_bias).to(wide))
        return -scan.slice_for_local_heads(self.A_log).to(wide).exp() * rate_SBM

    def gated_norm(self, out_SBMV: Tensor, gate_SBC: Tensor) -> Tensor:
        gate_SBMV = gate_SBC.unflatten(-1, out_SBMV.shape[2:])
        weight_V, eps = self.out_norm.weight, self.config.norm.eps
        return self.kernels.gated_rms_norm(out_SBMV, gate_SBMV, weight_V, eps, True, self.gate_activation).flatten(2)
