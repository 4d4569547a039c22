"""torch_native against the reference: fp32 to rounding, bf16 as close to fp64 as plain torch is; sizes of all kinds."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.run import KernelConfig
from megatron_moe.kernels import autograd, registry
from megatron_moe.kernels.backends.torch_native import backend as torch_native
from megatron_moe.kernels.ops import AttentionInputs, GroupedPart
from tests.helpers import kernel_comparison
from tests.helpers.kernel_comparison import BARS, REFERENCE, draw
from tests.helpers.tolerances import BF16_KERNEL, EXACT, FP32_REF

NATIVE = registry.select_kernels(KernelConfig(kernel_backend="torch_native"), torch.device("cpu"), torch.float32)
DTYPES = pytest.mark.parametrize("dtype", BARS, ids=["fp32", "bf16"])
KINDS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu")


compare = partial(kernel_comparison.compare, NATIVE)


def test_attention_dropout_matches_the_reference() -> None:
    config = CoreAttentionConfig(softmax_scale=0.5, dropout=0.5)
    q, k, v = draw(6, 1, 2, 4).float(), draw(6, 1, 1, 4, seed=1).float(), draw(6, 1, 1, 4, seed=2).float()
    inputs = AttentionInputs(q, k, v, config, dropout_key=(7, "x"))
    EXACT.check(NATIVE.attention(inputs), REFERENCE.attention(inputs))


@DTYPES
@pytest.mark.parametrize("offsets", [[2, 2, 5, 6], [0, 0, 0, 7], [7, 7, 7, 7], [1, 2, 3, 4], [0, 0, 0, 0]])
def test_grouped_gemms_match_the_reference(offsets: list[int], dtype: torch.dtype) -> None:
    ends = torch.tensor(offsets, dtype=torch.int32)

    def op(kernels) -> Callable[..., Tensor]:
        return lambda rows, weight: autograd.grouped_linear(kernels, rows, weight, ends)[: offsets[-1]]

    def bare(kernels) -> Callable[..., Tensor]:
        """Gradients of rows past the last offset are undefined, so none are taken."""
        return lambda rows, weight: op(kernels)(torch.cat([rows, rows.new_zeros(7 - len(rows), 16)]), weight)

    compare(bare, [draw(offsets[-1], 16), draw(4, 24, 16, seed=1)], dtype)


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradients_accumulate_in_wider_buffers(accumulate: bool, wide: torch.dtype) -> None:
    grad, rows = draw(6, 24).bfloat16(), draw(6, 16, seed=1).bfloat16()
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    cases = (
        ((24, 16), lambda k, out: k.linear_weight_grad(grad, rows, out, accumulate)),
        ((3, 24, 16), lambda k, out: k.grouped_weight_grad([GroupedPart(grad, rows, ends)], out, accumulate)),
    )
    for shape, call in cases:
        before = draw(*shape, seed=2) if accumulate else torch.full(shape, torch.nan)
        actual, expected = before.to(wide), before.to(wide)
        call(NATIVE, actual)
        call(REFERENCE, expected)
        keeps_digits = wide is torch.float32 and len(shape) == 2  # grouped_mm rounds its product to bf16
        (FP32_REF if keeps_digits else BF16_KERNEL).check(actual, expected, f"buffer {shape}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_mm_computes_all_three_grouped_gemms(dtype: torch.dtype) -> None:
    """Runs the GEMMs of the CUDA path, which torch also supports on the CPU; gradients may be expanded tensors."""
    rows, weight = draw(9, 16).to(dtype), draw(4, 8, 16, seed=1).to(dtype)
    ends = torch.tensor([2, 2, 5, 7], dtype=torch.int32)
    grad = torch.ones(1, 8, dtype=dtype).expand(9, 8)
    forward = torch_native._grouped_mm(rows, weight.transpose(1, 2), ends)
    input_grad = torch_native._grouped_mm(grad.contiguous(), weight, ends)
    weight_grad = torch_native._grouped_mm(grad.contiguous().T, rows, ends)
    bar, wide = BARS[dtype], [x.double() for x in (rows, weight, grad)]
    bar.check(forward[:7], REFERENCE.grouped_forward(wide[0], wide[1], ends)[:7], "forward")
    bar.check(input_grad[:7], REFERENCE.grouped_input_grad(wide[2], wide[1], ends)[:7], "input gradient")
    expected = torch.zeros(4, 8, 16, dtype=torch.float64)
    REFERENCE.grouped_weight_grad([GroupedPart(wide[2], wide[0], ends)], expected, False)
    bar.check(weight_grad, expected, "weight gradient")


def test_grouped_gemms_without_rows_have_zero_weight_gradients() -> None:
    rows, weight = torch.zeros(0, 16, requires_grad=True), draw(4, 8, 16).float().requires_grad_()
    out = autograd.grouped_linear(NATIVE, rows, weight, torch.zeros(4, dtype=torch.int32))
    out.sum().backward()
    assert out.shape == (0, 8) and rows.grad.shape == (0, 16)
    EXACT.check(weight.grad, torch.zeros(4, 8, 16))


def test_grouped_mm_rejects_rows_not_aligned_to_16_bytes_with_a_remedy() -> None:
    rows, weight = draw(4, 12).bfloat16(), draw(2, 8, 12).bfloat16()
    with pytest.raises(
        EnvironmentProblem, match=r"row has 24 bytes.*multiples of 8, or use --kernel-backend reference"
    ):
        torch_native._grouped_mm(rows, weight.transpose(1, 2), torch.tensor([2, 4], dtype=torch.int32))


def test_bf16_parts_sum_to_the_fp32_gradient() -> None:
    x_TE = torch.randn(64, 5, generator=torch.Generator().manual_seed(1)) * torch.logspace(-20, 20, 5)
    parts_T3E = torch_native.bf16_parts(x_TE)
    assert parts_T3E.dtype is torch.bfloat16 and parts_T3E.is_contiguous()
    assert torch.equal(parts_T3E.double().view(64, 3, 5).sum(dim=1), x_TE.double())
