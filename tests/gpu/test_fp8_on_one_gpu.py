"""FP8 casts equal their plain-torch definition bit for bit; GEMMs of FP8 operands are compared with fp64."""

from dataclasses import replace
from types import ModuleType
from typing import Literal

import pytest
import torch
from torch import Tensor

from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.config.precision import OperandFormat, low_precision_config
from megatron_moe.config.run import KernelConfig
from megatron_moe.kernels.backends.hopper import backend as hopper_kernels
from megatron_moe.kernels.backends.hopper import fp8_grouped_gemm, fp8_weight_grad
from megatron_moe.kernels.backends.triton import activation, norm, quantize
from megatron_moe.kernels.backends.triton.backend import permute
from megatron_moe.kernels.kernel_set import LOW_PRECISION_OPS
from megatron_moe.kernels.ops import GroupedPart, MatrixOperand
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.kernels.reference.routing import sort_rows
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.precision import nvfp4
from megatron_moe.precision.quantized_tensor import QuantizedTensor
from megatron_moe.precision.quantizers import element_dtype
from tests.gpu.test_hopper_on_one_gpu import COUNTS, ROWS_BEHIND, draw, offsets, slices
from tests.helpers.fp8_oracle import (
    quantized_rows,
    quantized_weight,
    same_elements,
    same_scales,
    values_of_rows,
    values_of_weight,
)
from tests.helpers.kernel_comparison import provided_ops
from tests.helpers.low_precision_operands import Operands, same_copies
from tests.helpers.tolerances import BF16_KERNEL, EXACT, FP8_KERNEL, FP8_SUM, FP32_REF

pytestmark = pytest.mark.gpu1

FORMS = {
    "e4m3": quantize.E4M3,
    "e4m3, fp32 scales": replace(quantize.E4M3, scale="fp32"),
    "e5m2": replace(quantize.E4M3, element="e5m2"),
}


BOTH_CASTS = pytest.mark.parametrize("casts", [quantize, hopper_kernels], ids=["triton", "hopper"])


