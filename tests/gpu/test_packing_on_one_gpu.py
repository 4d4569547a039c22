"""Packed documents on the kernels of a GPU equal the documents one by one in double precision."""

from itertools import accumulate, pairwise

import pytest
import torch

from megatron_moe.config.run import KernelConfig
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.tiny_models import microbatch
from tests.helpers.tolerances import FP32_LAYOUT
from tests.model.test_context_parallel_gpt import MIXERS, hybrid, model, run, with_accumulate

LENGTHS = (1, 130, 64, 255, 62)
MODELS = {name: model(mixer, "p2p") for name, mixer in MIXERS.items()} | {"hybrid": hybrid("headwise")}


@pytest.mark.gpu1
@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_equal_separate_ones(name: str) -> None:
    """Documents end inside and at the ends of the kernels' tiles; one has a single token."""
    config, ends = MODELS[name], list(accumulate(LENGTHS, initial=0))
    segments = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    packed = microbatch(1, ends[-1], segments_BS=segments[None], positions_BS=positions[None])
    gpu = ParallelContext.single(dtype=torch.float32, device="cuda")
    kernels = select_kernels(KernelConfig(), gpu.device, gpu.dtype)
    found = run(config, packed, gpu, per_token=True, kernels=kernels)
    apart = [
        run(config, alone, ParallelContext.single(), per_token=True)
        for alone in with_accumulate(packed, list(pairwise(ends)))
    ]
    FP32_LAYOUT.check(found.sums.cpu(), sum(each.sums for each in apart), "sum of losses, tokens")
    for weight, grad in found.gradients.items():
        FP32_LAYOUT.check(grad.cpu(), sum(each.gradients[weight] for each in apart), weight)
