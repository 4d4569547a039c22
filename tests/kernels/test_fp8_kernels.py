"""FP8 kernels without a GPU: casts in the interpreter, and whether the Hopper GEMMs compile. Results on a GPU:
tests/gpu/test_fp8_on_one_gpu.py."""

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.kernels.backends.hopper import fp8_linear
from megatron_moe.kernels.backends.triton import activation, norm, quantize
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.precision.quantized_tensor import QuantizedCopy, QuantizedTensor, expert_copies
from tests.helpers.fp8_oracle import quantized_rows, quantized_weight, same_elements, same_scales
from tests.helpers.tolerances import EXACT, FP32_REF
from tests.kernels.compiled import NO_SPILLS, SHARED_MEMORY, compiled

LAUNCHES = """
from dataclasses import replace
from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.kernels.backends.hopper import casts, fp8_grouped_gemm, fp8_weight_grad
from megatron_moe.kernels.backends.triton import activation, launch, norm, quantize
from megatron_moe.kernels.ops import GroupedPart, RowIndex

launch._sum_shares = Compiled(launch._sum_shares)
fp8_grouped_gemm._fp8_grouped_gemm = Compiled(fp8_grouped_gemm._fp8_grouped_gemm)
fp8_weight_grad._fp8_expert_grads = Compiled(fp8_weight_grad._fp8_expert_grads)
for name in ("_list_row_blocks", "_dequantize_columns", "_dequantize_rows", "_copy_quantized"):
    setattr(quantize, name, Compiled(getattr(quantize, name)))
for name in ("rows", "blocks", "weight", "tokens"):
    setattr(quantize, f"_quantize_{name}", Compiled(getattr(quantize, f"_quantize_{name}")))
for name in ("forward", "backward"):
    setattr(activation, f"_activation_{name}", Compiled(getattr(activation, f"_activation_{name}")))
x, stack = torch.zeros(1024, 512, dtype=torch.bfloat16), torch.zeros(8, 768, 512, dtype=torch.bfloat16)
ends = torch.zeros(8, dtype=torch.int32)
weight = quantize.quantize_weight(stack)
fp8_grouped_gemm.quantized_grouped_forward(quantize.quantize_rows(x), weight, ends)
grad = quantize.quantize_rows(torch.zeros(1024, 768, dtype=torch.bfloat16), columnwise=True, offsets_e=ends)
fp8_grouped_gemm.quantized_grouped_input_grad(grad, weight, ends)
hybrid = replace(quantize.E4M3, element="e5m2")
fp8_grouped_gemm.quantized_grouped_input_grad(quantize.quantize_rows(torch.zeros_like(x), hybrid), weight, ends)
rows = quantize.quantize_rows(x, rowwise=False, columnwise=True, offsets_e=ends)
for parts, accumulate in ((1, False), (2, True)):
    part = GroupedPart(grad, rows, ends)
    fp8_weight_grad.quantized_grouped_weight_grad([part] * parts, torch.zeros(8, 768, 512), accumulate)
part = GroupedPart(quantize.quantize_rows(x, hybrid, columnwise=True, offsets_e=ends), rows, ends)
fp8_weight_grad.quantized_grouped_weight_grad([part], torch.zeros(8, 512, 512), False)
quantize.dequantize_columns(grad)
quantize.dequantize_rows(grad)
places = torch.zeros(1024, 4, dtype=torch.int64)
index = RowIndex(token_R=places.flatten(), choice_R=places.flatten(), offsets_E=ends, rows_TK=places)
quantize.permute_quantized(grad, index)
swiglu = ActivationConfig(kind="silu", gated=True)
activation.quantize_activation(x, torch.zeros(1024), swiglu)
activation.quantize_activation_grad(x[:, :256], x, torch.zeros(1024), swiglu)
both = dict(columns=quantize.E4M3, offsets_e=ends)
activation.quantize_activation_grad(x[:, :256], x, torch.zeros(1024), swiglu, hybrid, **both)
index = RowIndex(token_R=torch.zeros(1024, dtype=torch.int64), choice_R=ends, offsets_E=ends, rows_TK=None)
quantize.quantize_permuted(x, index, rowwise=False, columnwise=True)
norm._rms_norm_forward = Compiled(norm._rms_norm_forward)
for width in (512, 7168):
    wide, scale = torch.zeros(64, width, dtype=torch.bfloat16), torch.zeros(width, dtype=torch.bfloat16)
    norm.add_rms_norm(wide, wide, scale, 1e-6, False)
    norm.rms_norm_quantized(wide, wide, scale, 1e-6, False)
casts._quantize_blocks = Compiled(casts._quantize_blocks)
casts.quantize_rows(x, columnwise=True)
casts.quantize_rows(x, hybrid, rowwise=False, columnwise=True, offsets_e=ends)
casts.quantize_permuted(x, index, replace(quantize.E4M3, scale="fp32"), columnwise=True)
"""
EDGES = (0.0, torch.nan, torch.inf, 2.0**-125, 1e-38, 3e38)
"""Values of single elements with special scales: three without a scale, some with scales that overflow, and the one
with the smallest scale."""