def wild(*shape: int, seed: int) -> Tensor:
    """Draws normal numbers times powers of e, with blocks of zeros, subnormal numbers, and some infinities and NaN."""
    x = draw(*shape, seed=seed) * torch.exp(4 * draw(*shape, seed=seed + 100).float()).bfloat16()
    flat = x.view(-1)
    flat[: len(flat) // 7] = 0
    flat[len(flat) // 7 : len(flat) // 6] *= 2.0**-120
    for value, place in ((torch.nan, 1), (torch.inf, 2), (-torch.inf, 3), (-torch.nan, 4)):
        flat[place * len(flat) // 5 - 1] = value
    return x


def same(actual: QuantizedTensor, expected: QuantizedTensor, columnwise: bool = True, rows: int | None = None) -> None:
    """Asserts that the first `rows` rows of both copies have equal elements and scales."""
    assert actual.block == expected.block
    found, wanted = actual.row_copy, expected.row_copy
    same_elements(found.data[:rows], wanted.data[:rows], "rowwise")
    same_scales(found.scales[..., :rows], wanted.scales, "scales")
    if columnwise:
        found, wanted = actual.column_copy, expected.column_copy
        used, num_blocks = wanted.data.shape[-1], wanted.scales.shape[-2]
        same_elements(found.data[..., :used], wanted.data, "columnwise")
        same_scales(found.scales[..., :num_blocks, :], wanted.scales, "columnwise scales")


@BOTH_CASTS
@pytest.mark.parametrize("fmt", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("shape", [(1, 16), (300, 200), (300, 208), (256, 1024), (77, 7168)])
def test_casts_of_rows(shape: tuple[int, int], fmt: OperandFormat, casts: ModuleType) -> None:
    x = wild(*shape, seed=1)
    expected = quantized_rows(x, dtype=element_dtype(fmt.element), power_of_two=fmt.scale == "power of 2")
    same(casts.quantize_rows(x, fmt), expected, columnwise=False)
    same(casts.quantize_rows(x, fmt, columnwise=True), expected)
    wide = torch.cat([x, x], 1)[:, : shape[1]]
    same(casts.quantize_rows(wide, fmt), expected, columnwise=False)


@BOTH_CASTS
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_casts_of_expert_rows(counts: list[int], casts: ModuleType) -> None:
    num_rows = sum(counts)
    x = torch.cat([wild(num_rows, 208, seed=2), torch.full((ROWS_BEHIND, 208), torch.nan, device="cuda").bfloat16()])
    actual = casts.quantize_rows(x, columnwise=True, offsets_e=offsets(counts))
    same(actual, quantized_rows(x[:num_rows], torch.tensor(counts).cumsum(0).tolist()), rows=num_rows)


@pytest.mark.parametrize("fmt", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 300, 200), (2, 256, 128), (1536, 2048)])
def test_casts_of_weights(shape: tuple[int, ...], fmt: OperandFormat) -> None:
    weight = wild(*shape, seed=3)
    expected = quantized_weight(weight, dtype=element_dtype(fmt.element), power_of_two=fmt.scale == "power of 2")
    same(quantize.quantize_weight(weight, replace(fmt, block=(128, 128))), expected)


@BOTH_CASTS
@pytest.mark.parametrize(("tokens", "width", "align"), [(1, 128, 1), (300, 200, 1), (513, 2048, 16), (100, 7168, 128)])
def test_permuted_casts(tokens: int, width: int, align: int, casts: ModuleType) -> None:
    ids = torch.rand(tokens, 20, device="cuda").topk(6).indices
    index = sort_rows(ids, 20, None, align)
    x = wild(tokens, width, seed=4)
    same(casts.quantize_permuted(x, index), quantized_rows(permute(x, index)), columnwise=False)
    used, ends = int(index.offsets_E[-1]), index.offsets_E.tolist()
    expected = quantized_rows(permute(x, index)[:used], ends)
    same(casts.quantize_permuted(x, index, columnwise=True), expected, rows=used)
    alone = casts.quantize_permuted(x, index, rowwise=False, columnwise=True)
    wanted = expected.column_copy.data
    same_elements(alone.column_copy.data[:, : wanted.shape[1]], wanted, "columnwise without rowwise")


def test_dequantised_copies_are_exact() -> None:
    x = quantize.quantize_rows(draw(300, 200, seed=5) * torch.exp(4 * draw(300, 1, seed=6)), columnwise=True)
    EXACT.check(quantize.dequantize_rows(x), reference.dequantize_rows(x), "values of rows")
    EXACT.check(quantize.dequantize_columns(x)[:300].double(), values_of_columns(x, [300], 0).T, "values")


@pytest.mark.parametrize("power_of_two", [True, False], ids=["powers of two", "fp32 scales"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 16), (80, 272), (512, 320), (208, 1408), (2048, 128)])
def test_gemms_match_fp64(inputs: int, outputs: int, counts: list[int], power_of_two: bool) -> None:
    ends, num_rows = offsets(counts), sum(counts)
    weight = quantized_weight(draw(len(counts), outputs, inputs, seed=1), power_of_two=power_of_two)
    behind = [torch.full((ROWS_BEHIND, width), torch.nan, device="cuda").bfloat16() for width in (inputs, outputs)]
    rows, grad = (
        quantized_rows(torch.cat([draw(num_rows, tail.shape[1], seed=seed), tail]), power_of_two=power_of_two)
        for seed, tail in enumerate(behind, 2)
    )
    forward = fp8_grouped_gemm.quantized_grouped_forward(rows, weight, ends)
    backward = fp8_grouped_gemm.quantized_grouped_input_grad(grad, weight, ends)
    rows_RI, grad_RO, weight_eOI = values_of_rows(rows), values_of_rows(grad), values_of_weight(weight)
    for expert, part in slices(counts):
        what = f"expert {expert}"
        FP8_KERNEL.check(forward[part].double(), rows_RI[part] @ weight_eOI[expert].T, f"forward of {what}")
        FP8_KERNEL.check(backward[part].double(), grad_RO[part] @ weight_eOI[expert], f"gradient of {what}")
    EXACT.check(
        fp8_grouped_gemm.quantized_grouped_forward(rows, weight, ends)[:num_rows], forward[:num_rows], "a second time"
    )


@pytest.mark.parametrize("accumulate", [False, True], ids=["stored", "added"])
@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 16), (272, 80), (320, 512), (1408, 208)])
def test_weight_gradients_match_fp64(
    inputs: int, outputs: int, counts: list[int], num_parts: int, accumulate: bool
) -> None:
    before = torch.randn(len(counts), outputs, inputs, device="cuda")
    expected = before.double() if accumulate else torch.zeros_like(before, dtype=torch.float64)
    parts = []
    for number in range(num_parts):
        counted = counts[number:] + counts[:number]
        ends = offsets(counted)
        operands = [
            cast_with_nan_behind(draw(sum(counts), width, seed=10 * number + place), ends)
            for place, width in enumerate((outputs, inputs))
        ]
        parts.append(GroupedPart[MatrixOperand](operands[0], operands[1], ends))
        for expert in range(len(counted)):
            grad, rows = (values_of_columns(each, counted, expert) for each in operands)
            expected[expert] += grad @ rows.T
    actual, repeated = (before.clone() if accumulate else torch.full_like(before, torch.nan) for _ in range(2))
    for out in (actual, repeated):
        fp8_weight_grad.quantized_grouped_weight_grad(parts, out, accumulate)
    FP8_SUM.check(actual.double(), expected, "gradient")
    EXACT.check(repeated, actual, "a second time")


