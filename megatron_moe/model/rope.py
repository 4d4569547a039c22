"""Rotary position embedding (arXiv 2104.09864): frequencies of every scaling and the cos/sin tables.

Angles are computed in fp64 for every dtype, because position times frequency loses one decimal digit per decade of
position in fp32; the tables are built once per microbatch.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from megatron_moe.config.attention import AttentionConfig, MLAConfig, RopeConfig, yarn_mscale
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.parallel.context import ParallelContext


class Rotations:
    """Builds the tables of every distinct rotation among the mixers of a stage."""

    def __init__(self, mixers: Iterable[AttentionConfig | MLAConfig], ctx: ParallelContext) -> None:
        configs = dict.fromkeys(mixer.rope for mixer in mixers if mixer.rope is not None)
        self.dtype = internal_dtype(ctx.dtype)
        self.frequencies = {config: inverse_frequencies(config).to(ctx.device) for config in configs}

    def attach(self, mb: MicrobatchContext) -> MicrobatchContext:
        """`mb` with the cos and sin of its positions."""
        tables = {
            config: self._table(config, freqs, mb.tokens.positions_BS) for config, freqs in self.frequencies.items()
        }
        return replace(mb, rotary=tables)

    def _table(self, config: RopeConfig, frequencies: Tensor, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [S, B, dim]; both halves of the last dim hold the same angles."""
        angles = positions_BS.T[:, :, None].double() * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        scale = concentration(config)
        return (angles.cos() * scale).to(self.dtype), (angles.sin() * scale).to(self.dtype)


def inverse_frequencies(config: RopeConfig) -> Tensor:
    """Angular frequency of every channel pair, radians per position, fp64 [dim / 2]."""
    plain = config.base ** (-torch.arange(0, config.dim, 2, dtype=torch.float64) / config.dim)
    match config.scaling:
        case "none":
            return plain
        case "linear":
            return plain / config.scaling_factor
        case "llama3":
            return _llama3(config, plain)
        case "yarn":
            return _yarn(config, plain)


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1 scaling (arXiv 2407.21783): wavelengths above the original context are stretched by the factor, short
    ones are kept, and those between `low_freq_factor` and `high_freq_factor` per context are interpolated."""
    waves_per_context = config.original_max_positions * plain / (2 * math.pi)
    keep = (waves_per_context - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    return _mix(plain, config.scaling_factor, keep.clamp(0, 1))


def _yarn(config: RopeConfig, plain: Tensor) -> Tensor:
    """YaRN scaling (arXiv 2309.00071 section 3.2): pairs with more than `beta_fast` rotations in the original context
    are kept, those with fewer than `beta_slow` are stretched, with a linear ramp over the pairs between."""
    low, high = _turning_dim(config, config.beta_fast), _turning_dim(config, config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero: the ramp becomes a step
    stretch = (torch.arange(config.dim // 2, dtype=torch.float64) - low) / (high - low)
    return _mix(plain, config.scaling_factor, 1 - stretch.clamp(0, 1))


def _turning_dim(config: RopeConfig, turns: float) -> float:
    """Fractional index of the pair with `turns` rotations in the original context."""
    return config.dim * math.log(config.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(config.base))


def _mix(plain: Tensor, factor: float, keep: Tensor) -> Tensor:
    return plain * keep + plain / factor * (1 - keep)


def concentration(config: RopeConfig) -> float:
    """Factor on cos and sin, YaRN's attention temperature for the longer context."""
    if config.scaling != "yarn":
        return 1.0
    if config.concentration is not None:
        return config.concentration
    return yarn_mscale(config.scaling_factor, config.mscale) / yarn_mscale(config.scaling_factor, config.mscale_all_dim)
