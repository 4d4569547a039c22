"""Checkpoint manifest: data classes, encoding, and validation.

A checkpoint is a folder `iter_NNNNNNN` of safetensors files, text files and `manifest.json`, which is written last. The
manifest lists all files and all pieces of tensors, each with a crc32, and ends with a crc32 of its content. The key
of a tensor consists of its kind, such as "model", and its global name. The format does not depend on the parallel
layout: names and shapes are global, and experts are stacked along dim 0. docs/checkpoint-format.md specifies it.
"""

import json
import re
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from megatron_moe.checkpoint.storage import read_bounded

FORMAT = "megatron_moe checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
TRAIN_STATE = "train_state.json"
SAFETENSORS = ".safetensors"

MAX_MANIFEST_BYTES = 1 << 32
MAX_HEADER_BYTES = 100_000_000
_MAX_DIM = 1 << 48
_MAX_DIMS = 8

TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
"""torch dtypes by safetensors dtype name."""

_FILE_NAME = re.compile(rf"(?!{re.escape(MANIFEST)}$)[A-Za-z0-9_][A-Za-z0-9_.-]{{0,99}}")
_TENSOR_KEY = re.compile(r"[A-Za-z0-9_]{1,32}\.[A-Za-z0-9_.\-]{1,400}")
_CRC = re.compile(r"[0-9a-f]{8}")
_TRAILER = re.compile(rb',"crc32":"([0-9a-f]{8})"}\n')
_TRAILER_BYTES = len(',"crc32":"01234567"}\n')

JsonType = TypeVar("JsonType", dict[str, Any], list[Any], str)


class CorruptCheckpoint(Exception):
    """The checkpoint is incomplete or fails verification. An older one may be valid."""


class FormatTooNewError(Exception):
    """The checkpoint has a later format version than this program reads."""


@dataclass(frozen=True)
class TensorPiece:
    """A box (contiguous n-d range) of a tensor, stored in row-major order in one file."""

    file: str
    start: int
    """Offset in bytes from the start of the file."""
    offset: tuple[int, ...]
    """Start index in the tensor, per dim."""
    shape: tuple[int, ...]
    crc32: str


@dataclass(frozen=True)
class TensorEntry:
    """One tensor, covered exactly once by its pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]

    def num_bytes(self, piece: TensorPiece) -> int:
        return prod(piece.shape) * TORCH_DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class FileEntry:
    """One file. `crc32` covers the first `head` bytes: the header of a safetensors file, or the whole text file."""

    size: int
    head: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint. Keys of `tensors` are "<kind>.<global name>"; weights and buffers have kind "model"."""

    iteration: int
    writer: str
    """Name and version of the program that wrote the checkpoint."""
    ranks: Mapping[str, int]
    """Size of each parallel axis of the run that wrote the checkpoint. Loading does not use it."""
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)


