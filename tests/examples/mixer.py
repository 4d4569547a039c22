"""Mixer: a gated causal depthwise convolution, `--mixer short_conv`."""

from dataclasses import dataclass
from functools import partial

import torch

from arguments.flag import new_flag
from megatron_moe.config.component import MixerConfig, ParamSpec, linear_parameters
from megatron_moe.config.costs import TRAINING_FLOPS, FlopCount, saved_tensor
from megatron_moe.config.param_meta import ParamMeta
from megatron_moe.config.registry import FLAGS, MIXERS
from megatron_moe.layers.components import Mixer
from megatron_moe.layers.declared import DeclaredParameters
from megatron_moe.parallel.tensor_parallel import all_gather


@dataclass(frozen=True, kw_only=True)
class ShortConvFlags:
    """Flags of the example."""

    short_conv_taps: int = new_flag(4, least=1)
    """Width of the convolution in tokens."""


@dataclass(frozen=True, kw_only=True)
class ShortConvConfig(MixerConfig):
    """out(silu(gate) * conv(value)), with H channels, which tensor-parallel ranks share."""

    taps: int

    module = f"{__name__}:ShortConv"
    registered_as = "short_conv"

    def as_flags(self):
        return {"short_conv_taps": self.taps}

    def parameters(self, parallel):
        linear, hidden = partial(linear_parameters, parallel=parallel, counted="attention"), self.hidden_size
        yield from linear("linear_in", (2 * hidden, hidden), low="qkv_linear", tp_dim=0, splits=(hidden, hidden))
        yield from linear("linear_out", (hidden, hidden), low="attn_proj", tp_dim=1, init="output")
        meta = ParamMeta(role="vector", fan_in=self.taps, tp_dim=0)
        yield ParamSpec(name="taps", shape=(self.hidden_size, self.taps), meta=meta, counted="attention")

    def flops(self, seq_length):
        return FlopCount(core_attention=seq_length * self.hidden_size * self.taps * TRAINING_FLOPS)

    def saved_tensors(self, parallel, sizes):
        count = sizes.inner * self.hidden_size // parallel.tp
        for name, width in (("gate and value", 2), ("value and its past", 1), ("silu of the gate", 1)):
            yield saved_tensor("attention", name, "U C", width * count, sizes.activation_itemsize)
        yield saved_tensor("attention", "convolved", "U C", count, sizes.activation_itemsize)
        yield saved_tensor("attention", "product", "U C", count, sizes.activation_itemsize, {"low": "attn_proj"})

    def backward_workspace(self, parallel, sizes, low):
        return (
            4.0 * sizes.inner * self.hidden_size // parallel.tp * sizes.activation_itemsize
            + sizes.gathered_bytes_per_channel(parallel)
        )

    def layout_problem(self, parallel):
        if self.hidden_size % parallel.tp:
            return f"{parallel.tp} tensor-parallel ranks cannot share {self.hidden_size} channels equally"
        return None

    def context_parallel_traffic(self, parallel, sizes):
        num_chunks = 2 if parallel.cp_split == "zigzag" else 1
        tails = (
            num_chunks * (self.taps - 1) * self.hidden_size // parallel.tp * (sizes.inner * parallel.cp / sizes.length)
        )
        return 2 * (parallel.cp - 1) * tails * sizes.activation_itemsize


class ShortConv(Mixer):
    def __init__(self, config, site, resources):
        super().__init__(site, resources)
        declared = DeclaredParameters.of(config, resources)
        self.linear_in, self.linear_out = declared.linear("linear_in"), declared.linear("linear_out")
        self.taps = declared.parameter("taps")

    def forward(self, hidden_SBH, mb):
        gate_SBC, value_SBC = self.linear_in(hidden_SBH).chunk(2, dim=-1)
        return self.linear_out(torch.nn.functional.silu(gate_SBC) * self._convolve(value_SBC, mb.tokens))

    def _convolve(self, x_SBC, tokens):
        """Convolves every chunk of positions on this rank, with the last tokens of the preceding chunk as history."""
        past, part = self.taps.shape[1] - 1, tokens.part
        if part is None or len(part.of_ranks) == 1:
            return self._taps_of(torch.nn.functional.pad(x_SBC, (0, 0, 0, 0, past, 0)), tokens.segments_BS, 0)
        chunks = x_SBC.chunk(len(part.chunks))
        tails = torch.stack([chunk[len(chunk) - past :] for chunk in chunks])
        group = self.ctx.group(part.group)
        # cp: all-gather of (taps - 1) * B * C elements per chunk, backward reduce-scatter
        by_stop = dict(
            zip((c.stop for of_rank in part.of_ranks for c in of_rank), all_gather(tails, group), strict=True)
        )
        out = []
        for chunk, positions in zip(chunks, part.chunks, strict=True):
            before = by_stop[positions.start] if positions.start else torch.zeros_like(tails[0])
            out.append(self._taps_of(torch.cat([before, chunk]), tokens.whole_segments_BS, positions.start))
        return torch.cat(out)

    def _taps_of(self, x_SBC, segments_BS, start):
        """Weighted sums over `taps` tokens; `x_SBC` begins taps - 1 tokens before position `start`."""
        past = self.taps.shape[1] - 1
        length, total = len(x_SBC) - past, 0
        for back in range(past + 1):
            shifted = x_SBC[past - back : past - back + length] * self.taps[:, back]
            if segments_BS is not None and back:  # tokens of other documents are masked
                own_BS = segments_BS[:, start : start + length]
                other_BS = torch.nn.functional.pad(segments_BS, (back, 0), value=-1)[:, start : start + length]
                shifted = shifted * (own_BS == other_BS).T[:, :, None]
            total = total + shifted
        return total


def from_flags(flags):
    """Creates the config of every layer."""
    return [ShortConvConfig(hidden_size=flags.hidden_size, taps=flags.short_conv_taps)] * flags.num_layers


FLAGS.register("short_conv", ShortConvFlags)
MIXERS.register("short_conv", from_flags)
