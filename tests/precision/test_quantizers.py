"""Quantisers: equality with Transformer Engine's references, special values, blocks of experts, stochastic rounding."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_moe.config.precision import WHOLE, OperandFormat, low_precision_config
from megatron_moe.precision import nvfp4
from megatron_moe.precision.dither import block_dither
from megatron_moe.precision.expert_rows import dequantize_expert_rows
from megatron_moe.precision.quantized_tensor import QuantizedTensor, decode_scales, dequantize, expert_copies
from megatron_moe.precision.quantizers import quantize_rows, quantize_weight
from tests.helpers.low_precision_operands import PARTS
from tests.helpers.tolerances import EXACT
from tests.precision.quantizer_cases import cases, digests, make_input

MADE = json.loads((Path(__file__).parents[1] / "data_files" / "transformer_engine" / "quantizers.json").read_text())
FORMATS = {
    recipe: (low_precision_config(recipe).inputs, low_precision_config(recipe).weights)
    for recipe in ("blockwise", "tensorwise", "mxfp8", "nvfp4")
}
E4M3 = torch.float8_e4m3fn


def quantize(x: Tensor, fmt: OperandFormat) -> QuantizedTensor:
    """Both copies of a matrix, as rows or, for square blocks, as a weight."""
    if fmt.block[0] > 1:
        return quantize_weight(x, fmt, columnwise=True)
    return quantize_rows(x, fmt, rowwise=True, columnwise=True)


def form_of(recipe: str) -> OperandFormat:
    """Format named as in `quantizer_cases.RECIPES`."""
    name, *options = recipe.split()
    if name == "blockwise":
        block, element, scale = options
        shape = (1, 128) if block == "1x128" else (128, 128)
        return OperandFormat(element=element, block=shape, scale="power of 2" if scale == "pow2" else "fp32")
    if name == "tensorwise":
        return OperandFormat(element=options[0], block=WHOLE, scale="fp32")
    return FORMATS["nvfp4"][options == ["16x16"]]


@pytest.mark.parametrize(("name", "recipe", "shape", "kind", "dtype"), cases(), ids=[case[0] for case in cases()])
def test_bytes_and_scales_equal_those_of_transformer_engine(name, recipe, shape, kind, dtype) -> None:
    made = quantize(make_input(shape, kind, dtype), form_of(recipe))
    parts = dict(zip(PARTS, made.tensors, strict=True))
    assert digests({part: parts[part] for part in PARTS if not part.endswith("factor")}) == MADE[name]


def e8m0_by_hand(amax: float, largest: float = 448) -> int:
    """Exponent of amax / largest, rounded up, plus 127; 255 (nan) if amax is not finite."""
    if not math.isfinite(amax):
        return 255
    ratio = float(torch.tensor(amax) * torch.tensor(1 / largest))
    return 0 if ratio == 0 else max(0, min(254, math.frexp(ratio)[1] - (math.frexp(ratio)[0] == 0.5) + 127))


def test_mxfp8_scales_are_powers_of_two_rounded_up() -> None:
    largest = float(torch.finfo(torch.float32).max)
    amaxes = [0.0, 1e-45, 2.0**-130, 2.0**-118, 1.0, 448.0, 449.0, 447.0, 3.5, 2.0**100, largest, math.inf, math.nan]
    x = torch.zeros(len(amaxes), 64)
    x[:, 5], x[:, 40] = torch.tensor(amaxes), 1.0
    made = quantize(x, FORMATS["mxfp8"][0])
    assert made.row_copy.scales[0].tolist() == [e8m0_by_hand(amax) for amax in amaxes]
    values = dequantize(made.row_copy, (1, 32), torch.float64)
    EXACT.check(values[:, 40], torch.ones(len(amaxes)).double(), "the second block of every row")
    e5m2 = quantize_rows(x, low_precision_config("mxfp8", hybrid=True).grads, rowwise=True, columnwise=True)
    assert e5m2.row_copy.scales[0].tolist() == [e8m0_by_hand(amax, 57344) for amax in amaxes]
    finite = torch.tensor(amaxes[:-2]).double()
    error = (values[:-2, 5] - finite).abs()
    assert (error <= torch.maximum(finite * 2.0**-4, torch.tensor(2.0**-137).double())).all()
    assert values[-2:, :32].isnan().all(), "inf and nan"
    assert decode_scales(torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8)).tolist()[:4] == [
        2.0**-127, 2.0**-126, 1.0, 2.0**127,
    ]  # fmt: skip


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_special_values(recipe: str) -> None:
    """The scale of a block of zeros is 1. If a block contains inf or nan, its scale and all its values are nan."""
    fmt = FORMATS[recipe][0]
    x = torch.tensor([[0.0, -0.0, 0.0], [math.inf, 2.0, -math.inf], [math.nan, 2.0, 500.0]])
    zeros, *others = (quantize_rows(row[None], fmt, rowwise=True, columnwise=True) for row in x)
    assert zeros.row_copy.scales.flatten().tolist() == [1.0] and not zeros.row_copy.data.float().any()
    for made in others:
        assert dequantize(made.row_copy, made.block, torch.float32).isnan().all()
    tiny = quantize_rows(torch.full((1, 4), 2.0**-149), fmt, rowwise=True, columnwise=False)
    assert tiny.row_copy.scales.isfinite().all() and tiny.row_copy.data.float().isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_nan_does_not_leave_its_block(value: float) -> None:
    x = torch.ones(256, 256)
    x[3, 130] = value
    made = quantize(x, FORMATS["blockwise"][0])
    row = dequantize(made.row_copy, made.block, torch.float32)
    column = dequantize(made.column_copy, made.block, torch.float32).T
    for values, block in ((row, row[3, 128:]), (column, column[:128, 130])):
        assert values.isnan().sum() == 128 and block.isnan().all()
        EXACT.check(values.nan_to_num(1.0), torch.ones(256, 256))


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("offsets", [[5, 5, 150, 290], [0, 0, 0, 300], [16, 48, 176, 256], [0, 0, 0, 0]], ids=str)
def test_rows_of_experts_are_quantised_separately(recipe: str, offsets: list[int]) -> None:
    """The copies of each expert's rows equal those of its rows alone, for any content of the other rows."""
    fmt = FORMATS[recipe][0]
    rows = make_input((300, 64), "narrow", torch.bfloat16)
    rows[offsets[-1] :] = math.nan
    offsets_e = torch.tensor(offsets, dtype=torch.int32)
    made = quantize_rows(rows, fmt, rowwise=True, columnwise=True, offsets_e=offsets_e)
    row_values = dequantize_expert_rows(made.row_copy, made.block, offsets_e, torch.float64, columnwise=False)
    column_values = dequantize_expert_rows(made.column_copy, made.block, offsets_e, torch.float64, columnwise=True)
    place = 0
    row_copies = expert_copies(made.row_copy, made.block, offsets, columnwise=False)
    column_copies = expert_copies(made.column_copy, made.block, offsets, columnwise=True)
    for expert, (start, end) in enumerate(zip([0, *offsets], offsets, strict=False)):
        if start == end:
            continue
        alone = quantize_rows(rows[start:end], fmt, rowwise=True, columnwise=True)
        for copies, expected in ((row_copies, alone.row_copy), (column_copies, alone.column_copy)):
            found, width = copies[expert].data.view(torch.uint8), expected.data.shape[1]
            assert torch.equal(found[:, :width], expected.data.view(torch.uint8))
            assert not found[:, width:].any(), "padded with zeros"
            assert torch.equal(copies[expert].scales.float(), expected.scales.float())
            if expected.factor is not None:
                assert torch.equal(copies[expert].factor, expected.factor)
        EXACT.check(row_values[start:end], dequantize(row_copies[expert], made.block, torch.float64), "row values")
        expected_columns = dequantize(column_copies[expert], made.block, torch.float64)
        EXACT.check(column_values[:, place : (place := place + expected_columns.shape[1])], expected_columns, "columns")


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("shape", [(130, 272), (2, 128, 40)], ids=str)
def test_columnwise_weights(recipe: str, shape: tuple[int, ...]) -> None:
    """Square blocks are transposed exactly; 1x32 blocks are quantised again from the original."""
    fmt = FORMATS[recipe][1]
    weight = make_input((shape[0] * (shape[1] if len(shape) == 3 else 1), shape[-1]), "narrow", torch.bfloat16)
    weight = weight.view(shape)
    made = quantize_weight(weight, fmt, columnwise=True)
    row = dequantize(made.row_copy, made.block, torch.float64)[..., : shape[-1]]
    column = dequantize(made.column_copy, made.block, torch.float64)[..., : shape[-2]]
    if fmt.block[0] == 1:
        transposed = quantize_weight(weight.mT, fmt, columnwise=False)
        row = dequantize(transposed.row_copy, transposed.block, torch.float64).mT
    EXACT.check(column.mT, row)
    other = quantize_weight(weight * 3, fmt, columnwise=True)
    assert quantize_weight(weight, fmt, columnwise=True, out=other) is other
    for mine, expected in ((other.row_copy, made.row_copy), (other.column_copy, made.column_copy)):
        EXACT.check(dequantize(mine, made.block, torch.float64), dequantize(expected, made.block, torch.float64))
    for index in range(shape[0] if len(shape) == 3 else 0):
        alone = quantize_weight(weight[index], fmt, columnwise=True)
        EXACT.check(dequantize(alone.row_copy, alone.block, torch.float64)[..., : shape[-1]],
                    dequantize(made.row_copy, made.block, torch.float64)[index, :, : shape[-1]])  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "x_error", "weight_error"),
    [
        ("blockwise", 0.0266, 0.0266),
        ("tensorwise", 0.0265, 0.0264),
        ("mxfp8", 0.0266, 0.0266),
        ("nvfp4", 0.0951, 0.1113),
    ],
)
def test_relative_errors_of_gaussian_matrices(recipe: str, x_error: float, weight_error: float) -> None:
    """Relative Frobenius errors are those of the formats: 2^-4 / sqrt(...) of E4M3, larger for 2-d blocks of E2M1."""
    x = torch.randn(512, 2048, generator=torch.Generator().manual_seed(1))
    for fmt, expected in zip(FORMATS[recipe], (x_error, weight_error), strict=True):
        made = quantize(x, fmt)
        values = dequantize(made.row_copy, made.block, torch.float32)
        assert abs(float((values - x).norm() / x.norm()) - expected) < 0.0005


