"""Weights stored in FP8 on one GPU: kernels match the reference, and steps match those with plain weights."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megatron_moe.kernels.backends.triton import stored_weight
from megatron_moe.kernels.ops import WeightPart
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.precision.quantizers import quantization_scale
from tests.gpu.host_sync import no_host_sync
from tests.gpu.test_fp8_on_one_gpu import wild
from tests.gpu.test_fp8_steps_on_one_gpu import FP8, start
from tests.helpers.fp8_oracle import same_elements
from tests.helpers.tolerances import EXACT
from tests.precision.test_stored_weight import FORMS

pytestmark = pytest.mark.gpu1

BLOCK = (128, 128)


@pytest.mark.parametrize("shape", [(1536, 2048), (300, 200), (3, 576, 1408), (2, 130, 7168)], ids=str)
def test_ranges_have_the_magnitudes_and_bytes_of_the_reference(shape: tuple[int, ...]) -> None:
    values = (wild(*shape, seed=3).float() * (1 + 2**-9)).flatten()
    size = len(values)
    num = (shape[0] if len(shape) == 3 else 1, -(-shape[-2] // 128), -(-shape[-1] // 128))
    amax, expected = torch.zeros(num, device="cuda"), torch.zeros(num, device="cuda")
    codes, expected_codes = (torch.zeros(size, dtype=torch.float8_e4m3fn, device="cuda") for _ in range(2))
    parts = [
        WeightPart(values[start:end], start, shape, torch.bfloat16)
        for start, end in pairwise((0, size // 7, size // 7 + 1, size // 2 + 64, size))
    ]
    for part in parts:
        stored_weight.weight_amax_(amax, part, BLOCK)
        reference.weight_amax_(expected, part, BLOCK)
    assert amax.isnan().any()
    EXACT.check(amax.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0), "magnitudes")
    factors = quantization_scale(amax, FORMS["blockwise"], torch.bfloat16)
    for part in parts:
        place = slice(part.start, part.start + len(part.values))
        stored_weight.quantize_weight_part(part, factors, BLOCK, codes[place])
        reference.quantize_weight_part(part, factors, BLOCK, expected_codes[place])
    same_elements(codes, expected_codes, "bytes")
    transposed = stored_weight.transpose_weight(codes.view(shape))
    assert torch.equal(transposed.view(torch.uint8), codes.view(shape).view(torch.uint8).mT)


def trained(precision: str, *more: str) -> dict[str, Tensor]:
    common = "--no-fp8-wgrad --deterministic-mode --use-distributed-optimizer --clip-grad 0"
    run = start("m8", *common.split(), *more, precision=precision)
    for _ in range(4):
        run.step()
    with run.trainer.optimizer.unquantized_weights():
        weights = {name: value.detach().clone() for name, value in run.trainer.model.named_parameters()}
    run.close()
    return weights


STREAMED = "--chunked-optimizer-state-offload --optimizer-state-offload-fraction 0.6"


@pytest.mark.parametrize(
    ("precision", "stored", "more"),
    [
        (FP8, "--fp8-param-gather", ""),
        ("--fp4-format e2m1 --emulate-low-precision", "--fp4-param-gather", ""),
        (FP8, "--fp8-param-gather", STREAMED),
        ("--fp8-format hybrid", "--fp8-param-gather", "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d"),
    ],
    ids=["blockwise", "nvfp4", "blockwise, streamed state", "delayed, CPU step"],
)
def test_steps_give_the_weights_of_steps_with_unquantized_weights(precision: str, stored: str, more: str) -> None:
    plain, options = trained(precision, *more.split()), (stored, *more.split())
    EXACT.check_all(trained(precision, *options), plain, "weights after 4 steps")


@pytest.mark.parametrize("more", ["", STREAMED], ids=["", "streamed state"])
def test_steps_run_without_host_sync(more: str) -> None:
    run = start("m8", "--no-fp8-wgrad", "--use-distributed-optimizer", "--fp8-param-gather", *more.split())
    for _ in range(2):
        run.step()
    batches = run.loader.next_step()
    with no_host_sync():
        outcome = run.trainer.step(batches, run.state)
    assert torch.isfinite(outcome.loss)
    run.close()
