"""Operands of FP8 and FP4 GEMMs, quantised by the ops of a kernel set, and their comparison."""

from dataclasses import replace

import torch
from torch import Tensor

from megatron_moe.config.precision import LowPrecisionConfig
from megatron_moe.kernels.ops import Kernels
from megatron_moe.precision.expert_rows import largest_magnitude
from megatron_moe.precision.quantized_tensor import QuantizedTensor


class Operands:
    """Quantises matrices as linear layers do, with the ops of a kernel set. Gradients are rounded to nearest."""

    def __init__(self, kernels: Kernels, config: LowPrecisionConfig) -> None:
        self.kernels, self.config = kernels, config
        self.is_delayed = config.recipe == "delayed"

    def rows(self, x: Tensor, role: str = "inputs", offsets_e: Tensor | None = None, **usage: bool) -> QuantizedTensor:
        fmt = replace(getattr(self.config, role), stochastic=False)
        scale = 0.3 / largest_magnitude(x, offsets_e) if self.is_delayed else None
        usage = {"rowwise": True, "columnwise": True} | usage
        return self.kernels.quantize_rows(x, fmt, offsets_e=offsets_e, scale=scale, **usage)

    def weight(self, weight: Tensor, *, columnwise: bool = True, out: QuantizedTensor | None = None) -> QuantizedTensor:
        scale = torch.full(weight.shape[:-2], 3.0, device=weight.device) if self.is_delayed else None
        return self.kernels.quantize_weight(weight, self.config.weights, columnwise=columnwise, scale=scale, out=out)


PARTS = ("rowwise", "rowwise_scales", "rowwise_factor", "columnwise", "columnwise_scales", "columnwise_factor")
"""Names of `QuantizedTensor.tensors`."""


def same_copies(made: QuantizedTensor, expected: QuantizedTensor) -> None:
    assert (made.block, made.dtype) == (expected.block, expected.dtype)
    for part, found, wanted in zip(PARTS, made.tensors, expected.tensors, strict=True):
        assert (found is None) == (wanted is None), part
        if found is not None:
            assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), part
            found, wanted = (x.cpu().contiguous().flatten().view(torch.uint8) for x in (found, wanted))
            assert torch.equal(found, wanted), part
