"""Output-discarding recompute: drops an op's output after its consumers' forward and recomputes it in backward.

The autograd graph is unchanged. Tensors that consumers save are replaced by a handle that recomputes the output from
inputs that are saved anyway, for the backward of the op itself. Gradients are therefore identical, and the memory is
freed once the last reference to the output is gone. (Megatron frees the output's storage and refills it in a hook.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

PackedTensor = Tensor | Callable[[], Tensor]
"""Packed form of a saved tensor: the tensor itself, or a function that restores it."""


def unpack(packed: PackedTensor) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed()


def storage_of(tensor: Tensor) -> int:
    """Identifier of the tensor's storage, valid while the storage exists; also for fake tensors."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True, eq=False)
class PackedView:
    """Packed form of a saved tensor: restores its storage and returns a view with its shape and strides."""

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
    """Saved-tensor policy that discards the outputs of one computation; applies to the consumers of the outputs."""

    def __init__(
        self,
        make: Callable[..., Tensor | tuple[Tensor, ...]],
        inputs: Sequence[PackedTensor],
        outputs: Sequence[Tensor],
    ) -> None:
        """`make(*inputs)` recomputes the outputs, in the same memory layout. The outputs must exist while `pack` is
        called."""
        self._make = make
        self._inputs = inputs
        self._indices = {(storage_of(output), output.dtype): index for index, output in enumerate(outputs)}
        self._num_packed = 0
        self._recomputed: tuple[Tensor, ...] | None = None
        """Recomputed outputs, referenced from the first unpack to the last."""

    def pack(self, tensor: Tensor) -> PackedTensor | None:
        """See `Policy`. Applies to the outputs and their views."""
        index = self._indices.get((storage_of(tensor), tensor.dtype))
        if index is None:
            return None
        self._num_packed += 1
        return PackedView.of(tensor, partial(self._unpack, index))

    def close(self) -> None:
        """Does nothing: the outputs may have consumers in several scopes."""

    def _unpack(self, index: int) -> Tensor:
        outputs = self._recomputed
        if outputs is None:
            with torch.no_grad():
                result = self._make(*map(unpack, self._inputs))
            outputs = (result,) if isinstance(result, Tensor) else result
        self._num_packed -= 1
        self._recomputed = outputs if self._num_packed > 0 else None
        return outputs[index]
