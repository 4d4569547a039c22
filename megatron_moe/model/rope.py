"""Rotary position embedding (arXiv 2104.09864): frequencies for every scaling method, and the cos/sin tables.

Angles are computed in fp64 for every dtype: in fp32, the angle position * frequency would lose one decimal digit per
factor 10 in position. The tables are built once per microbatch.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from megatron_moe.config.attention import RopeConfig, yarn_mscale
from megatron_moe.config.component import MixerConfig
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.parallel.context import ParallelContext


class Rotations:
    """Builds the cos/sin tables of every distinct `RopeConfig` among the attention modules of a stage."""

    def __init__(self, mixers: Iterable[MixerConfig], ctx: ParallelContext) -> None:
        configs = dict.fromkeys(rope for mixer in mixers for rope in mixer.rotary_tables)
        self.dtype = internal_dtype(ctx.dtype)
        self.frequencies = {config: inverse_frequencies(config).to(ctx.device) for config in configs}

    def attach(self, mb: MicrobatchContext) -> MicrobatchContext:
        """Returns `mb` with the cos/sin tables for its positions, in `MicrobatchContext.rotary`."""
        tables = {
            config: cos_and_sin(config, freqs, mb.tokens.positions_BS, self.dtype)
            for config, freqs in self.frequencies.items()
        }
        return replace(mb, rotary=tables)


def cos_and_sin(
    config: RopeConfig, frequencies: Tensor, positions_BS: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin tables of positions, each [S, B, dim]; both halves of the last dim hold the same values.
    `frequencies`: result of `inverse_frequencies`."""
    angles = positions_BS.T[:, :, None].double() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    scale = concentration(config)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def inverse_frequencies(config: RopeConfig) -> Tensor:
    """Angular frequency of every channel pair in radians per position: fp64 [dim / 2]."""
    plain = config.base ** (-torch.arange(0, config.dim, 2, dtype=torch.float64) / config.dim)
    if config.scaling == "none":
        return plain
    if config.scaling == "linear":
        return plain / config.scaling_factor
    keep = _llama3_weights(config, plain) if config.scaling == "llama3" else _yarn_weights(config)
    return plain * keep + plain / config.scaling_factor * (1 - keep)


def _llama3_weights(config: RopeConfig, plain: Tensor) -> Tensor:
    """Weights by which Llama 3.1 (arXiv 2407.21783) mixes scaled (0) and unscaled (1) frequencies, fp64 [dim / 2]. They
    rise linearly from 0 to 1 between `low_freq_factor` and `high_freq_factor` wavelengths per original context."""
    waves_per_context = config.original_max_positions * plain / (2 * math.pi)
    keep = (waves_per_context - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    return keep.clamp(0, 1)


def _yarn_weights(config: RopeConfig) -> Tensor:
    """Weights by which YaRN (arXiv 2309.00071, 3.2) mixes scaled (0) and unscaled (1) frequencies, fp64 [dim / 2].
    They fall from 1 at `beta_fast` to 0 at `beta_slow` rotations per original context, linearly in channel index."""
    low, high = _turning_dim(config, config.beta_fast), _turning_dim(config, config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero; the ramp becomes a step
    ramp = (torch.arange(config.dim // 2, dtype=torch.float64) - low) / (high - low)
    return 1 - ramp.clamp(0, 1)


def _turning_dim(config: RopeConfig, turns: float) -> float:
    """Fractional index of the channel pair with `turns` full rotations over the original context."""
    return config.dim * math.log(config.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(config.base))


def concentration(config: RopeConfig) -> float:
    """Factor by which cos and sin are multiplied: YaRN's attention temperature; 1 for other scaling methods."""
    if config.scaling != "yarn":
        return 1.0
    if config.concentration is not None:
        return config.concentration
    return yarn_mscale(config.scaling_factor, config.mscale) / yarn_mscale(config.scaling_factor, config.mscale_all_dim)