def cast_with_nan_behind(x: Tensor, ends: Tensor) -> QuantizedTensor:
    """Casts expert rows that are followed by unused rows of NaN; returns both copies."""
    return quantize.quantize_rows(torch.cat([x, x[:ROWS_BEHIND] * torch.nan]), columnwise=True, offsets_e=ends)


def values_of_columns(x: QuantizedTensor, counts: list[int], expert: int) -> Tensor:
    """fp64 values of an expert's rows in the columnwise copy."""
    data, scales, _ = x.column_copy
    first = sum(-(-count // 128) for count in counts[:expert])
    blocks = first + torch.arange(counts[expert], device="cuda") // 128
    columns = data[:, 128 * first : 128 * first + counts[expert]]
    return columns.double() * scales[blocks].T.double()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("width", [128, 768, 1408])
def test_activations_with_fp8_results(width: int, weighted: bool) -> None:
    config = ActivationConfig(kind="silu", gated=True)
    x = draw(301, 2 * width, seed=1).requires_grad_()
    probs = torch.rand(301, device="cuda").requires_grad_() if weighted else None
    if probs is not None:
        probs.data[::5] = 0.0
    grad = draw(301, width, seed=2)
    plain = activation.activation(x, probs, config)
    plain.backward(grad)
    given = None if probs is None else probs.detach()
    forward = activation.quantize_activation(x.detach(), given, config)
    found = activation.quantize_activation_grad(grad, x.detach(), given, config)
    assert x.grad is not None
    same(forward, quantized_rows(plain.detach()), columnwise=False)
    same(found.grad_x_q, quantized_rows(x.grad), columnwise=False)
    EXACT.check(found.grad_x_RF, x.grad, "gradient of the input")
    EXACT.check(found.out_RF, plain.detach(), "result")
    if probs is not None:
        FP32_REF.check(found.grad_probs_R, probs.grad, "gradient of the probabilities")


@pytest.mark.parametrize("added", [False, True], ids=["norm", "sum and norm"])
@pytest.mark.parametrize(
    ("shape", "fmt"),
    [
        *(
            (shape, "e4m3")
            for shape in ((1, 16), (300, 200), (33, 128), (257, 512), (77, 1536), (130, 2048), (77, 7168))
        ),
        ((300, 208), "e4m3, fp32 scales"),
        ((300, 208), "e5m2"),
    ],
)
def test_norms_with_fp8_copies(shape: tuple[int, int], fmt: str, added: bool) -> None:
    """Sum, norm and gradients equal those of a norm without FP8 output bit for bit."""
    x, residual, grad = (draw(*shape, seed=seed) * torch.exp(4 * draw(shape[0], 1, seed=seed + 9)) for seed in range(3))
    weight, results = draw(shape[1], seed=4), []
    for quantised in (False, True):
        leaves = [each.clone().requires_grad_() for each in (x, weight, residual)]
        options = (leaves[1], 1e-6, False)
        if quantised:
            *outs, copy = norm.rms_norm_quantized(leaves[0], leaves[2] if added else None, *options, FORMS[fmt])
        elif added:
            outs = [*norm.add_rms_norm(leaves[2], leaves[0], *options)]
        else:
            outs = [leaves[0], norm.rms_norm(leaves[0], *options)]
        grads = torch.autograd.grad(outs[1], leaves[: 2 + added], grad)
        results.append([*(out.detach() for out in outs), *grads])
    for found, expected in zip(*reversed(results), strict=True):
        EXACT.check(found, expected, "sum, norm or gradient")
    oracle = {"dtype": element_dtype(FORMS[fmt].element), "power_of_two": FORMS[fmt].scale == "power of 2"}
    same(copy, quantized_rows(results[0][1], **oracle), columnwise=False)


@BOTH_CASTS
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_activation_gradients_in_columns(counts: list[int], gated: bool, casts: ModuleType) -> None:
    config = ActivationConfig(kind="silu", gated=gated)
    num_rows, ends, width = sum(counts), torch.tensor(counts).cumsum(0).tolist(), 384
    x = draw(num_rows + ROWS_BEHIND, width * config.fc1_width_factor, seed=1)
    grad = draw(num_rows + ROWS_BEHIND, width, seed=2)
    probs = torch.rand(len(x), device="cuda")
    probs[::5] = 0.0
    fmt = replace(quantize.E4M3, element="e5m2")
    apart = activation.quantize_activation_grad(grad, x, probs, config, fmt)
    kernels = activation if casts is quantize else casts
    found = kernels.quantize_activation_grad(
        grad, x, probs, config, fmt, columns=quantize.E4M3, offsets_e=offsets(counts)
    )
    assert isinstance(apart.grad_x_RF, Tensor) and isinstance(apart.out_RF, Tensor)
    assert isinstance(found.out_RF, QuantizedTensor)
    same(found.grad_x_q, quantized_rows(apart.grad_x_RF[:num_rows], ends, dtype=torch.float8_e5m2), rows=num_rows)
    expected = quantized_rows(apart.out_RF[:num_rows], ends).column_copy.data
    same_elements(found.out_RF.column_copy.data[:, : expected.shape[1]], expected, "result")
    assert found.grad_probs_R is not None and apart.grad_probs_R is not None
    FP32_REF.check(found.grad_probs_R[:num_rows], apart.grad_probs_R[:num_rows], "gradient of the probabilities")


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(37, 80, 272), (256, 384, 640), (48, 128, 1408), (4096, 512, 256)]
)
def test_dense_gemms_match_fp64(rows: int, inputs: int, outputs: int, element: Literal["e4m3", "e5m2"]) -> None:
    x, bias = quantize.quantize_rows(draw(rows, inputs, seed=1), columnwise=True), draw(outputs, seed=2)
    fmt = replace(quantize.E4M3, element=element)
    grad = quantize.quantize_rows(draw(rows, outputs, seed=3), fmt, columnwise=True)
    weight = quantize.quantize_weight(draw(outputs, inputs, seed=4))
    x_RI, grad_RO, weight_OI = values_of_rows(x), values_of_rows(grad), values_of_weight(weight)
    forward = hopper_kernels.quantized_linear_forward(x, weight, bias)
    FP8_KERNEL.check(forward.double(), x_RI @ weight_OI.T + bias.double(), "forward")
    input_grad = hopper_kernels.quantized_linear_input_grad(grad, weight)
    FP8_KERNEL.check(input_grad.double(), grad_RO @ weight_OI, "input gradient")
    expected = values_of_columns(grad, [rows], 0) @ values_of_columns(x, [rows], 0).T
    for out, tolerance in (
        (torch.ones(outputs, inputs, device="cuda"), FP8_SUM),
        (draw(outputs, inputs, seed=5), FP8_KERNEL),
    ):
        before = out.double()
        hopper_kernels.quantized_linear_weight_grad(grad, x, out, True)
        tolerance.check(out.double(), before + expected, f"weight gradient added in {out.dtype}")
        hopper_kernels.quantized_linear_weight_grad(grad, x, out, False)
        tolerance.check(out.double(), expected, f"weight gradient in {out.dtype}")


