"""Kimi delta attention (arXiv 2510.26692), as in Kimi-Linear: a gated delta net with

1. a decay for each channel of the keys of a value head, from a low-rank projection
2. an output gate with a sigmoid, from another low-rank projection
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from megatron_moe.config.kimi_delta_attention import KimiDeltaAttentionConfig
from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.layers.components import Site
from megatron_moe.layers.resources import ModelResources
from megatron_moe.model.gated_delta_net import GatedDeltaNet
from megatron_moe.model.linear_scan import Scan


class KimiDeltaAttention(GatedDeltaNet):
    """Kimi delta attention; see `LinearAttention`. All tensor-parallel ranks compute the latents of both gates, for
    their own positions with sequence parallelism, and gather them."""

    gate_activation: ClassVar[Literal["silu", "sigmoid"]] = "sigmoid"

    def __init__(self, config: KimiDeltaAttentionConfig, site: Site, resources: ModelResources) -> None:
        super().__init__(config, site, resources)
        self.gates_down_proj = self.declared.linear("gates_down_proj")
        self.decay_up_proj = self.declared.linear("decay_up_proj")
        self.output_gate_up_proj = self.declared.linear("output_gate_up_proj")

    def project(self, hidden_SBH: Tensor) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        # collective over tp with sequence parallelism: each up-projection all-gathers its input of S * B * E elements;
        # backward: reduce-scatters of their gradients
        decay_SBE, gate_SBE = self.gates_down_proj(hidden_SBH).chunk(2, dim=-1)
        mixed_SBC, beta_SBM = self.in_proj(hidden_SBH).split(
            (sum(self.local.conv_input_widths), self.local.num_value_heads), dim=-1
        )
        return mixed_SBC, self.output_gate_up_proj(gate_SBE), [beta_SBM, self.decay_up_proj(decay_SBE)]

    def log_decay(self, decay_SBC: Tensor, scan: Scan) -> Tensor:
        wide, num_channels = internal_dtype(decay_SBC.dtype), self.config.key_head_dim
        rate_SBC = F.softplus(decay_SBC.to(wide) + scan.slice_for_local_heads(self.dt_bias).to(wide))
        return -scan.slice_for_local_heads(self.A_log).to(wide).exp()[:, None] * rate_SBC.unflatten(
            -1, (-1, num_channels)
        )