def merge_entries(parts: Iterable[Mapping[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """Merges the tensor entries of several ranks. Each rank lists only the pieces in the files that it wrote."""
    entries: dict[str, TensorEntry] = {}
    for part in parts:
        for key, entry in part.items():
            known = entries.get(key, TensorEntry(entry.dtype, entry.shape, ()))
            assert (known.dtype, known.shape) == (entry.dtype, entry.shape), f"{key}: {known} and {entry}"
            entries[key] = TensorEntry(entry.dtype, entry.shape, known.pieces + entry.pieces)
    return entries


def checksum(data: bytes | bytearray | memoryview) -> str:
    """crc32 as eight lower-case hex digits."""
    return f"{zlib.crc32(data):08x}"


def encode(manifest: Manifest) -> bytes:
    """Encodes manifest.json, which ends with its own crc32."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "writer": manifest.writer,
        "iteration": manifest.iteration,
        "ranks": dict(manifest.ranks),
        "files": dict(manifest.files),
        "tensors": dict(manifest.tensors),
    }
    # `default=vars` encodes entries and pieces as their fields
    text = json.dumps(body, separators=(",", ":"), default=vars).encode()[:-1]
    return text + f',"crc32":"{checksum(text)}"}}\n'.encode()


def decode(data: bytes) -> Manifest:
    """Decodes and validates a manifest.

    All sizes, offsets, shapes and names in the result are consistent, so readers can rely on them to allocate and seek.

    Raises:
        CorruptCheckpoint: the manifest is larger than `read_manifest` accepts, its crc32 differs, or the content is
            inconsistent.
        FormatTooNewError: the format version is later than this program's.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise CorruptCheckpoint(f"{MANIFEST}: it has {len(data)} bytes, more than the limit of {MAX_MANIFEST_BYTES}")
    trailer = _TRAILER.fullmatch(data[-_TRAILER_BYTES:])
    found = checksum(data[:-_TRAILER_BYTES])
    if trailer is None or trailer[1].decode() != found:
        expected = trailer[1].decode() if trailer else "missing"
        raise CorruptCheckpoint(f"{MANIFEST}: its own crc32 is {expected}, its content has {found}")
    body = parse_json(data, MANIFEST)
    if body.get("format") != FORMAT:
        raise CorruptCheckpoint(f"{MANIFEST}: its format is {body.get('format')!r:.80}, not {FORMAT!r}")
    version = _number(body, "version")
    if version > VERSION:
        writer = body.get("writer")
        raise FormatTooNewError(
            f"written in format version {version} by {writer!r}; this program reads up to {VERSION}"
        )
    files = {_file_name(name): _decode_file(name, entry) for name, entry in _field(body, "files", dict).items()}
    tensors = {
        _matching(_TENSOR_KEY, key, "tensor name"): _decode_tensor(key, entry)
        for key, entry in _field(body, "tensors", dict).items()
    }
    ranks = {axis: _size(size, axis) for axis, size in _field(body, "ranks", dict).items()}
    manifest = Manifest(_number(body, "iteration"), str(body.get("writer")), ranks, files, tensors)
    _check_boxes(manifest)
    _check_bytes(manifest)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Reads and validates the manifest of a checkpoint folder. Raises CorruptCheckpoint or FormatTooNewError."""
    try:
        data = read_bounded(folder / MANIFEST, MAX_MANIFEST_BYTES)
    except OSError as error:
        raise CorruptCheckpoint(f"{MANIFEST}: {error.strerror}") from error
    return decode(data)


def parse_json(data: bytes, name: str) -> dict[str, Any]:
    """Parses a JSON object. Raises CorruptCheckpoint if `data` is not valid JSON or has duplicate keys."""
    try:
        body = json.loads(data, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{name}: invalid JSON: {error}") from error
    if not isinstance(body, dict):
        raise CorruptCheckpoint(f"{name}: holds {type(body).__name__}, not an object")
    return body


Extent = tuple[int, str, tuple[int, ...]]
"""(first byte in the file, safetensors dtype name, shape) of a piece."""


def extents_by_file(manifest: Manifest) -> dict[str, list[Extent]]:
    """Extents of all non-empty pieces, by file name."""
    extents: dict[str, list[Extent]] = {}
    for entry in manifest.tensors.values():
        for piece in entry.pieces:
            if 0 not in piece.shape:
                extents.setdefault(piece.file, []).append((piece.start, entry.dtype, piece.shape))
    return extents


def check_header(name: str, head: bytes, extents: Iterable[Extent]) -> None:
    """Raises CorruptCheckpoint unless the safetensors header `head` describes exactly the pieces `extents`."""
    (length,) = struct.unpack_from("<Q", head) if len(head) >= 8 else (0,)
    if length != len(head) - 8:
        raise CorruptCheckpoint(f"{name}: header: length {length}, the manifest says {len(head) - 8}")
    table = parse_json(head[8:], name)
    table.pop("__metadata__", None)
    described = sorted(extent for entry in table.values() if 0 not in (extent := _extent(entry, len(head)))[2])
    expected = sorted(extents)
    if described != expected:
        raise CorruptCheckpoint(f"{name}: header: does not describe the manifest's {len(expected)} pieces of this file")


def _extent(entry: Any, head: int) -> Extent:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int()]}:
            return head + begin, dtype, tuple(_size(size, "shape") for size in shape)
    raise CorruptCheckpoint(f"invalid entry in a safetensors header: {json.dumps(entry)[:80]}")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"duplicate key among {sorted(name for name, _ in pairs)[:10]}")
    return found


def _decode_file(name: str, entry: Any) -> FileEntry:
    size, head = _number(entry, "size"), _number(entry, "head")
    if head > size or head > MAX_HEADER_BYTES:
        raise CorruptCheckpoint(f"{MANIFEST}: {name}: its head of {head} bytes exceeds the file of {size} bytes")
    return FileEntry(size, head, _crc(entry))


def _decode_tensor(key: str, entry: Any) -> TensorEntry:
    dtype = _field(entry, "dtype", str)
    if dtype not in TORCH_DTYPES:
        raise CorruptCheckpoint(f"{MANIFEST}: {key}: unknown element type {dtype!r:.80}")
    shape = _sizes(entry, "shape")
    pieces = tuple(map(_decode_piece, _field(entry, "pieces", list)))
    if not pieces:
        raise CorruptCheckpoint(f"{MANIFEST}: {key} has no pieces")
    return TensorEntry(dtype, shape, pieces)


def _decode_piece(entry: Any) -> TensorPiece:
    file = _file_name(_field(entry, "file", str))
    return TensorPiece(file, _number(entry, "start"), _sizes(entry, "offset"), _sizes(entry, "shape"), _crc(entry))


def _check_boxes(manifest: Manifest) -> None:
    """Checks that the pieces of every tensor are within its shape and cover it exactly once."""
    for key, entry in manifest.tensors.items():
        for piece in entry.pieces:
            dims = len(entry.shape)
            if len(piece.offset) != dims or len(piece.shape) != dims:
                raise CorruptCheckpoint(
                    f"{MANIFEST}: {key}: a box has {len(piece.shape)} dims, but the tensor has {dims}"
                )
            if any(o + n > size for o, n, size in zip(piece.offset, piece.shape, entry.shape, strict=True)):
                raise CorruptCheckpoint(
                    f"{MANIFEST}: {key}: box {piece.offset} + {piece.shape} exceeds shape {entry.shape}"
                )
        covered = sum(prod(piece.shape) for piece in entry.pieces)
        if covered != prod(entry.shape) or _any_overlap(entry.pieces):
            raise CorruptCheckpoint(f"{MANIFEST}: {key}: its boxes do not cover shape {entry.shape} exactly once")


def _any_overlap(pieces: tuple[TensorPiece, ...]) -> bool:
    """True if two pieces overlap. Sweeps along dim 0 and compares only pieces that overlap in this dim."""
    active: list[TensorPiece] = []
    for piece in sorted((p for p in pieces if prod(p.shape)), key=lambda p: p.offset[:1]):
        active = [other for other in active if not other.shape or other.offset[0] + other.shape[0] > piece.offset[0]]
        for other in active:
            spans = zip(piece.offset, piece.shape, other.offset, other.shape, strict=True)
            if all(start < begin + length and begin < start + size for start, size, begin, length in spans):
                return True
        active.append(piece)
    return False


def _check_bytes(manifest: Manifest) -> None:
    """Checks that the header and the pieces in every file cover all bytes of the file exactly once."""
    spans: dict[str, list[tuple[int, int]]] = {name: [(0, file.head)] for name, file in manifest.files.items()}
    for key, entry in manifest.tensors.items():
        for piece in entry.pieces:
            if piece.file not in spans:
                raise CorruptCheckpoint(f"{MANIFEST}: {key}: stored in unlisted file {piece.file}")
            spans[piece.file].append((piece.start, piece.start + entry.num_bytes(piece)))
    for name, filled in spans.items():
        size = manifest.files[name].size
        for (_, end), (start, _) in pairwise([*sorted(filled), (size, size)]):
            if start != end:
                raise CorruptCheckpoint(
                    f"{MANIFEST}: {name}: a piece begins at byte {start}, the previous one ends at byte {end}"
                )


def _field(entry: Any, name: str, kind: type[JsonType]) -> JsonType:
    """Value of the key `name` in the JSON object `entry`. Raises CorruptCheckpoint unless its type is `kind`."""
    value = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(value, kind):
        raise CorruptCheckpoint(f"{MANIFEST}: {name!r} is not of type {kind.__name__}: {value!r:.80}")
    return value


def _number(entry: Any, name: str) -> int:
    return _size(entry.get(name) if isinstance(entry, dict) else None, name)


def _sizes(entry: Any, name: str) -> tuple[int, ...]:
    values = _field(entry, name, list)
    if len(values) > _MAX_DIMS:
        raise CorruptCheckpoint(f"{MANIFEST}: {name!r} has more than {_MAX_DIMS} sizes: {values!r:.80}")
    return tuple(_size(size, name) for size in values)


def _size(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_DIM:
        raise CorruptCheckpoint(f"{MANIFEST}: {name!r} is not an integer from 0 to 2^48: {value!r:.80}")
    return value


def _matching(pattern: re.Pattern[str], value: str, what: str) -> str:
    if not pattern.fullmatch(value):
        raise CorruptCheckpoint(f"{MANIFEST}: {value!r:.120} is not a {what}")
    return value


def _crc(entry: Any) -> str:
    return _matching(_CRC, _field(entry, "crc32", str), "crc32")


def _file_name(name: str) -> str:
    return _matching(_FILE_NAME, name, "plain file name")
