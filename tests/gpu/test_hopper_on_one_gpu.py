"""Grouped GEMMs of the `hopper` backend: comparison with fp64, and bitwise reproducibility."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_moe.kernels.backends.hopper import backend as hopper_kernels
from megatron_moe.kernels.ops import GroupedPart
from tests.helpers.tolerances import BF16_KERNEL, EXACT, FP32_REF

pytestmark = pytest.mark.gpu1

BF16 = torch.bfloat16
COUNTS = {
    "unequal": [0, 70, 1, 200, 64, 0, 129, 128],
    "one expert has all": [0, 0, 300, 0],
    "one row each": [1] * 16,
    "more experts than programs": [3, 0, 65] * 50,
}
SIZES = [(8, 16), (72, 264), (512, 320), (200, 1408)]
ROWS_BEHIND = 13
"""Number of unused rows after the last expert; they contain NaN in these tests."""


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda", dtype=BF16)


def offsets(counts: list[int]) -> Tensor:
    return torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)


def held(counts: list[int], width: int, seed: int) -> Tensor:
    tail = torch.full((ROWS_BEHIND, width), torch.nan, device="cuda", dtype=BF16)
    return torch.cat([draw(sum(counts), width, seed=seed), tail])


def slices(counts: list[int]) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, count in enumerate(counts):
        yield expert, slice(start, start + count)
        start += count


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_gemms_match_fp64(inputs: int, outputs: int, counts: list[int]) -> None:
    weight, ends, num_rows = draw(len(counts), outputs, inputs, seed=1), offsets(counts), sum(counts)
    rows, grad = held(counts, inputs, 2), held(counts, outputs, 3)
    forward = hopper_kernels.grouped_forward(rows, weight, ends)
    backward = hopper_kernels.grouped_input_grad(grad, weight, ends)
    expected = [torch.zeros(num_rows, width, device="cuda", dtype=torch.float64) for width in (outputs, inputs)]
    for expert, part in slices(counts):
        expected[0][part] = rows[part].double() @ weight[expert].double().T
        expected[1][part] = grad[part].double() @ weight[expert].double()
    BF16_KERNEL.check(forward[:num_rows].double(), expected[0], "forward")
    BF16_KERNEL.check(backward[:num_rows].double(), expected[1], "gradient of the rows")
    repeated = hopper_kernels.grouped_forward(rows, weight, ends)
    EXACT.check(repeated[:num_rows], forward[:num_rows], "a second time")


@pytest.mark.parametrize("accumulate", [False, True], ids=["stored", "added"])
@pytest.mark.parametrize("num_parts", [1, 2, 3])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 8), (264, 72), (320, 512), (1408, 200)])
def test_weight_gradients_match_fp64(
    inputs: int, outputs: int, counts: list[int], num_parts: int, accumulate: bool
) -> None:
    before = torch.randn(len(counts), outputs, inputs, device="cuda")
    expected = before.double() if accumulate else torch.zeros_like(before, dtype=torch.float64)
    parts = []
    for number in range(num_parts):
        counted = counts[number:] + counts[:number]
        grad, rows = held(counted, outputs, 10 + number), held(counted, inputs, 20 + number)
        parts.append(GroupedPart(grad, rows, offsets(counted)))
        for expert, part in slices(counted):
            expected[expert] += grad[part].double().T @ rows[part].double()
    actual, repeated = (before.clone() if accumulate else torch.full_like(before, torch.nan) for _ in range(2))
    for out in (actual, repeated):
        hopper_kernels.grouped_weight_grad(parts, out, accumulate)
    FP32_REF.check(actual.double(), expected, "gradient")
    EXACT.check(repeated, actual, "a second time")


def test_rows_of_a_wider_matrix_and_buffers_in_bf16() -> None:
    counts, ends = [40, 0, 100], offsets([40, 0, 100])
    wide, weight = draw(140, 256, seed=1), draw(3, 64, 128, seed=2)
    part = wide[:, 128:]
    expected = hopper_kernels.grouped_forward(part.contiguous(), weight, ends)
    EXACT.check(hopper_kernels.grouped_forward(part, weight, ends), expected, "forward")
    grad = draw(140, 64, seed=3)
    out = torch.zeros(3, 64, 128, device="cuda", dtype=BF16)
    hopper_kernels.grouped_weight_grad([GroupedPart(grad, part, ends)], out, True)
    for expert, rows in slices(counts):
        BF16_KERNEL.check(out[expert].double(), grad[rows].double().T @ part[rows].double(), f"expert {expert}")


def test_gemms_without_rows() -> None:
    ends, weight = torch.zeros(3, device="cuda", dtype=torch.int32), draw(3, 64, 128, seed=1)
    empty = draw(0, 128, seed=1)
    assert hopper_kernels.grouped_forward(empty, weight, ends).shape == (0, 64)
    out = torch.ones(3, 64, 128, device="cuda")
    part = GroupedPart(draw(0, 64, seed=1), empty, ends)
    hopper_kernels.grouped_weight_grad([part], out, True)
    assert out.eq(1).all()
    hopper_kernels.grouped_weight_grad([part], out, False)
    assert out.eq(0).all()
