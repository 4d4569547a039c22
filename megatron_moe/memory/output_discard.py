"""Outputs that are dropped as soon as their consumers have run, and made again when the backward asks for them.

The graph of the forward stays as it is. Only what the consumers save of the output is replaced by a note of how it was
made: from inputs that are kept anyway, since the backward of what made it needs them. So the gradient is the one
without all this, and memory is freed when, and only when, nobody else holds the output. Megatron frees the output's
storage under its users' hands and refills it in a hook; the effect is the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PackedTensor = Tensor | Callable[[], Tensor]
"""What stands for a saved tensor between forward and backward: itself, or how it is had again."""


def unpack(packed: PackedTensor) -> Tensor:
    """The saved tensor."""
    return packed if isinstance(packed, Tensor) else packed()


def storage_of(tensor: Tensor) -> int:
    """Tells memory from memory, of fake tensors too, as long as somebody holds it."""
    return int(tensor.untyped_storage()._cdata)


class DiscardedOutput:
    """The outputs of one computation. Every save of one of them, or of a view of it, is one note."""

    def __init__(
        self,
        make: Callable[..., Tensor | tuple[Tensor, ...]],
        inputs: Sequence[PackedTensor],
        outputs: Sequence[Tensor],
    ) -> None:
        """`make(*inputs)` gives the outputs, in the same memory layout. Somebody must hold the outputs as long as
        `pack` is called."""
        self._make = make
        self._inputs = inputs
        self._number = {(storage_of(output), output.dtype): number for number, output in enumerate(outputs)}
        self._num_notes = 0
        self._made: tuple[Tensor, ...] | None = None
        """From the first note that is read to the last."""

    def pack(self, tensor: Tensor) -> PackedTensor | None:
        """None: the tensor is none of the outputs."""
        number = self._number.get((storage_of(tensor), tensor.dtype))
        if number is None:
            return None
        self._num_notes += 1
        return _Note(self, number, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def close(self) -> None:
        """One of the scopes of the consumers was left; others may follow."""

    def read(self, number: int) -> Tensor:
        """The output for one note. Several are read behind one another; the output is made once for all of them."""
        made = self._made
        if made is None:
            with torch.no_grad():
                result = self._make(*map(unpack, self._inputs))
            made = (result,) if isinstance(result, Tensor) else result
        self._num_notes -= 1
        self._made = made if self._num_notes > 0 else None
        return made[number]


@dataclass(frozen=True, eq=False)
class _Note:
    """Instead of a saved tensor: which output, and how it was looked at."""

    of: DiscardedOutput
    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def __call__(self) -> Tensor:
        return self.of.read(self.number).as_strided(self.shape, self.stride, self.offset)