@BOTH_CASTS
def test_copies_are_made_separately(casts: ModuleType) -> None:
    x, ends = draw(300, 256, seed=1), offsets([100, 0, 200])
    both = casts.quantize_rows(x, columnwise=True, offsets_e=ends)
    only = casts.quantize_rows(x, rowwise=False, columnwise=True, offsets_e=ends)
    assert only.rowwise is None
    found, wanted = only.column_copy, both.column_copy
    same_elements(found.data[:, : 3 * 128], wanted.data[:, : 3 * 128], "columnwise")
    same_scales(found.scales, wanted.scales, "scales")


def test_kernels_are_selected_for_the_recipe_blockwise() -> None:
    device = torch.device("cuda")
    for hybrid in (False, True):
        config = low_precision_config("blockwise", hybrid=hybrid)
        kernels = select_kernels(KernelConfig(), device, torch.bfloat16, config)
        backends = {choice.op: choice.backend for choice in kernels.choices if choice.op in LOW_PRECISION_OPS}
        assert backends == {
            op: "hopper" if op in provided_ops(hopper_kernels) else "triton" for op in LOW_PRECISION_OPS
        }


def test_gemms_without_rows() -> None:
    weight = quantized_weight(draw(3, 64, 128, seed=1))
    empty = quantize.quantize_rows(draw(0, 128, seed=1))
    ends = torch.zeros(3, device="cuda", dtype=torch.int32)
    assert fp8_grouped_gemm.quantized_grouped_forward(empty, weight, ends).shape == (0, 64)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"])
