"""Numerics checks: detection of loss and gradient-norm spikes, and search for non-finite weights and activations."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatron_moe.kernels.ops import all_finite
from megatron_moe.parallel.parameter import Parameter, local_expert_ids, named_parameters

_FACTOR = 10.0
_WINDOW = 100
_MOST_EXPERTS = 8


class Spikes:
    """Spike detection on the host, as in Megatron: a spike is a value above 10 x the maximum of the last 100 values.

    Spikes and non-finite values are not added to these 100. No value is a spike before there are 100 values.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._seen: deque[float] = deque(maxlen=_WINDOW)

    def spike_message(self, value: float, iteration: int) -> str | None:
        """Returns a log message if `value` is a spike. Otherwise returns None, and adds a finite `value` to the
        window."""
        largest = max(self._seen, default=math.inf)
        if len(self._seen) == _WINDOW and value > _FACTOR * largest:
            return (
                f"iteration {iteration}: {self._what} {value:.6g} is {value / largest:.1f} times the maximum of the "
                f"previous {_WINDOW} iterations ({largest:.6g})"
            )
        if math.isfinite(value):
            self._seen.append(value)
        return None


class SpikeLimit:
    """Spike detection on the device, with the same rule as `Spikes` and without synchronisation."""

    def __init__(self, device: torch.device, window: int = _WINDOW) -> None:
        self._seen = torch.full((window,), torch.nan, device=device, dtype=torch.float64)
        self._places = torch.arange(window, device=device)
        self._number = torch.zeros((), device=device, dtype=torch.int64)

    def is_normal(self, value: Tensor, valid: Tensor) -> Tensor:
        """Returns a device bool: False if the scalar `value` is a spike. Adds `value` to the window if the device bool
        `valid` is True, unless it is a spike or not finite."""
        value = value.detach().double()
        window = len(self._seen)
        spike = (self._number >= window) & (value > _FACTOR * self._seen.nan_to_num(nan=0.0).max())
        counts = torch.isfinite(value) & ~spike & valid
        here = self._places == self._number % window
        self._seen = torch.where(here & counts, value, self._seen)
        self._number = self._number + counts
        return ~spike


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Tensor in which a non-finite element was found."""

    kind: Literal["weight", "moment", "activation", "gradient of activation", "gradient"]
    name: str
    """Global name of the parameter, or name of the module whose output is not finite."""
    experts: tuple[int, ...] = ()
    """Global ids of the experts with non-finite values; empty unless the tensor belongs to an expert parameter."""

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.experts[:_MOST_EXPERTS]))
        more = f" and {len(self.experts) - _MOST_EXPERTS} more" if len(self.experts) > _MOST_EXPERTS else ""
        noun = "expert" if len(self.experts) == 1 else "experts"
        where = "the output of " if "activation" in self.kind else ""
        what = self.kind.removesuffix(" of activation") if where else self.kind
        verbs = {"activation": "", "gradient": "the gradient of ", "weight": "the weights of ", "moment": "the moment "}
        return f"{verbs[what]}{where}{self.name}" + (f" ({noun} {shown}{more})" if self.experts else "")


def nonfinite_weights(model: nn.Module) -> Iterator[Finding]:
    """Yields a finding for each non-finite parameter, in model order. Synchronises with the device."""
    for name, parameter in named_parameters(model):
        if not all_finite(parameter.detach()):
            yield Finding(kind="weight", name=name, experts=_experts(parameter, parameter.detach()))


def nonfinite_gradient(name: str, parameter: Parameter, gradient: Tensor) -> Finding | None:
    """Finding for a gradient, which must have the parameter's shape; None if the gradient is finite."""
    if all_finite(gradient):
        return None
    return Finding(kind="gradient", name=name, experts=_experts(parameter, gradient))


class FirstNonfiniteModule:
    """Context manager that finds the first module whose output, or gradient of an output, is not finite.

    Its hooks synchronise with the device at every module, so it is used only to repeat a failed step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[Any] = []
        self.forward: Finding | None = None
        """First module, in order of execution, with a non-finite output."""
        self.backward: Finding | None = None
        """First module, in backward order, whose output has a non-finite gradient."""

    def __enter__(self) -> "FirstNonfiniteModule":
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_hook(self._hook(name or "model")))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Callable[..., None]:
        def record_nonfinite_output(module: nn.Module, inputs: object, output: object) -> None:
            for tensor in _tensors(output):
                if self.forward is None and not all_finite(tensor):
                    self.forward = Finding(kind="activation", name=name)
                if tensor.requires_grad:
                    tensor.register_hook(record_nonfinite_gradient)

        def record_nonfinite_gradient(gradient: Tensor) -> None:
            if self.backward is None and not all_finite(gradient):
                self.backward = Finding(kind="gradient of activation", name=name)

        return record_nonfinite_output


def _tensors(output: object) -> Iterator[Tensor]:
    """Floating-point tensors of a module's output, which may be a nested tuple."""
    if isinstance(output, Tensor) and output.is_floating_point():
        yield output
    elif isinstance(output, tuple):
        for each in output:
            yield from _tensors(each)


def _experts(parameter: Parameter, values: Tensor) -> tuple[int, ...]:
    if parameter.meta.num_experts is None:
        return ()
    parts = zip(local_expert_ids(parameter), values.unbind(0), strict=True)
    return tuple(expert for expert, part in parts if not all_finite(part))
