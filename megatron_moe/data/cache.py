"""Disk cache of index arrays, keyed by a hash of their inputs.

An entry has one file `<md5>-<kind>-<name>.npy` per array, and a JSON file `<md5>-<kind>-description.txt` with inputs,
shapes and checksums. The description is written last, so incomplete entries are detected and rebuilt. Every file is
written to a temporary name and renamed, so several jobs may build the same entry concurrently.
"""

import hashlib
import json
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.data.files import open_atomically

Arrays = dict[str, np.ndarray]
_DAMAGE = (
    *(OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, RecursionError),
    *(SyntaxError, tokenize.TokenError, zipfile.BadZipFile),
)
"""Exceptions that numpy and json raise for damaged files. numpy may parse them as Python source or as zip archives."""


def crc32_of(array: np.ndarray) -> int:
    """CRC-32 checksum of an array's values."""
    return zlib.crc32(np.ascontiguousarray(array).data)


def digest_of(inputs: Mapping[str, Any]) -> str:
    """MD5 hash, in hexadecimal, of the JSON text of `inputs`."""
    return hashlib.md5(json.dumps(inputs, indent=4).encode(), usedforsecurity=False).hexdigest()


def load_or_build(folder: Path | None, kind: str, inputs: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
    """Returns the arrays for `inputs`: memory-maps a complete entry in `folder`, otherwise builds and stores the
    arrays.

    Without `folder`, builds the arrays without a cache. Raises `EnvironmentProblem` if the folder cannot be written.
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
        raise EnvironmentProblem(
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
    """Loads a cache entry. Returns None if a file is missing or damaged, or if the entry was made from other
    `inputs`."""
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
        with open_atomically(folder / f"{stem}-{name}.npy") as file:
            np.save(file, array, allow_pickle=False)
    with open_atomically(folder / f"{stem}-description.txt") as file:
        file.write(_description(inputs, arrays).encode())
