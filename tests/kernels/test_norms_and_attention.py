"""Norms, rotary positions and attention of the reference against formulas written out with scalars."""

import math

import pytest
import torch
from torch import Tensor

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.kernels.ops import AttentionInputs
from megatron_moe.kernels.reference import backend as reference
from tests.helpers.tolerances import EXACT, FP64_REF

KERNELS = reference.bundle()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm_divides_by_the_root_mean_square(zero_centered: bool) -> None:
    x, weight = draw(3, 5), draw(5, seed=1)
    actual = KERNELS.rms_norm(x, weight, 1e-2, zero_centered)
    for t in range(3):
        rms = math.sqrt(sum(float(v) ** 2 for v in x[t]) / 5 + 1e-2)
        for h in range(5):
            scale = float(weight[h]) + (1 if zero_centered else 0)
            assert float(actual[t, h]) == pytest.approx(float(x[t, h]) / rms * scale, rel=1e-12)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_layer_norm_subtracts_the_mean_and_divides_by_the_deviation(zero_centered: bool) -> None:
    x, weight, bias = draw(3, 5), draw(5, seed=1), draw(5, seed=2)
    actual = KERNELS.layer_norm(x, weight, bias, 1e-2, zero_centered)
    for t in range(3):
        mean = sum(map(float, x[t])) / 5
        deviation = math.sqrt(sum((float(v) - mean) ** 2 for v in x[t]) / 5 + 1e-2)
        for h in range(5):
            scale = float(weight[h]) + (1 if zero_centered else 0)
            expected = (float(x[t, h]) - mean) / deviation * scale + float(bias[h])
            assert float(actual[t, h]) == pytest.approx(expected, rel=1e-12)


def test_norms_have_the_gradients_of_finite_differences() -> None:
    x, weight, bias = (t.requires_grad_() for t in (draw(3, 5), draw(5, seed=1), draw(5, seed=2)))
    assert torch.autograd.gradcheck(lambda x, w: KERNELS.rms_norm(x, w, 1e-2, True), (x, weight))
    assert torch.autograd.gradcheck(lambda x, w, b: KERNELS.layer_norm(x, w, b, 1e-2, True), (x, weight, bias))


def test_norms_of_bf16_are_computed_in_fp32() -> None:
    x, weight = draw(4, 64).bfloat16(), draw(64, seed=1).bfloat16()
    exact = KERNELS.rms_norm(x.double(), weight.double(), 1e-5, False)
    EXACT.check(KERNELS.rms_norm(x, weight, 1e-5, False), exact.float().bfloat16())


def cos_and_sin(angles_SD: Tensor) -> tuple[Tensor, Tensor]:
    """Converts angles [S, D / 2] to the tables [S, 1, D] of `Kernels.rope`, in which each angle occurs twice."""
    repeated = torch.cat([angles_SD, angles_SD], dim=-1)[:, None]
    return repeated.cos(), repeated.sin()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_rotates_pairs_as_complex_numbers_and_keeps_other_dims(interleaved: bool) -> None:
    x, angles = draw(3, 2, 2, 6), draw(3, 2, seed=1)
    actual = KERNELS.rope(x, *cos_and_sin(angles), interleaved)
    for i in range(2):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + 2)
        rotated = torch.complex(x[..., first], x[..., second]) * torch.exp(1j * angles[:, None, None, i])
        FP64_REF.check(actual[..., first], rotated.real, f"first of pair {i}")
        FP64_REF.check(actual[..., second], rotated.imag, f"second of pair {i}")
    EXACT.check(actual[..., 4:], x[..., 4:], "dims past the rotated ones")


def test_rope_with_angles_per_sequence() -> None:
    x, angles = draw(3, 2, 1, 4), draw(3, 2, 2, seed=1)
    repeated = torch.cat([angles, angles], dim=-1)
    both = KERNELS.rope(x, repeated.cos(), repeated.sin(), False)
    for b in range(2):
        alone = KERNELS.rope(x[:, b : b + 1], *cos_and_sin(angles[:, b]), False)
        EXACT.check(both[:, b : b + 1], alone, f"sequence {b}")


def attend_by_hand(
    q: Tensor, k: Tensor, v: Tensor, config: CoreAttentionConfig, sinks: Tensor | None, segments: Tensor | None
) -> Tensor:
    """Computes attention with loops over queries and keys."""
    seq, batch, heads, _ = q.shape
    heads_per_group = heads // k.shape[2]
    out = torch.zeros(seq, batch, heads, v.shape[3], dtype=torch.float64)
    left, right = config.window or (-1, -1)
    for b in range(batch):
        for n in range(heads):
            group = n // heads_per_group
            for i in range(seq):
                weights = {}
                for j in range(seq):
                    if config.causal and j > i or left >= 0 and j < i - left or right >= 0 and j > i + right:
                        continue
                    if segments is not None and segments[b, i] != segments[b, j]:
                        continue
                    weights[j] = math.exp(config.softmax_scale * float(q[i, b, n] @ k[j, b, group]))
                total = sum(weights.values())
                total += 0 if sinks is None else math.exp(float(sinks[n]))
                total += 1 if config.off_by_one else 0
                for j, weight in weights.items():
                    out[i, b, n] += weight / total * v[j, b, group]
    return out


SEGMENTS = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 2, 2, 2]])


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one document", "documents"])
@pytest.mark.parametrize("extra", ["none", "sinks", "off_by_one"])
@pytest.mark.parametrize(
    "causal, window", [(True, None), (True, (1, 0)), (False, None), (False, (1, 2)), (False, (-1, 1))]
)
def test_attention_is_softmax_over_the_visible_keys(causal, window, extra, segments) -> None:
    config = CoreAttentionConfig(softmax_scale=0.7, causal=causal, window=window, off_by_one=extra == "off_by_one")
    sinks = draw(4, seed=3) if extra == "sinks" else None
    q, k, v = draw(5, 2, 4, 3), draw(5, 2, 2, 3, seed=1), draw(5, 2, 2, 2, seed=2)
    actual = KERNELS.attention(AttentionInputs(q, k, v, config, sinks, segments))
    FP64_REF.check(actual, attend_by_hand(q, k, v, config, sinks, segments))


def test_attention_has_the_gradients_of_finite_differences() -> None:
    config = CoreAttentionConfig(softmax_scale=0.7, window=(2, 0), sinks=True)
    inputs = [
        t.requires_grad_() for t in (draw(4, 1, 2, 3), draw(4, 1, 1, 3, seed=1), draw(4, 1, 1, 2, seed=2), draw(2))
    ]
    assert torch.autograd.gradcheck(lambda q, k, v, s: KERNELS.attention(AttentionInputs(q, k, v, config, s)), inputs)


def test_attention_dropout_depends_on_its_key_alone_and_keeps_the_mean() -> None:
    config = CoreAttentionConfig(softmax_scale=0.0, causal=False, dropout=0.4)
    q = torch.zeros(200, 2, 2, 1, dtype=torch.float64)
    ones = torch.ones(200, 2, 2, 1, dtype=torch.float64)

    def attend(*key: int | str) -> Tensor:
        return KERNELS.attention(AttentionInputs(q, q, ones, config, dropout_key=key or None))

    first = attend(1, "layer 0")
    EXACT.check(attend(1, "layer 0"), first, "same key")
    assert (attend(1, "layer 1") != first).any(), "another key"
    assert float(first.mean()) == pytest.approx(1.0, abs=0.01)
    EXACT.check(attend().round(decimals=12), ones, "evaluation")
