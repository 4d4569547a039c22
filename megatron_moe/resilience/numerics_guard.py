"""Where numbers go bad: spikes among finite ones, and the first module, parameter or expert of a non-finite one."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatron_moe.kernels.ops import all_finite
from megatron_moe.parallel.parameter import Parameter, held_experts, named_parameters

_FACTOR = 10.0
_WINDOW = 100
_MOST_EXPERTS = 8


class Spikes:
    """Says when a value is far above those before it, as Megatron judges: ten times the largest of the last hundred.

    Silent until it has seen a hundred. A spike does not count among those that later values are compared with.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._seen: deque[float] = deque(maxlen=_WINDOW)

    def check(self, value: float, iteration: int) -> str | None:
        """A sentence about a spike, or None."""
        largest = max(self._seen, default=math.inf)
        if len(self._seen) == _WINDOW and value > _FACTOR * largest:
            return (
                f"iteration {iteration}: {self._what} {value:.6g} is {value / largest:.1f} times the largest of the "
                f"{_WINDOW} iterations before ({largest:.6g})"
            )
        if math.isfinite(value):
            self._seen.append(value)
        return None


class SpikeLimit:
    """The same judgement on the device, for a verdict that must not wait for the host."""

    def __init__(self, device: torch.device, window: int = _WINDOW) -> None:
        self._seen = torch.full((window,), torch.nan, device=device, dtype=torch.float64)
        self._places = torch.arange(window, device=device)
        self._number = torch.zeros((), device=device, dtype=torch.int64)

    def usual(self, value: Tensor) -> Tensor:
        """bool: is the value (a scalar) no spike? Unless it is one, or not finite, later ones are compared with it."""
        value = value.detach().double()
        window = len(self._seen)
        spike = (self._number >= window) & (value > _FACTOR * self._seen.nan_to_num(nan=0.0).max())
        counts = torch.isfinite(value) & ~spike
        here = self._places == self._number % window
        self._seen = torch.where(here & counts, value, self._seen)
        self._number = self._number + counts
        return ~spike


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is not finite."""

    kind: Literal["weight", "moment", "activation", "gradient of activation", "gradient"]
    name: str
    """Global name of a parameter, or of the module whose output it is."""
    experts: tuple[int, ...] = ()
    """Global ids, for a parameter with one part per expert."""

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.experts[:_MOST_EXPERTS]))
        more = f" and {len(self.experts) - _MOST_EXPERTS} more" if len(self.experts) > _MOST_EXPERTS else ""
        noun = "expert" if len(self.experts) == 1 else "experts"
        where = "the output of " if "activation" in self.kind else ""
        what = self.kind.removesuffix(" of activation") if where else self.kind
        verbs = {"activation": "", "gradient": "the gradient of ", "weight": "the weights of ", "moment": "the moment "}
        return f"{verbs[what]}{where}{self.name}" + (f" ({noun} {shown}{more})" if self.experts else "")


def bad_weights(model: nn.Module) -> Iterator[Finding]:
    """Parameters that are not finite, in the order of the model. Waits for the device."""
    for name, parameter in named_parameters(model):
        if not _finite(parameter.detach()):
            yield Finding(kind="weight", name=name, experts=_experts(parameter, parameter.detach()))


def bad_gradient(name: str, parameter: Parameter, gradient: Tensor) -> Finding | None:
    """What is wrong with the gradient [of the parameter's shape], if anything."""
    if _finite(gradient):
        return None
    return Finding(kind="gradient", name=name, experts=_experts(parameter, gradient))


class FirstBadModule:
    """While entered, watches what the modules of a model give, forwards and backwards. Waits for the device all the
    time, so it is for the repetition of a bad step only."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[Any] = []
        self.forward: Finding | None = None
        """The first module, in the order of computation, whose output is not finite."""
        self.backward: Finding | None = None
        """The same of the gradients of outputs."""

    def __enter__(self) -> "FirstBadModule":
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_hook(self._watcher(name or "model")))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _watcher(self, name: str) -> Any:
        def watch(module: nn.Module, inputs: object, output: object) -> None:
            for tensor in _tensors(output):
                if self.forward is None and not _finite(tensor):
                    self.forward = Finding(kind="activation", name=name)
                if tensor.requires_grad:
                    tensor.register_hook(look_back)

        def look_back(gradient: Tensor) -> None:
            if self.backward is None and not _finite(gradient):
                self.backward = Finding(kind="gradient of activation", name=name)

        return watch


def _tensors(output: object) -> Iterator[Tensor]:
    """Floating tensors of a module's output: itself, or in a tuple."""
    if isinstance(output, Tensor) and output.is_floating_point():
        yield output
    elif isinstance(output, tuple):
        for each in output:
            yield from _tensors(each)


def _experts(parameter: Parameter, values: Tensor) -> tuple[int, ...]:
    if parameter.meta.num_experts is None:
        return ()
    return tuple(
        expert for expert, part in zip(held_experts(parameter), values.unbind(0), strict=True) if not _finite(part)
    )


def _finite(tensor: Tensor) -> bool:
    return bool(all_finite(tensor))
