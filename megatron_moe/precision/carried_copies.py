"""Tensors that carry the quantised copy of their values through autograd, from the op that made both to the layer that
multiplies the copy.

Other consumers use them as ordinary tensors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from megatron_moe.config.precision import OperandFormat
from megatron_moe.precision.quantized_tensor import QuantizedTensor


class QuantizedActivation(Tensor):
    """Input [..., I] of linear layers with its quantised copy [R, I]. Results of torch's ops are ordinary tensors."""

    fmt: OperandFormat
    _copy: QuantizedTensor
    _version_of_copy: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, x: Tensor, x_q: QuantizedTensor, fmt: OperandFormat) -> "QuantizedActivation":
        """Alias of `x`, through which gradients flow to `x`. `x_q`: copy of `x` in the format `fmt`, rowwise, or
        rowwise and columnwise."""
        made: QuantizedActivation = x.as_subclass(cls)
        made.fmt, made._copy, made._version_of_copy = fmt, x_q, made._version
        return made


def carried_copy(x: Tensor, fmt: OperandFormat, *, columnwise: bool) -> QuantizedTensor | None:
    """Rowwise and, if requested, columnwise copy in the format `fmt` that an input carries; None if it carries no such
    copy or was modified in place since."""
    if not isinstance(x, QuantizedActivation) or x.fmt != fmt or x._version != x._version_of_copy:
        return None
    return None if columnwise and x._copy.columnwise is None else x._copy


def without_copy(x: Tensor) -> Tensor:
    """Returns the tensor to save for backward without its quantised copy, which a saved `QuantizedActivation` would
    keep alive."""
    return x.detach() if isinstance(x, QuantizedActivation) else x


class QuantizedGrad(Tensor):
    """Gradient with its quantised copy. Ops other than the layer that reads the copy, such as a sum with another
    gradient, use its values, which are dequantised if the op that made the gradient wrote the copy only."""

    fmt: OperandFormat
    _copy: QuantizedTensor
    _unquantized: Tensor | None
    _dequantize: Callable[[QuantizedTensor], Tensor]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        copy: QuantizedTensor,
        fmt: OperandFormat,
        shape: Sequence[int],
        values: Tensor | None,
        dequantize: Callable[[QuantizedTensor], Tensor],
    ) -> "QuantizedGrad":
        """`copy`: rowwise copy, or both copies, [R, C] in the format `fmt`. `shape`: shape [..., C] of the gradient.
        `values`: the gradient before quantisation; if None, `dequantize(copy)` computes it when it is needed."""
        device = copy.row_copy.data.device
        made: QuantizedGrad = Tensor._make_wrapper_subclass(cls, shape, dtype=copy.dtype, device=device)  # type: ignore[attr-defined]
        made.fmt, made._copy, made._unquantized, made._dequantize = fmt, copy, values, dequantize
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.record_stream.default:
            for tensor in args[0]._tensors():
                tensor.record_stream(args[1])
            return None
        args, kwargs = tree_map(plain_grad, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)

    def _tensors(self) -> Iterator[Tensor]:
        copies = self._copy.tensors if self._unquantized is None else (self._unquantized, *self._copy.tensors)
        return (tensor for tensor in copies if tensor is not None)


def carried_grad(grad: Tensor, fmt: OperandFormat) -> QuantizedTensor | None:
    """Quantised copies in the format `fmt` that a gradient carries; None if it carries none, for example because it is
    a sum of several gradients."""
    return grad._copy if isinstance(grad, QuantizedGrad) and grad.fmt == fmt else None


def plain_grad(grad: Any) -> Any:
    """Values of a gradient as an ordinary tensor; anything else is returned unchanged."""
    if not isinstance(grad, QuantizedGrad):
        return grad
    if grad._unquantized is None:
        return grad._dequantize(grad._copy).view(grad.shape)
    return grad._unquantized