def exact_values(*shape: int, seed: int) -> Tensor:
    """Random bf16 numbers that are E4M3 numbers, so that casts with scales >= 1 are exact: the interpreter does not
    round to nearest."""
    bits = torch.randint(0, 127, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    signs = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.uint8) << 7
    return (bits | signs).view(torch.float8_e4m3fn).bfloat16()


def check(actual: QuantizedTensor, expected: QuantizedTensor, columnwise: bool = False) -> None:
    assert actual.block == expected.block
    same_elements(actual.row_copy.data, expected.row_copy.data, "rowwise")
    same_scales(actual.row_copy.scales, expected.row_copy.scales, "scales")
    if columnwise:
        same_elements(actual.column_copy.data, expected.column_copy.data, "columnwise")
        num_blocks = expected.column_copy.scales.shape[-2]
        same_scales(actual.column_copy.scales[..., :num_blocks, :], expected.column_copy.scales, "columnwise scales")


def same_blocks(actual: QuantizedTensor, expected: QuantizedTensor, ends: Tensor) -> None:
    """Asserts that columnwise copies of expert rows are equal, except in blocks without an expert, whose elements are
    undefined."""
    copies = (expert_copies(x.column_copy, x.block, ends.tolist(), columnwise=True) for x in (actual, expected))
    for found, wanted in zip(*copies, strict=True):
        same_elements(found.data, wanted.data, "columnwise")
        same_scales(found.scales, wanted.scales, "columnwise scales")


@pytest.mark.slow
def test_kernels_compile_and_fit_into_a_multiprocessor() -> None:
    kernels = compiled(LAUNCHES)
    assert len(kernels) == 36
    for code in kernels:
        assert code["shared"] <= SHARED_MEMORY
        assert NO_SPILLS in code["ptxas"]
    products = instructions(kernels, r"wgmma\.mma_async\.sync\.aligned\.(\w+\.f32\.\w+\.\w+)")
    assert products == {"m64n128k32.f32.e4m3.e4m3": 4, "m64n128k32.f32.e5m2.e4m3": 2}
    assert instructions(kernels, r"cvt\.rn\.satfinite\.(\w+)\.f32") == {"e4m3x2": 12, "e5m2x2": 5}
    assert sum("cp.async.cg" in code["ptx"] for code in kernels) == 3, "16 bytes at a time"
    adding = [code for code in kernels if "cp.reduce.async.bulk.tensor" in code["ptx"]]
    assert len(adding) == 1, "sums are added by TMA, and only where accumulation is requested"
    orders = [order_of_sum(code["ttgir"]) for code in kernels if "math.sqrt" in code["ttgir"]]
    assert len(orders) == 4 and orders[::2] == orders[1::2], "a norm has the same bits with and without an FP8 copy"


def order_of_sum(ttgir: str) -> str:
    """Distribution over threads of the elements that the first reduction of a kernel adds."""
    operand = re.search(r'"tt\.reduce".*?: \(tensor<\w+, (#\w+)>\)', ttgir, re.DOTALL)
    assert operand is not None
    layout = re.search(rf"^{operand[1]} = .*", ttgir, re.MULTILINE)
    assert layout is not None
    return layout[0].partition(" = ")[2]


