"""How much memory tensors occupy that were made since a moment: every storage is followed until it is freed."""

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """As a context: follows what is made inside of it. Memory is not reused for another storage while it is followed,
    since a weak reference holds its place."""

    def __init__(self) -> None:
        super().__init__()
        self._followed: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.untyped_storage()._cdata not in given:
                self._follow(each.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        self._followed.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))

    def bytes(self) -> int:
        """Of all storages that still exist."""
        return sum(size for reference, size in self._followed.values() if not reference.expired())
