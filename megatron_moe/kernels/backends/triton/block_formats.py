"""Ops that quantise to FP8 with one scale per block of 128, by the kernels of `quantize` and `activation`."""

from dataclasses import replace

import torch
from torch import Tensor

from megatron_moe.config.moe import ActivationConfig
from megatron_moe.config.precision import OperandFormat
from megatron_moe.kernels.backends.triton import activation, quantize
from megatron_moe.kernels.backends.triton.quantize import BLOCK, Format
from megatron_moe.kernels.backends.triton.rows import permute
from megatron_moe.kernels.ops import QuantizedActivationGrads, QuantizedTensor, RowIndex

_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def quantize_rows(
    x: Tensor,
    form: OperandFormat,
    *,
    rowwise: bool,
    columnwise: bool,
    offsets_e: Tensor | None = None,
    scale: Tensor | None = None,
    seed: int = 0,
) -> QuantizedTensor:
    """See `Kernels.quantize_rows`."""
    q = replace(quantize.quantize_rows(x, _format(form), columnwise=columnwise, offsets_e=offsets_e), dtype=x.dtype)
    return q if rowwise else q.only_columnwise()


def quantize_weight(
    weight: Tensor, form: OperandFormat, *, columnwise: bool, scale: Tensor | None = None
) -> QuantizedTensor:
    """See `Kernels.quantize_weight`. Both copies are always made."""
    return replace(quantize.quantize_weight(weight, _format(form)), dtype=weight.dtype)


def quantize_permuted(tokens_TH: Tensor, index: RowIndex, form: OperandFormat) -> QuantizedTensor:
    """See `Kernels.quantize_permuted`."""
    if index.rows_TK is None:
        return quantize_rows(permute(tokens_TH, index), form, rowwise=True, columnwise=False)
    return replace(quantize.permute_quantized(tokens_TH, index, _format(form)), dtype=tokens_TH.dtype)


def quantize_activation(
    x_RF: Tensor, probs_R: Tensor | None, config: ActivationConfig, form: OperandFormat
) -> QuantizedTensor:
    """See `Kernels.quantize_activation`."""
    return activation.activation_quantized(x_RF, probs_R, config, _format(form))


def quantize_activation_grad(
    grad_RF: Tensor, x_RF: Tensor, probs_R: Tensor | None, config: ActivationConfig, form: OperandFormat
) -> QuantizedActivationGrads:
    """See `Kernels.quantize_activation_grad`."""
    return activation.activation_grad_quantized(grad_RF, x_RF, probs_R, config, _format(form))


def _format(form: OperandFormat) -> Format:
    assert BLOCK in form.block, f"no kernels for blocks of {form.block}"
    return Format(dtype=_DTYPES[form.element], power_of_two=form.scale == "power of 2")
