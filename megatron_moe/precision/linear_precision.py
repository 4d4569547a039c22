"""Low-precision GEMM operands of one linear layer: quantisation of inputs, weights and output gradients."""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from megatron_moe.config.precision import LowPrecisionConfig, OperandFormat
from megatron_moe.precision.quantized_tensor import QuantizedTensor


class Quantizers(Protocol):
    """The ops of `Kernels` that quantise."""

    def quantize_rows(
        self,
        x: Tensor,
        form: OperandFormat,
        *,
        rowwise: bool,
        columnwise: bool,
        offsets_e: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> QuantizedTensor: ...

    def quantize_weight(
        self, weight: Tensor, form: OperandFormat, *, columnwise: bool, scale: Tensor | None = None
    ) -> QuantizedTensor: ...


class LinearPrecision:
    """Quantises the GEMM operands of one linear layer, or of one stack of expert layers, and caches its weight.

    The weight is quantised by the first forward of a step and reused by all later microbatches and by recompute, until
    `begin_step`.
    """

    def __init__(self, config: LowPrecisionConfig, kernels: Quantizers, *, save_input: bool = False) -> None:
        """`save_input`: saves the original input for backward, which quantises its columnwise copy again, because the
        input is kept anyway. False: saves the columnwise copy."""
        self.weight_grad = config.weight_grad
        """Whether the weight gradient is computed from quantised copies."""
        self.save_input = save_input or not config.weight_grad
        self._config = config
        self._kernels = kernels
        self._weight: QuantizedTensor | None = None

    def begin_step(self) -> None:
        """Discards the quantised weight. Called after the weights have changed."""
        self._weight = None

    def input(
        self, x: Tensor, *, rowwise: bool = True, columnwise: bool = False, offsets_e: Tensor | None = None
    ) -> QuantizedTensor:
        """Quantises an input [R, I]; with `offsets_e`, rows sorted by expert."""
        form = self._config.inputs
        return self._kernels.quantize_rows(x, form, rowwise=rowwise, columnwise=columnwise, offsets_e=offsets_e)

    def weight(self, weight: Tensor) -> QuantizedTensor:
        """Quantised weight [O, I] or [e, O, I] of this step, both copies."""
        if self._weight is None:
            self._weight = self._kernels.quantize_weight(weight.detach(), self._config.weights, columnwise=True)
        return self._weight

    def grad(
        self, grad: Tensor, *, rowwise: bool, columnwise: bool, offsets_e: Tensor | None = None
    ) -> QuantizedTensor:
        """Quantises an output gradient [R, O]; with `offsets_e`, rows sorted by expert."""
        form = self._config.grads
        return self._kernels.quantize_rows(grad, form, rowwise=rowwise, columnwise=columnwise, offsets_e=offsets_e)


def begin_step(precisions: Iterable[LinearPrecision]) -> None:
    """Discards the quantised weights of all layers."""
    for precision in precisions:
        precision.begin_step()