def test_bf16_holds_elements_times_powers_of_two() -> None:
    """E4M3 times a power of two is a bf16 number, so dequantised rows lose nothing in a bf16 weight gradient."""
    made = quantize(make_input((256, 384), "wide", torch.bfloat16), FORMATS["blockwise"][0])
    values = dequantize(made.row_copy, made.block, torch.float64)
    values = values[values.abs() > 2.0**-120]
    EXACT.check(values.bfloat16().double(), values)


def test_hadamard_transform_is_orthogonal_and_cancels_in_the_product() -> None:
    eye = nvfp4.hadamard(torch.eye(16, dtype=torch.float64))
    EXACT.check(eye @ eye.T, torch.eye(16).double())
    assert set((eye * 4).flatten().tolist()) == {1.0, -1.0}
    a, b = (torch.randint(-8, 8, (5, 64), generator=torch.Generator().manual_seed(s)).float() for s in (1, 2))
    EXACT.check(nvfp4.hadamard(a) @ nvfp4.hadamard(b).T, a @ b.T)


def test_stochastic_rounding_depends_on_the_values_of_a_block_alone() -> None:
    """Rows may be permuted or sharded, and zeros may have any sign; other seeds and other blocks round differently."""
    fmt, seed = low_precision_config("nvfp4").grads, torch.tensor(5)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    x[0, :3], x[1, :3], x[2, 0] = -0.0, 0.0, 6.0
    x[1, 3:], x[3] = x[0, 3:], x[2]
    order = torch.randperm(64, generator=torch.Generator().manual_seed(4))

    def codes(x: Tensor) -> Tensor:
        return quantize_rows(x, fmt, rowwise=True, columnwise=False, seed=seed).row_copy.data & 0x77

    EXACT.check(codes(x)[order], codes(x[order]), "permuted rows")
    shard = torch.cat([x[:, 16:48], torch.full((64, 16), float(x.abs().max()))], dim=1)  # the same factor
    EXACT.check(codes(shard)[:, :16], codes(x)[:, 8:24], "channels of a shard")
    EXACT.check(codes(x)[1], codes(x)[0], "zeros of the other sign")
    noise = block_dither(x, 16, seed)
    EXACT.check(noise[3], noise[2], "equal blocks")
    x[3, 17] += 1e-3
    changed = (block_dither(x, 16, seed) != noise)[3].unflatten(0, (-1, 16))
    assert changed[1].all() and not changed[[0, 2, 3]].any(), "one value changes the numbers of its block"


