"""Case of `benchmarks/harness/time_kernels.py`: an op, its inputs, and its minimum memory traffic and FLOPs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Results = Tensor | tuple[Tensor, ...] | None


@dataclass(frozen=True)
class KernelCase:
    """One row of the table."""

    name: str
    """Name of the row; starts with the op whose backend is varied."""
    run: Callable[..., Results]
    """Function of a kernel set and the inputs."""
    inputs: tuple[Tensor, ...] = ()
    """Inputs that require gradients; empty if the case has no backward."""
    gigabytes: float = 0.0
    """Minimum memory traffic of forward and backward, each tensor read or written once per direction."""
    teraflop: float = 0.0
    """Floating-point operations of the GEMMs, in units of 1e12."""
    alongside: tuple[str, ...] = ()
    """Other ops that the backend also provides in this row."""
    compiled: str | None = "reference"
    """Backend whose code torch.compile compiles; None omits torch.compile and all backends that `auto` does not
    select."""

    @property
    def op(self) -> str:
        return self.name.split()[0]


class Draw:
    """Draws random tensors with one device and dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draws a normally distributed tensor that requires gradients."""
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype, requires_grad=True)

    def fixed(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self(*shape, dtype=dtype).detach()

    def ids(self, end: int, *shape: int) -> Tensor:
        """Draws uniform int64 ids in [0, end)."""
        return torch.randint(end, shape, device=self.device)

    def moved(self, numel: int) -> float:
        """Memory traffic of `numel` elements, in GB."""
        return numel * self.dtype.itemsize / 1e9
