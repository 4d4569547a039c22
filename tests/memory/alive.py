"""Memory of the tensors created in a scope: tracks every storage until it is freed."""

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.eager_graphs import leaves


class Alive(TorchDispatchMode):
    """Tracks storages created inside the context by weak references, which prevent reuse of a storage's identifier."""

    def __init__(self) -> None:
        super().__init__()
        self._tracked: dict[int, tuple[StorageWeakRef, int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see `megatron_moe/memory_emulation/tracker.py`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        arguments = leaves((*args, *(kwargs or {}).values()))
        given = {each.untyped_storage()._cdata for each in arguments if isinstance(each, Tensor)}
        for each in leaves((result,)):
            if isinstance(each, Tensor) and each.untyped_storage()._cdata not in given:
                self._track(each.untyped_storage())
        return result

    def _track(self, storage: torch.UntypedStorage) -> None:
        self._tracked.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))

    def bytes(self) -> int:
        """Returns the total bytes of all tracked storages that still exist."""
        return sum(size for reference, size in self._tracked.values() if not reference.expired())
