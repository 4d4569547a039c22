"""Frequencies and tables against independent formulas in numpy."""

import math

import numpy as np
import pytest
import torch

from megatron_moe.config.attention import RopeConfig, yarn_mscale
from megatron_moe.model.rope import Rotations, concentration, inverse_frequencies
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.tiny_models import attention_config, make_mb
from tests.helpers.tolerances import FP64_REF

DIM = 32


def plain(base: float, dim: int = DIM) -> np.ndarray:
    return np.array([1.0 / base ** (2 * i / dim) for i in range(dim // 2)])


def llama3(config: RopeConfig) -> np.ndarray:
    """The three cases of the published rule, one pair at a time."""
    result = []
    for frequency in plain(config.base):
        wavelength = 2 * math.pi / frequency
        if wavelength < config.original_max_positions / config.high_freq_factor:
            result.append(frequency)
        elif wavelength > config.original_max_positions / config.low_freq_factor:
            result.append(frequency / config.scaling_factor)
        else:
            ratio = config.original_max_positions / wavelength
            smooth = (ratio - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
            result.append((1 - smooth) * frequency / config.scaling_factor + smooth * frequency)
    return np.array(result)


def yarn(config: RopeConfig) -> np.ndarray:
    """inv = inter * (1 - mask) + extra * mask with mask = 1 - ramp(low, high)."""
    extra, inter = plain(config.base), plain(config.base) / config.scaling_factor

    def dim_of(rotations: float) -> float:
        return DIM * np.log(config.original_max_positions / (rotations * 2 * np.pi)) / (2 * np.log(config.base))

    low, high = dim_of(config.beta_fast), dim_of(config.beta_slow)
    if config.truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, DIM - 1)
    high = high + 0.001 if low == high else high
    mask = 1 - np.clip((np.arange(DIM // 2) - low) / (high - low), 0, 1)
    return inter * (1 - mask) + extra * mask


def test_plain_frequencies_follow_the_base():
    for base in (10000.0, 500000.0):
        FP64_REF.check(inverse_frequencies(RopeConfig(dim=DIM, base=base)), plain(base), f"base {base}")


def test_linear_scaling_divides_every_frequency():
    config = RopeConfig(dim=DIM, scaling="linear", scaling_factor=4.0)
    FP64_REF.check(inverse_frequencies(config), plain(config.base) / 4.0, "frequencies")


@pytest.mark.parametrize(("factor", "low", "high", "context"), [(8.0, 1.0, 4.0, 8192), (32.0, 2.0, 16.0, 512)])
def test_llama3_frequencies_equal_the_published_rule(factor, low, high, context):
    config = RopeConfig(
        dim=DIM,
        base=5e5,
        scaling="llama3",
        scaling_factor=factor,
        original_max_positions=context,
        low_freq_factor=low,
        high_freq_factor=high,
    )
    frequencies = inverse_frequencies(config)
    FP64_REF.check(frequencies, llama3(config), "frequencies")
    ratio = (plain(5e5) / frequencies.numpy()).round(9)
    assert ratio.min() == 1 and ratio.max() == factor and ((ratio > 1) & (ratio < factor)).any(), (
        "all three cases occur"
    )


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(
    ("factor", "context", "base"), [(40.0, 4096, 1e4), (32.0, 4096, 150000.0), (4.0, 64, 1e4), (4.0, 576, 8.0)]
)
def test_yarn_frequencies_equal_the_ramp_formula(truncate, factor, context, base):
    config = RopeConfig(
        dim=DIM, base=base, scaling="yarn", scaling_factor=factor, original_max_positions=context, truncate=truncate
    )
    FP64_REF.check(inverse_frequencies(config), yarn(config), "frequencies")


def test_yarn_with_an_empty_ramp_is_a_step():
    config = RopeConfig(dim=DIM, scaling="yarn", scaling_factor=8.0, beta_fast=32, beta_slow=32, truncate=False)
    ratio = (plain(1e4) / inverse_frequencies(config).numpy()).round(9)
    assert set(ratio) == {1.0, 8.0}
    FP64_REF.check(inverse_frequencies(config), yarn(config), "frequencies")


def test_yarn_concentration_is_the_ratio_of_mscales_unless_given():
    ratio = (0.1 * 0.7 * math.log(40) + 1) / (0.1 * 1.3 * math.log(40) + 1)
    config = RopeConfig(dim=DIM, scaling="yarn", scaling_factor=40.0, mscale=0.7, mscale_all_dim=1.3)
    FP64_REF.check(concentration(config), ratio, "ratio")
    given = RopeConfig(dim=DIM, scaling="yarn", scaling_factor=32.0, mscale=0.7, concentration=1.2)
    assert concentration(given) == 1.2
    assert concentration(RopeConfig(dim=DIM, scaling="linear", scaling_factor=4.0)) == 1.0
    assert yarn_mscale(0.5, 3.0) == 1.0, "a shorter context is not sharpened"


def test_tables_are_cos_and_sin_of_every_position():
    config = RopeConfig(dim=6, scaling="yarn", scaling_factor=40.0, mscale=1.0)
    positions_BS = torch.tensor([[0, 1, 2, 700], [5, 0, 1, 2]])
    rotations = Rotations([attention_config(rope=config), attention_config(rope=None)], ParallelContext.single())
    cos_SBD, sin_SBD = rotations.attach(make_mb(2, 4, positions_BS=positions_BS)).rotary[config]
    frequencies = inverse_frequencies(config).numpy()
    for b in range(2):
        for s in range(4):
            angles = np.concatenate([frequencies, frequencies]) * int(positions_BS[b, s])
            FP64_REF.check(cos_SBD[s, b], np.cos(angles) * concentration(config), "cos")
            FP64_REF.check(sin_SBD[s, b], np.sin(angles) * concentration(config), "sin")


def test_layers_with_equal_rotations_share_one_table():
    mixers = [attention_config(), attention_config(), attention_config(rope=RopeConfig(dim=8, base=1e6))]
    assert len(Rotations(mixers, ParallelContext.single()).frequencies) == 2


def test_tables_have_the_internal_dtype():
    rotations = Rotations([attention_config()], ParallelContext.single(dtype=torch.bfloat16))
    cos_SBD, _ = rotations.attach(make_mb(1, 3)).rotary[attention_config().rope]
    assert cos_SBD.dtype == torch.float32