def instructions(kernels: list[dict[str, Any]], pattern: str) -> Counter[str]:
    """Number of kernels with each variant of an instruction."""
    return Counter(variant for code in kernels for variant in set(re.findall(pattern, code["ptx"])))


@pytest.mark.parametrize("shape", [(1, 16), (5, 128), (130, 300), (33, 640)])
def test_casts_of_rows(shape: tuple[int, int]) -> None:
    x = exact_values(*shape, seed=1)
    check(quantize.quantize_rows(x), quantized_rows(x))
    check(quantize.quantize_rows(x, columnwise=True), quantized_rows(x), columnwise=True)
    wide = torch.cat([x, x], 1)[:, : shape[1]]
    check(quantize.quantize_rows(wide), quantized_rows(x))


@pytest.mark.parametrize("scale", ["power of 2", "fp32"])
@pytest.mark.parametrize("edge", EDGES)
def test_scales_of_unusual_blocks(edge: float, scale: str) -> None:
    x = torch.zeros(3, 256, dtype=torch.bfloat16)
    x[1, 5], x[2, 200] = edge, -edge
    fmt = replace(quantize.E4M3, scale=scale)
    expected = quantized_rows(x, power_of_two=scale == "power of 2")
    actual = quantize.quantize_rows(x, fmt, columnwise=True)
    same_scales(actual.row_copy.scales, expected.row_copy.scales, "scales")
    same_scales(actual.column_copy.scales, expected.column_copy.scales, "columnwise scales")
    weight = quantize.quantize_weight(x[:, :128], replace(fmt, block=(128, 128)))
    expected = quantized_weight(x[:, :128], power_of_two=scale == "power of 2")
    same_scales(weight.row_copy.scales, expected.row_copy.scales, "scales of a weight")


@pytest.mark.parametrize("counts", [[0, 70, 1, 200, 0, 129], [16, 0, 144, 32], [0, 0, 3]])
def test_column_blocks_start_again_at_every_expert(counts: list[int]) -> None:
    ends, num_rows = torch.tensor(counts).cumsum(0), sum(counts)
    x = exact_values(num_rows + 5, 144, seed=2)
    x[num_rows:] = torch.nan
    actual = quantize.quantize_rows(x, columnwise=True, offsets_e=ends.int())
    expected = quantized_rows(x[:num_rows], ends.tolist())
    row, column = actual.row_copy, actual.column_copy
    row = QuantizedCopy(row.data[:num_rows], row.scales[:, :num_rows])
    column = column._replace(data=column.data[:, : expected.column_copy.data.shape[1]])
    check(QuantizedTensor(row, column, actual.block), expected, columnwise=True)
    copies = expert_copies(actual.column_copy, actual.block, ends.tolist(), columnwise=True)
    same_scales(torch.cat([copy.scales for copy in copies]), expected.column_copy.scales, "scales of all experts")


@pytest.mark.parametrize("shape", [(16, 16), (2, 130, 300), (3, 128, 256)])
def test_casts_of_weights(shape: tuple[int, ...]) -> None:
    weight = exact_values(*shape, seed=3)
    made = quantize.quantize_weight(weight)
    check(made, quantized_weight(weight), columnwise=True)
    assert quantize.quantize_weight(weight * 2, out=made) is made
    check(made, quantized_weight(weight * 2), columnwise=True)


@pytest.mark.parametrize("align", [1, 16])
def test_permuted_casts(align: int) -> None:
    ids = torch.rand(20, 6, generator=torch.Generator().manual_seed(0)).topk(3).indices
    ids[3, 1] = -1
    index = reference.sort_rows(ids, 6, None, align)
    x = exact_values(20, 300, seed=4)
    check(quantize.quantize_permuted(x, index), quantized_rows(reference.permute(x, index)))
    both = quantize.quantize_permuted(x, index, columnwise=True)
    rows = quantize.quantize_rows(reference.permute(x, index), columnwise=True, offsets_e=index.offsets_E)
    used = int(index.offsets_E[-1])  # beyond, elements are undefined
    same_elements(both.row_copy.data[:used], rows.row_copy.data[:used], "rowwise")
    same_blocks(both, rows, index.offsets_E)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize(("align", "bound"), [(1, None), (16, None), (1, 31)])
