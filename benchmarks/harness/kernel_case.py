"""One row of the table of `benchmarks/harness/time_kernels.py`: an op, its inputs, and what it cannot do without."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Results = Tensor | tuple[Tensor, ...] | None


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    """Starts with the op whose backend is varied."""
    run: Callable[..., Results]
    """From a bundle and the inputs to the results."""
    inputs: tuple[Tensor, ...] = ()
    """Those that want gradients; none: there is no backward."""
    gigabytes: float = 0.0
    """That must move at least, forward and backward: every tensor read or written once in each of the two."""
    teraflop: float = 0.0
    """Of products."""
    beside: tuple[str, ...] = ()
    """Other ops that the backend takes over in this row, if it has them."""
    compiled: str | None = "reference"
    """The backend whose torch torch.compile is given; None: the row is timed without it, and without the backends that
    `auto` would not take."""

    @property
    def op(self) -> str:
        return self.name.split()[0]


class Draw:
    """Random tensors, and their sizes."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Wants gradients."""
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype, requires_grad=True)

    def fixed(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self(*shape, dtype=dtype).detach()

    def ids(self, end: int, *shape: int) -> Tensor:
        """int64, each below `end` as likely."""
        return torch.randint(end, shape, device=self.device)

    def moved(self, numel: int) -> float:
        """Gigabytes of so many elements."""
        return numel * self.dtype.itemsize / 1e9
