"""Output-discarding recompute: drops an op's output after its consumers' forward and recomputes it in backward.

Instead of the output, the consumers save a function that recomputes it from the op's inputs. The op saves these inputs
for its own backward anyway. The autograd graph and the gradients do not change. The output's memory is freed once its
last reference is gone. (Megatron-Core instead frees the output's storage and refills it in a backward hook.)
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

PackedTensor = Tensor | Callable[[], Tensor]
"""Packed form of a saved tensor: the tensor itself, or a function that restores it."""


def unpack(packed: PackedTensor) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed()


def storage_id(tensor: Tensor) -> int:
    """Id of the tensor's storage, unique while the storage exists. Fake tensors have an id too, but no data pointer."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True, eq=False)
class PackedView:
    """Packed form of a saved tensor. A call restores the storage and returns a view with saved shape and strides."""

    restore: Callable[[], Tensor]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, restore: Callable[[], Tensor]) -> "PackedView":
        return cls(restore, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def __call__(self) -> Tensor:
        return self.restore().as_strided(self.shape, self.stride, self.offset)


class DiscardedOutput:
    """Saved-tensor policy for the consumers of an op's outputs: they save a recompute function instead of outputs."""

    def __init__(
        self,
        make: Callable[..., Tensor | tuple[Tensor, ...]],
        inputs: Sequence[PackedTensor],
        outputs: Sequence[Tensor],
    ) -> None:
        """`make` recomputes the outputs in their original memory layout from the unpacked `inputs`. The outputs must be
        alive when `pack` is called, because they are identified by their storage."""
        self._make = make
        self._inputs = inputs
        self._indices = {(storage_id(output), output.dtype): index for index, output in enumerate(outputs)}
        self._num_packed = 0
        self._recomputed: tuple[Tensor, ...] | None = None
        """Recomputed outputs, kept from the first to the last unpack so that they are computed only once; None at other
        times."""

    def recomputing_inside(self, guard: Callable[[], AbstractContextManager[object]]) -> "DiscardedOutput":
        """Copy of this policy that recomputes inside the context manager `guard()`, which provides the weights. Call it
        before `pack`."""
        copy, make = object.__new__(DiscardedOutput), self._make
        copy.__dict__.update(self.__dict__)

        def guarded_make(*inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
            with guard():
                return make(*inputs)

        copy._make = guarded_make
        return copy

    def pack(self, tensor: Tensor) -> PackedTensor | None:
        """Packed form of an output or of a view of an output; None for any other tensor."""
        index = self._indices.get((storage_id(tensor), tensor.dtype))
        if index is None:
            return None
        self._num_packed += 1
        return PackedView.of(tensor, partial(self._unpack, index))

    def close(self) -> None:
        """Does nothing, because more consumers of the outputs may run in a later scope."""

    def _unpack(self, index: int) -> Tensor:
        outputs = self._recomputed
        if outputs is None:
            with torch.no_grad():
                result = self._make(*map(unpack, self._inputs))
            outputs = (result,) if isinstance(result, Tensor) else result
        self._num_packed -= 1
        self._recomputed = outputs if self._num_packed > 0 else None
        return outputs[index]