def test_permutation_of_quantised_copies(align: int, bound: int | None, element: str) -> None:
    """Tokens are a view of receive slots with one row of scales per token; rows beyond the bound are not written."""
    ids = torch.rand(20, 3, generator=torch.Generator().manual_seed(0)).argsort(dim=1)
    ids[3, 1] = ids[7] = -1
    index = reference.sort_rows(ids, 3, None, align)
    if bound is not None:
        assert index.rows_TK is not None
        rows_TK = index.rows_TK.masked_fill(index.rows_TK >= bound, -1)
        index = replace(index, token_R=index.token_R[:bound], rows_TK=rows_TK)
    fmt = replace(quantize.E4M3, element=element)
    tokens = reference.quantize_rows(exact_values(20, 300, seed=5), fmt, rowwise=True, columnwise=False)
    row = tokens.row_copy
    tokens = replace(tokens, rowwise=row._replace(scales=row.scales.T.contiguous().T))
    (values, copy), (expected, of) = (each.permute_quantized(tokens, index) for each in (quantize, reference))
    EXACT.check(values, expected, "values")
    check(copy, of)


def test_dequantised_columns_are_exact() -> None:
    x = quantized_rows(torch.randn(130, 300) * torch.exp(4 * torch.randn(130, 1)))
    x = replace(x, dtype=torch.bfloat16)
    data, scales, _ = x.column_copy
    expected = data.double() * scales.T.double().repeat_interleave(128, 1)[:, :130]
    EXACT.check(quantize.dequantize_columns(x)[:130].double(), expected.T, "values")


@pytest.mark.parametrize("is_transposed", [False, True])
def test_dequantised_rows_are_exact(is_transposed: bool) -> None:
    """Scales of received tokens are contiguous by token."""
    x = quantized_rows(torch.randn(130, 300) * torch.exp(4 * torch.randn(130, 1)))
    scales = x.row_copy.scales.T.contiguous().T if is_transposed else x.row_copy.scales.contiguous()
    x = replace(x, dtype=torch.bfloat16, rowwise=x.row_copy._replace(scales=scales))
    EXACT.check(quantize.dequantize_rows(x), reference.dequantize_rows(x), "values")