def test_dither_of_blocks_is_uniform_and_uncorrelated() -> None:
    x = torch.randint(-8, 9, (4096, 16), generator=torch.Generator().manual_seed(1)).float() / 2
    first, second = (block_dither(x, 16, torch.tensor(seed)) for seed in (7, 8))
    counts = torch.histc(first, bins=16, min=0, max=1) / first.numel()
    assert (counts - 1 / 16).abs().max() < 2e-3 and first.min() >= 0 and first.max() < 1
    for other in (second, first.roll(1, 1), first.roll(1, 0), x / 8):
        assert abs(float(torch.corrcoef(torch.stack([first.flatten(), other.flatten()]))[0, 1])) < 0.015
    value_means = torch.stack([first[x == value].mean() for value in x.unique()])
    assert (value_means - 0.5).abs().max() < 0.02, "rounding of a value has no bias"


def test_stochastic_rounding_is_unbiased_and_reproducible() -> None:
    fmt = low_precision_config("nvfp4").grads
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))

    def draw(seed: int) -> Tensor:
        made = quantize_rows(x, fmt, rowwise=True, columnwise=True, seed=torch.tensor(seed))
        return dequantize(made.row_copy, made.block, torch.float32)

    assert torch.equal(draw(7), draw(7)) and not torch.equal(draw(7), draw(8))
    nearest = dequantize(quantize_rows(x, FORMATS["nvfp4"][0], rowwise=True, columnwise=False).row_copy, (1, 16),
                         torch.float32)  # fmt: skip
    mean = torch.stack([draw(seed) for seed in range(200)]).mean(dim=0)
    assert (mean - x).norm() < 0.2 * (nearest - x).norm(), "the mean of many draws is closer than the nearest number"
    assert abs(float((mean - x).sum() / x.abs().sum())) < 2e-3
    exact = torch.tensor([[0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0] * 2]) * 448.0
    exact[0, 8:] *= -1
    made = quantize_rows(exact, fmt, rowwise=True, columnwise=False, seed=torch.tensor(1))
    EXACT.check(dequantize(made.row_copy, made.block, torch.float64), exact.double(), "exact numbers stay")
