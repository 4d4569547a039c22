"""Arrays that are expensive to build, kept on disk under a name made of everything they depend on.

A set of arrays is `<md5>-<kind>-<name>.npy` files and, written last, `<md5>-<kind>-description.txt`: JSON with what the
arrays were made from and their sizes and checksums. Every file is written aside and renamed. So a set is there whole or
is built again, two jobs may build it at once, and data that changed gets a new name.
"""

import hashlib
import json
import os
import threading
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron_moe.config.exit_codes import DataProblem

Arrays = dict[str, np.ndarray]
_DAMAGE = (
    *(OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, RecursionError),
    *(SyntaxError, tokenize.TokenError, zipfile.BadZipFile),
)
"""What numpy and json raise for files whose bytes are not those that were written: a .npy begins with a piece of
Python, and may look like an archive."""


def crc32_of(array: np.ndarray) -> int:
    """Checksum of an array's values."""
    return zlib.crc32(np.ascontiguousarray(array).data)


def digest_of(inputs: Mapping[str, Any]) -> str:
    """md5 of the JSON text of `inputs`."""
    return hashlib.md5(json.dumps(inputs, indent=4).encode(), usedforsecurity=False).hexdigest()


def load_or_build(folder: Path | None, kind: str, inputs: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
    """The arrays described by `inputs`: memory-mapped from `folder` when they are there and whole, else built and kept.

    `folder` None: built every time. Raises `DataProblem` when the folder cannot be written.
    """
    if folder is None:
        return build()
    stem = f"{digest_of(inputs)}-{kind}"
    found = _load(folder, stem, inputs)
    if found is not None:
        return found
    arrays = build()
    try:
        _save(folder, stem, inputs, arrays)
    except OSError as error:
        raise DataProblem(
            f"cannot write index cache {folder}: {error.strerror}; "
            f"set --data-cache-path to a folder that this user may write and that has space"
        ) from error
    return arrays


def _description(inputs: Mapping[str, Any], arrays: Arrays) -> str:
    files = {
        name: {"dtype": array.dtype.str, "shape": list(array.shape), "crc32": crc32_of(array)}
        for name, array in arrays.items()
    }
    return json.dumps({"inputs": inputs, "arrays": files}, indent=4)


def _load(folder: Path, stem: str, inputs: Mapping[str, Any]) -> Arrays | None:
    """None when anything is missing, cut short or other than described: then the set is simply made again."""
    try:
        text = (folder / f"{stem}-description.txt").read_text()
        names = json.loads(text)["arrays"]
        arrays = {name: np.load(folder / f"{stem}-{name}.npy", mmap_mode="r") for name in names}
        return arrays if _description(inputs, arrays) == text else None
    except _DAMAGE:
        return None


def _save(folder: Path, stem: str, inputs: Mapping[str, Any], arrays: Arrays) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        with _aside(folder / f"{stem}-{name}.npy") as file:
            np.save(file, array, allow_pickle=False)
    with _aside(folder / f"{stem}-description.txt") as file:
        file.write(_description(inputs, arrays).encode())


@contextmanager
def _aside(path: Path) -> Iterator[IO[bytes]]:
    """A binary file written beside its place, which it takes when all went well."""
    beside = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with open(beside, "wb") as file:
            yield file
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