def test_tensors_without_elements() -> None:
    empty = quantize.quantize_rows(torch.zeros(0, 256, dtype=torch.bfloat16), columnwise=True)
    assert empty.row_copy.data.shape == (0, 256)
    assert quantize.dequantize_columns(empty).shape == (0, 256)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    "config", [ActivationConfig(kind="silu", gated=True), ActivationConfig(kind="squared_relu", gated=False)], ids=str
)
def test_activations_with_fp8_results(config: ActivationConfig, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(37, 384 * config.fc1_width_factor, generator=generator).bfloat16().requires_grad_()
    probs = torch.rand(37, generator=generator).requires_grad_() if weighted else None
    if probs is not None:
        probs.data[::5] = 0.0
    grad = torch.randn(37, 384, generator=generator).bfloat16()
    plain = activation.activation(x, probs, config)
    plain.backward(grad)
    forward = activation.quantize_activation(x.detach(), None if probs is None else probs.detach(), config)
    found = activation.quantize_activation_grad(grad, x.detach(), None if probs is None else probs.detach(), config)
    assert x.grad is not None
    check(forward, quantize.quantize_rows(plain.detach()))
    check(found.grad_x_q, quantize.quantize_rows(x.grad))
    EXACT.check(found.grad_x_RF, x.grad, "gradient of the input")
    EXACT.check(found.out_RF, plain.detach(), "result")
    if probs is not None:
        EXACT.check(found.grad_probs_R, probs.grad, "gradient of the probabilities")


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("shape", [(0, 256), (2, 3, 48), (37, 128), (9, 300), (5, 640)])
def test_norms_with_fp8_copies(shape: tuple[int, ...], added: bool) -> None:
    """Sum, norm, FP8 copy and gradients equal those of separate ops. Inputs are column slices of wider matrices."""
    generator, results = torch.Generator().manual_seed(0), []
    wide = torch.randn(3, *shape[:-1], shape[-1] + 8, generator=generator).bfloat16()
    weight, grad = (torch.randn(size, generator=generator).bfloat16() for size in (shape[-1:], shape))
    for quantised in (False, True):
        leaves = [each.clone().requires_grad_() for each in (wide[0], weight, wide[1])]
        x, residual = leaves[0][..., 8:], leaves[2][..., 8:] if added else None
        if quantised:
            total, normed, copy = norm.rms_norm_quantized(x, residual, leaves[1], 1e-6, True)
        elif residual is None:
            total, normed = x, norm.rms_norm(x, leaves[1], 1e-6, True)
        else:
            total, normed = norm.add_rms_norm(residual, x, leaves[1], 1e-6, True)
        grads = torch.autograd.grad(normed, leaves[: 2 + added], grad)
        results.append((total.detach(), normed.detach(), *grads))
    for found, expected in zip(*reversed(results), strict=True):
        EXACT.check(found, expected, "sum, norm or gradient")
    check(copy, quantize.quantize_rows(results[0][1]))


def test_cublas_gets_aligned_scales_of_stored_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS requires 16-byte alignment, but the scales of a stored weight may have any address."""
    given: list[Tensor] = []

    def scaled_mm(*operands: Any, **options: Any) -> Tensor:
        given.append(operands[4])
        return torch.empty(0)

    monkeypatch.setattr(fp8_linear.F, "scaled_mm", scaled_mm)
    x, weight = quantized_rows(torch.randn(4, 512).bfloat16()), quantized_weight(torch.randn(16, 512).bfloat16())
    row = weight.row_copy
    scales = torch.cat([torch.zeros(1), row.scales.flatten()])[1:].view_as(row.scales)
    fp8_linear.quantized_linear_forward(x, replace(weight, rowwise=row._replace(scales=scales)), None)
    assert given[0].data_ptr() % 16 == 0
    EXACT.check(given[0].T, scales, "scales")


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    "config", [ActivationConfig(kind="silu", gated=True, clamp=1.0), ActivationConfig(kind="squared_relu")], ids=str
)
@pytest.mark.parametrize("counts", [None, [3, 0, 140, 10]], ids=["dense", "experts"])
def test_activation_gradients_in_columns(config: ActivationConfig, weighted: bool, counts: list[int] | None) -> None:
    generator = torch.Generator().manual_seed(0)
    ends = None if counts is None else torch.tensor(counts).cumsum(0).int()
    num_rows = 153 if counts is None else 160  # the last rows have no expert
    x = torch.randn(num_rows, 256 * config.fc1_width_factor, generator=generator).bfloat16()
    probs = torch.rand(num_rows, generator=generator) * (torch.arange(num_rows) % 5 > 0) if weighted else None
    grad = torch.randn(num_rows, 256, generator=generator).bfloat16()
    inputs = replace(quantize.E4M3, element="e5m2")
    apart = activation.quantize_activation_grad(grad, x, probs, config)
    found = activation.quantize_activation_grad(grad, x, probs, config, columns=inputs, offsets_e=ends)
    assert apart.grad_x_RF is not None and isinstance(apart.out_RF, Tensor) and found.grad_x_RF is None
    assert isinstance(found.out_RF, QuantizedTensor) and found.out_RF.rowwise is None
    used = 153
    grad_x_q = quantize.quantize_rows(apart.grad_x_RF, columnwise=True, offsets_e=ends)
    actual, expected = found.grad_x_q.row_copy, grad_x_q.row_copy
    EXACT.check(actual.data[:used].float(), expected.data[:used].float(), "rowwise")
    EXACT.check(actual.scales[:, :used], expected.scales[:, :used], "scales")
    out_q = quantize.quantize_rows(apart.out_RF, inputs, rowwise=False, columnwise=True, offsets_e=ends)
    if ends is None:
        ends = torch.tensor([num_rows])
    same_blocks(found.grad_x_q, grad_x_q, ends)
    same_blocks(found.out_RF, out_q, ends)
    if apart.grad_probs_R is not None:
        assert found.grad_probs_R is not None
        FP32_REF.check(found.grad_probs_R[:used], apart.grad_probs_R[:used], "gradient of the probabilities")
