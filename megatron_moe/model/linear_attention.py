"""Base of mixers with linear attention: projections, short convolution, and context parallelism."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron_moe.config.linear_attention import LinearAttentionConfig
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.layers.components import Mixer, Site
from megatron_moe.layers.declared import DeclaredParameters
from megatron_moe.layers.resources import ModelResources
from megatron_moe.model.linear_scan import ChunksOverRanks, Scan, WholeSequences
from megatron_moe.parallel.context_parallel import gather_heads, order_by_position, order_by_rank, scatter_heads
from megatron_moe.parallel.parameter import Parameter


class WeightAndBias(nn.Module):
    """Parameters `weight` and, if set, `bias` in a submodule, so that their names match Megatron's checkpoints."""

    weight: Parameter
    bias: Parameter


class LinearAttention(Mixer):
    """Mixer with linear attention.

    Heads are sharded over tensor-parallel ranks. With context parallelism, either ranks pass on the recurrent states of
    their chunks (`linear_scan`), or an all-to-all before the convolution gathers positions and scatters heads, and
    another one after the recurrence reverses this (arXiv 2309.14509).
    """

    def __init__(self, config: LinearAttentionConfig, site: Site, resources: ModelResources) -> None:
        super().__init__(site, resources)
        self.local = config.shard(self.ctx.group("tp").size)
        """Config with the heads of this tensor-parallel rank."""
        self.declared = DeclaredParameters.of(config, resources)
        saves_input = self.saved_tensors.is_recomputed("layernorm")
        self.in_proj = self.declared.linear("in_proj", saves_input=saves_input)
        self.input_linears = (self.in_proj,)
        self.out_proj = self.declared.linear("out_proj")
        self.conv1d = WeightAndBias()
        self.conv1d.weight = self.declared.parameter("conv1d.weight")
        self.A_log = self.declared.parameter("A_log")

    def forward(self, hidden_SBH: Tensor, mb: MicrobatchContext) -> Tensor:
        """Applies the mixer to the hidden states [S, B, H] of this rank; returns the same shape."""
        mixed_SBC, gate_SBC, others = self.project(hidden_SBH)
        tokens, part = mb.tokens, mb.tokens.part
        if part is None or len(part.of_ranks) == 1:
            assert part is not None or self.ctx.group("cp").size == 1, "TokenMeta.part is not set"
            out_SBMV = self.recurrence(mixed_SBC, others, WholeSequences(self.kernels, tokens.segments_BS))
        elif self.local.cp_mode == "chunkwise":
            group, batch_size = self.ctx.group(part.group), mixed_SBC.shape[1]
            chunks = ChunksOverRanks(self.kernels, part, group, tokens.whole_segments_BS, batch_size)
            out_SBMV = self.recurrence(mixed_SBC, others, chunks)
        else:
            group = self.ctx.group(part.group)
            # collective over cp: all-to-all of S * B elements of all channels but the gate, later of S * B * M * V
            # elements of the output; backward: the same
            channels = (*mixed_SBC.split(self.local.conv_input_widths, dim=-1), *others)
            packed_SBNC = torch.cat([x.unflatten(-1, (group.size, -1)) for x in channels], dim=-1)
            own_SBC = order_by_position(scatter_heads(packed_SBNC, group).squeeze(2), part.of_ranks)
            widths = [x.shape[-1] // group.size for x in (mixed_SBC, *others)]
            mixed_SBC, *others = own_SBC.split(widths, dim=-1)
            whole = WholeSequences(self.kernels, tokens.whole_segments_BS, group)
            out_SBMV = self.recurrence(mixed_SBC, others, whole)
            out_SBMV = gather_heads(order_by_rank(out_SBMV, part.of_ranks), group)
        return self.out_proj(self.gated_norm(out_SBMV, gate_SBC))

    def project(self, hidden_SBH: Tensor) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """Returns the input of the convolution, with the channels of `conv_input_widths`; the output gate; and the
        other inputs of the recurrence, whose channels are ordered by head. All are [S, B, C]."""
        raise NotImplementedError

    def recurrence(self, mixed_SBC: Tensor, others: Sequence[Tensor], scan: Scan) -> Tensor:
        """Applies convolution and linear attention with the ops of `scan`; returns [S, B, M, V]."""
        raise NotImplementedError

    def gated_norm(self, out_SBMV: Tensor, gate_SBC: Tensor) -> Tensor:
        """Applies norm and output gate to the output of the recurrence; returns the input [S, B, C] of the output
        projection."""
        raise NotImplementedError