def test_emulated_experts_compute_as_on_the_cpu(recipe: str) -> None:
    """Bytes are equal, except those of columns after a Hadamard transform, which sums in another order."""
    operands, results = Operands(reference.bundle(), low_precision_config(recipe)), []
    seed, ends = torch.tensor(5), torch.tensor([40, 40, 300, 301], dtype=torch.int32)
    rows_RI, grad_RO, weight_eOI = (draw(*shape, seed=2).cpu() for shape in ((320, 96), (320, 160), (4, 160, 96)))
    for device in ("cpu", "cuda"):
        x, g, w, ends_e = (each.to(device) for each in (rows_RI, grad_RO, weight_eOI, ends))
        rows, grad, weight = operands.rows(x, offsets_e=ends_e), operands.rows(g, "grads", ends_e), operands.weight(w)
        sums = torch.ones(weight_eOI.shape, device=device)
        reference.quantized_grouped_weight_grad([GroupedPart(grad, rows, ends_e)] * 2, sums, True)
        products = [reference.quantized_grouped_forward(rows, weight, ends_e)]
        products += [reference.quantized_grouped_input_grad(grad, weight, ends_e), sums]
        fmt = operands.config.grads
        if fmt.stochastic:
            grad = nvfp4.quantize_rows(g, fmt, rowwise=True, columnwise=False, offsets_e=ends_e, seed=seed.to(device))
            rows = operands.rows(x, offsets_e=ends_e, columnwise=False)
        results.append(([rows, grad, weight], products))
    (expected, cpu_products), (found, gpu_products) = results
    for gpu, cpu in zip(found, expected, strict=True):
        same_copies(gpu, cpu)
    for gpu, cpu in zip(gpu_products, cpu_products, strict=True):
        BF16_KERNEL.check(gpu.cpu(), cpu, "product")
