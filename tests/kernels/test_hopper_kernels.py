"""Hopper kernels without a GPU: compilation, computed addresses, and rejection of unsupported operands. Results:
tests/gpu/test_hopper_on_one_gpu.py.
"""

import re
from typing import Any

import pytest
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.kernels.backends.hopper import backend as hopper_kernels
from megatron_moe.kernels.backends.hopper.tiles import aligned, blocks_of, rows_by_slice
from megatron_moe.kernels.kernel_set import Priority
from tests.helpers.kernel_comparison import provided_ops
from tests.kernels.compiled import NO_SPILLS, SHARED_MEMORY, compiled

LAUNCHES = """
from megatron_moe.kernels.backends.hopper import grouped_gemm, weight_grad
from megatron_moe.kernels.ops import GroupedPart

grouped_gemm._grouped_gemm = Compiled(grouped_gemm._grouped_gemm)
weight_grad._expert_grads = Compiled(weight_grad._expert_grads)
rows, offsets = torch.zeros(1024, 512, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int32)
weight, grad = torch.zeros(8, OUTPUTS, 512, dtype=torch.bfloat16), torch.zeros(1024, OUTPUTS, dtype=torch.bfloat16)
grouped_gemm.grouped_forward(rows, weight, offsets)
grouped_gemm.grouped_input_grad(grad, weight, offsets)
for adds, parts in ((False, 1), (True, 2)):
    part = GroupedPart(rows, grad, offsets)
    weight_grad.grouped_weight_grad([part] * parts, torch.zeros(8, 512, OUTPUTS), adds)
"""


@pytest.fixture(scope="module", params=[pytest.param(768, marks=pytest.mark.slow), 1408])
def kernels(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return compiled(f"OUTPUTS = {request.param}\n{LAUNCHES}")


def test_kernels_compile_and_fit_into_a_multiprocessor(kernels: list[dict[str, Any]]) -> None:
    assert len(kernels) == 4
    for code in kernels:
        assert code["shared"] <= SHARED_MEMORY
        assert NO_SPILLS in code["ptxas"]
        assert "wgmma.mma_async" in code["ptx"]
    adding = [code for code in kernels if "cp.reduce.async.bulk.tensor" in code["ptx"]]
    assert len(adding) == 1, "sums are added by TMA, and only where they shall be added"


def test_programs_count_the_tiles_of_earlier_experts(kernels: list[dict[str, Any]]) -> None:
    """Triton 3.6 drops a loop variable that only the bounds of an inner loop depend on; then every expert's tiles go
    to the same few programs."""
    gemms = [code["ttgir"] for code in kernels if "_grouped_gemm" in code["ttgir"]]
    assert len(gemms) == 2
    for text in gemms:
        over_experts = re.findall(r"scf\.for %\w+ = %\w+ to %\w+ step %\w+ iter_args\((.*?)\) -> \(i32, i32\)", text)
        assert len(over_experts) == 3, "two warpgroups and the loading warp"


@pytest.mark.parametrize(
    ("start", "end", "row"), [(0, 7, 0), (3, 7, 6), (3, 7, 7), (5, 5, 5), (0, 64, 63), (10, 64, 80)]
)
def test_rows_after_the_end_of_a_slice_are_out_of_bounds(start: int, end: int, row: int) -> None:
    matrix = torch.zeros(100, 72, dtype=torch.bfloat16)[:, :64]
    descriptor = rows_by_slice(matrix, [8, 64])
    index = (2**30, end, 2**30 - end + row, 3)
    address = sum(i * stride for i, stride in zip(index, descriptor.strides, strict=True)) * 2
    assert address % 2**64 == (row * 72 + 3) * 2 % 2**64, "elements of 2 bytes, rows of 72 elements"
    inside = all(i < size for i, size in zip(index, descriptor.shape, strict=True))
    assert inside == (row < end)


def test_unaligned_widths_are_rejected_and_unaligned_addresses_copied() -> None:
    with pytest.raises(EnvironmentProblem, match=r"rows of shape \(4, 12\): a row has 24 bytes, .* multiples of 8"):
        aligned(torch.zeros(4, 12, dtype=torch.bfloat16), "rows")
    fits = torch.zeros(4, 16, dtype=torch.bfloat16)
    assert aligned(fits, "rows") is fits
    shifted = torch.arange(65, dtype=torch.bfloat16)[1:].view(4, 16)
    for elsewhere in (shifted, fits.T.contiguous().T, torch.zeros(4, 20, dtype=torch.bfloat16)[:, :16]):
        copy = aligned(elsewhere, "rows")
        assert copy.data_ptr() % 16 == 0 and copy.is_contiguous() and torch.equal(copy, elsewhere)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_devices_are_not_supported(dtype: torch.dtype) -> None:
    for op in provided_ops(hopper_kernels):
        assert hopper_kernels.support(op, torch.device("cpu"), dtype).fit is Priority.NO


@pytest.mark.parametrize(
    ("version", "fit"), [("3.6.0", Priority.TAILORED), ("3.6.1+git", Priority.TAILORED), ("3.9.0", Priority.NO)]
)
def test_other_triton_versions_are_not_supported(version: str, fit: Priority, monkeypatch: pytest.MonkeyPatch) -> None:
    """With these versions, compilation of the kernels would fail during the first step."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(hopper_kernels.triton, "__version__", version)
    for op in provided_ops(hopper_kernels):
        support = hopper_kernels.support(op, torch.device("cuda"), torch.bfloat16)
        assert support.fit is fit and (fit is Priority.TAILORED or "Triton 3.6; installed is 3.9.0" in support.reason)


def test_descriptors_equal_checked_ones() -> None:
    rows = torch.zeros(64, 128, dtype=torch.bfloat16)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    checked = TensorDescriptor.from_tensor(rows, [16, 64], layout)
    assert repr(blocks_of(rows, [16, 64])) == repr(checked), "the text is part of a kernel's specialisation"
