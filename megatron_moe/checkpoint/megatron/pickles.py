"""Safe reader for pickled parts of Megatron checkpoints.

Unpickling normally calls any function that the pickle references. This reader maps a short list of names to harmless
substitutes; every other name becomes an inert class. Tensors are read lazily, within the bounds of their storage.
"""

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_moe.checkpoint.storage import open_regular
from megatron_moe.config.exit_codes import CheckpointProblem

MAX_PICKLE_BYTES = 1 << 30
_STORAGES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "FloatStorage": torch.float32,
        "DoubleStorage": torch.float64,
        "HalfStorage": torch.float16,
        "BFloat16Storage": torch.bfloat16,
        "LongStorage": torch.int64,
        "IntStorage": torch.int32,
        "ShortStorage": torch.int16,
        "CharStorage": torch.int8,
        "ByteStorage": torch.uint8,
        "BoolStorage": torch.bool,
    }
)
_FAILURES = (
    *(pickle.UnpicklingError, EOFError, ImportError, AttributeError, TypeError, ValueError, LookupError, OverflowError),
    *(RecursionError, MemoryError, AssertionError),
)
"""Exceptions that a damaged or malicious pickle can raise."""
_ARCHIVE_FAILURES = (ValueError, KeyError, OSError, EOFError, NotImplementedError, zipfile.BadZipFile)
"""Exceptions that a damaged or malicious zip archive can raise."""


class Inert:
    """Substitute for classes and functions that are not allowed: accepts any arguments and does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Inert":
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> "Inert":
        return self

    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class PickledObject(SimpleNamespace):
    """Substitute for a dataclass or Namespace; stores the pickled fields and runs none of the class's code."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(**fields)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update({str(key): value for key, value in state.items()})

    def __hash__(self) -> int:  # type: ignore[override]  # pickles use such objects as dict keys
        return hash(tuple(sorted((key, str(value)) for key, value in vars(self).items())))


class Properties(PickledObject):
    """Substitute for TensorProperties. Keeps only the dtype, which is the first element of the pickled tuple."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and state and isinstance(state[0], torch.dtype):
            self.dtype = state[0]


@dataclass(frozen=True)
class LazyTensor:
    """A tensor in an archive, read by `load`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    _stride: tuple[int, ...] = field(repr=False)
    _offset: int = field(repr=False)
    _read: Callable[[], bytes] = field(repr=False)

    def load(self) -> Tensor:
        """Reads the values. Raises CheckpointProblem if the tensor exceeds its storage."""
        if prod(self.shape) == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(bytearray(self._read()), dtype=self.dtype)
        last = self._offset + sum((size - 1) * step for size, step in zip(self.shape, self._stride, strict=True))
        if min((self._offset, *self._stride, *self.shape)) < 0 or max(last + 1, prod(self.shape)) > len(flat):
            raise CheckpointProblem(f"a tensor of shape {self.shape} exceeds its storage of {len(flat)} elements")
        return flat.as_strided(self.shape, self._stride, self._offset).clone()


@dataclass(frozen=True)
class _PickledStorage:
    dtype: torch.dtype
    read: Callable[[], bytes]


def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Any:
    if not isinstance(storage, _PickledStorage):
        return Inert()
    return LazyTensor(storage.dtype, tuple(map(int, size)), tuple(map(int, stride)), int(offset), storage.read)


def _rebuild_parameter(data: Any, *rest: Any) -> Any:
    return data


_METADATA_CLASSES = (
    *("Metadata", "MetadataIndex", "StorageMeta"),
    *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
)
_ALLOWED: Mapping[tuple[str, str], Any] = MappingProxyType(
    {
        ("collections", "OrderedDict"): OrderedDict,
        ("torch", "Size"): tuple,
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
        ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
        ("argparse", "Namespace"): PickledObject,
        **{("torch.distributed.checkpoint.metadata", name): PickledObject for name in _METADATA_CLASSES},
        ("torch.distributed.checkpoint.metadata", "TensorProperties"): Properties,
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): PickledObject,
    }
)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, open_storage: Callable[[str], Callable[[], bytes]]) -> None:
        super().__init__(io.BytesIO(data))
        self._open_storage = open_storage

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return type(name, (Inert,), {"__module__": module})

    def persistent_load(self, pid: Any) -> Any:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], torch.dtype)):
            return Inert()
        return _PickledStorage(pid[1], self._open_storage(str(pid[2])))


def load_pickle(data: bytes, what: str) -> Any:
    """Loads a plain pickle, such as `.metadata`. Raises CheckpointProblem if it is invalid."""
    return _load(data, what, lambda key: lambda: b"")


def load_archive(source: Path | bytes, what: str) -> Any:
    """Loads a `torch.save` archive with tensors as `LazyTensor`. Raises CheckpointProblem if it is invalid."""

    @contextmanager
    def open_archive() -> Iterator[zipfile.ZipFile]:
        with open_regular(source) if isinstance(source, Path) else io.BytesIO(source) as file:
            yield zipfile.ZipFile(file)

    def read_entry(name: str) -> bytes:
        try:
            with open_archive() as archive:
                return archive.read(name)
        except _ARCHIVE_FAILURES as error:
            raise CheckpointProblem(f"{what}: {name} cannot be read: {error}") from error

    try:
        with open_archive() as archive:
            names = archive.namelist()
            (pickled,) = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
            compressed = any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist())
            orders = {archive.read(name) for name in names if name.endswith("/byteorder") and not compressed}
    except _ARCHIVE_FAILURES as error:
        raise CheckpointProblem(f"{what} is not a torch.save archive: {error}") from error
    if compressed or not orders <= {b"little"} or pickled.file_size > MAX_PICKLE_BYTES:
        raise CheckpointProblem(
            f"{what} is compressed, of another byte order, or its pickle exceeds {MAX_PICKLE_BYTES} bytes"
        )
    root = pickled.filename.removesuffix("data.pkl")
    return _load(read_entry(pickled.filename), what, lambda key: lambda: read_entry(f"{root}data/{key}"))


def _load(data: bytes, what: str, open_storage: Callable[[str], Callable[[], bytes]]) -> Any:
    try:
        return _Unpickler(data, open_storage).load()
    except _FAILURES as error:
        raise CheckpointProblem(f"{what} cannot be read: {type(error).__name__}: {error}") from error
