"""Parameters that know what they are, and where their gradient goes."""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron_moe.specs.params import ParamMeta


class GradSink(Protocol):
    """Where a weight gradient is accumulated, and when it is computed.

    A parameter without a sink gets its gradient from autograd as usual, so that modules can be tested alone. The
    optimizer's buffers give every matrix a sink: its weight gradient then goes straight into the flat buffer.
    """

    def add(self, compute: Callable[[Tensor, bool], None]) -> None:
        """Runs `compute(out, accumulate)` now or later. It must write (or add, if `accumulate`) the gradient to `out`,
        which has the parameter's shape and the accumulation dtype."""
        ...


class Parameter(nn.Parameter):
    """`nn.Parameter` with a `ParamMeta` and an optional `GradSink`."""

    meta: ParamMeta
    sink: GradSink | None


def named_parameters(module: nn.Module) -> Iterator[tuple[str, Parameter]]:
    """(global name, parameter) in the order of registration."""
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, Parameter), f"{name} was not made by new_parameter"
        yield name, parameter


def new_parameter(shape: tuple[int, ...], meta: ParamMeta, *, dtype: torch.dtype, device: torch.device) -> Parameter:
    """An uninitialised parameter; `model/init.py` fills it by its global name."""
    parameter = Parameter(torch.empty(shape, dtype=dtype, device=device))
    parameter.meta = meta
    parameter.sink = None
    return parameter
