"""Tensors as boxes, and boxes as bytes of safetensors files.

What a rank holds of a tensor is one or more boxes of the global tensor. The same description serves both ways: saving
reads the boxes, loading fills them from whatever boxes the checkpoint has.
"""

import errno
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_moe.checkpoint.bounded_read import open_regular
from megatron_moe.checkpoint.manifest import (
    CorruptCheckpoint,
    FileEntry,
    TensorEntry,
    TensorPiece,
    checksum,
)
from megatron_moe.checkpoint.storage import Storage
from megatron_moe.parallel import param_meta

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
_HEADER_ALIGN = 8
_CHUNK_BYTES = 1 << 24
_READ_BYTES = 1 << 20
_DIGEST_BYTES = 8
_LEAST_BYTES = 1 << 27
"""Fewer are not worth a thread."""
_MOST_THREADS = 3


@dataclass(frozen=True)
class TensorBox:
    """A block of a tensor that this rank holds."""

    offset: tuple[int, ...]
    """Where it begins in the global tensor."""
    data: Tensor
    """Its values; loading writes into it."""

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def values(self) -> Tensor:
        """What saving writes."""
        return self.data


@dataclass(frozen=True)
class PendingBox(TensorBox):
    """A block whose values are made when they are written, so that they need not fit in memory together. `data` stands
    on the meta device and tells shape and element type alone."""

    make: Callable[[], Tensor]

    def values(self) -> Tensor:
        made = self.make()
        assert (made.shape, made.dtype) == (self.data.shape, self.data.dtype), f"{made.shape} {made.dtype}: {self}"
        return made


@dataclass(frozen=True)
class SavedTensor:
    """What this rank holds of one tensor of a checkpoint."""

    shape: tuple[int, ...]
    """Of the global tensor. Experts are stacked along dim 0 by global id."""
    boxes: tuple[TensorBox, ...]

    @classmethod
    def whole(cls, data: Tensor) -> "SavedTensor":
        """A tensor that this rank holds completely."""
        return cls(tuple(data.shape), (TensorBox((0,) * data.dim(), data),))

    @classmethod
    def part(
        cls, shape: tuple[int, ...], boxes: Sequence[param_meta.ParamBox], dim: int, flat: Tensor, start: int = 0
    ) -> "SavedTensor":
        """Part of what this rank holds of a tensor of `shape`: elements of its local tensor, in row-major order.

        Args:
            boxes: of the whole tensor; the local tensor is their concatenation along `dim`.
            flat: [n], the elements `start` to `start + n` of the local tensor. The boxes become views of it.
        """
        size = list(boxes[0].size)
        if size:
            size[dim] = sum(box.size[dim] for box in boxes)
        found: list[TensorBox] = []
        done = 0
        for offset, block in _blocks(tuple(size), start, start + flat.numel()):
            data = flat[done : done + prod(block)].view(block)
            found += _placed(boxes, dim, offset, data) if block else [TensorBox((), data)]
            done += prod(block)
        return cls(shape, tuple(found))

    @property
    def dtype(self) -> torch.dtype:
        return self.boxes[0].data.dtype

    @property
    def num_bytes(self) -> int:
        return sum(box.num_bytes for box in self.boxes)


def _blocks(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, shape) of the blocks, one after the other, that make up the elements `start` to `end` in row-major
    order."""
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    while start < end:
        first, begin = divmod(start, row)
        whole_rows = 0 if begin else (end - start) // row
        if whole_rows:
            yield (first, *(0 for _ in shape[1:])), (whole_rows, *shape[1:])
            start += whole_rows * row
        else:
            stop = min(row, begin + end - start)
            for offset, size in _blocks(shape[1:], begin, stop):
                yield (first, *offset), (1, *size)
            start += stop - begin


def _placed(
    boxes: Sequence[param_meta.ParamBox], dim: int, offset: tuple[int, ...], data: Tensor
) -> Iterator[TensorBox]:
    """A block at `offset` in the concatenation of `boxes` along `dim`, as boxes of the whole tensor."""
    begin, end = offset[dim], offset[dim] + data.shape[dim]
    before = 0
    for box in boxes:
        lower, upper = max(begin, before), min(end, before + box.size[dim])
        if lower < upper:
            place = [o + p for o, p in zip(box.offset, offset, strict=True)]
            place[dim] = box.offset[dim] + lower - before
            yield TensorBox(tuple(place), data.narrow(dim, lower - begin, upper - lower))
        before += box.size[dim]


def in_parts(tensors: Mapping[str, SavedTensor]) -> list[dict[str, SavedTensor]]:
    """The tensors dealt out to threads that work at the same time, about the same number of bytes to each.

    A single part when there is little to do, or when values are yet to be made, which takes memory; none when there are
    no tensors.
    """
    num_parts = min(_MOST_THREADS, total_bytes(tensors) // _LEAST_BYTES, len(tensors))
    if num_parts < 2 or any(isinstance(box, PendingBox) for tensor in tensors.values() for box in tensor.boxes):
        return [dict(tensors)] if tensors else []
    parts: list[dict[str, SavedTensor]] = [{} for _ in range(num_parts)]
    sizes = [0] * num_parts
    for key, tensor in sorted(tensors.items(), key=lambda item: -item[1].num_bytes):
        smallest = sizes.index(min(sizes))
        parts[smallest][key] = tensor
        sizes[smallest] += tensor.num_bytes
    return parts


def digest(*facts: object) -> bytes:
    """Eight bytes that stand for the facts, to be compared between ranks."""
    return hashlib.blake2b(repr(facts).encode(), digest_size=_DIGEST_BYTES).digest()


def split_digests(joined: bytes) -> list[bytes]:
    return [joined[i : i + _DIGEST_BYTES] for i in range(0, len(joined), _DIGEST_BYTES)]


def tensor_key(kind: str, name: str) -> str:
    """The name of a tensor in a checkpoint: kind is "model" for weights and buffers, else a kind of optimizer state."""
    return f"{kind}.{name}"


def is_weight(key: str) -> bool:
    return key.startswith("model.")


def dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, known in TORCH_DTYPES.items() if known == dtype)


@dataclass(frozen=True)
class _Stored:
    """One box on its way into a file."""

    key: str
    tensor: SavedTensor
    box: TensorBox
    label: str
    """Name in the safetensors header."""


def write_tensors(
    storage: Storage, path: Path, tensors: Mapping[str, SavedTensor], given_up: Callable[[], bool] = lambda: False
) -> tuple[dict[str, FileEntry], dict[str, TensorEntry]]:
    """Writes a safetensors file, one tensor at a time in host memory.

    Returns the file's entry by its name, and those of its tensors, with the pieces in this file only.

    Raises:
        OSError: it cannot be written, or was `given_up` before it was complete.
    """
    stored = [
        _Stored(key, tensor, box, _label(key, tensor, box)) for key, tensor in tensors.items() for box in tensor.boxes
    ]
    # Wide elements first, so that every tensor is aligned to its element size.
    stored.sort(key=lambda item: -item.box.data.element_size())
    header = _header(stored)
    checksums: list[str] = []

    def chunks() -> Iterator[bytes | memoryview]:
        yield header
        for item in stored:
            if given_up():
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            data = bytes_of(item.box.values())
            checksums.append(checksum(data))
            yield data

    storage.write_file(path, chunks())
    pieces: dict[str, list[TensorPiece]] = {}
    start = len(header)
    for item, crc32 in zip(stored, checksums, strict=True):
        piece = TensorPiece(path.name, start, item.box.offset, tuple(item.box.data.shape), crc32)
        pieces.setdefault(item.key, []).append(piece)
        start += item.box.num_bytes
    entries = {
        key: TensorEntry(dtype_name(tensors[key].dtype), tensors[key].shape, tuple(boxes))
        for key, boxes in pieces.items()
    }
    return {path.name: FileEntry(size=start, head=len(header), crc32=checksum(header))}, entries


def _label(key: str, tensor: SavedTensor, box: TensorBox) -> str:
    """Weights carry their global name, so that any reader of safetensors finds them."""
    name = key.removeprefix("model.")
    if tuple(box.data.shape) == tensor.shape:
        return name
    return f"{name}@{','.join(map(str, box.offset))}"


def _header(stored: Sequence[_Stored]) -> bytes:
    labels = [item.label for item in stored]
    assert len(set(labels)) == len(labels), f"twice in one file: {sorted(labels)}"
    return safetensors_header({item.label: item.box.data for item in stored})


def safetensors_header(tensors: Mapping[str, Tensor]) -> bytes:
    """The head of a safetensors file whose data follow in this order. Of the tensors only shape and type are used."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for label, tensor in tensors.items():
        end = begin + tensor.numel() * tensor.element_size()
        table[label] = {
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGN)
    return len(text).to_bytes(8, "little") + text


def bytes_of(data: Tensor) -> memoryview:
    """The elements in row-major order, on the host."""
    flat = data.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


class FileReader:
    """Reads ranges of the files of one checkpoint folder; of a damaged one it raises Corrupt."""

    def __init__(self, folder: Path, files: Mapping[str, FileEntry]) -> None:
        self._folder = folder
        self._files = files
        self._scratch = torch.empty(0, dtype=torch.uint8)
        """Memory that was used before is read into several times as fast."""

    def check_sizes(self) -> None:
        """Every file is there and as long as the manifest says."""
        for name, entry in self._files.items():
            try:
                size = os.stat(self._folder / name).st_size
            except OSError as error:
                raise CorruptCheckpoint(f"{name}: {error.strerror}") from error
            if size != entry.size:
                raise CorruptCheckpoint(f"{name}: {size} bytes, the manifest says {entry.size}")

    def head(self, name: str) -> bytes:
        """The verified head of a file: all of a text file."""
        entry = self._files.get(name)
        if entry is None:
            raise CorruptCheckpoint(f"{name}: not in the manifest")
        data = bytearray(entry.head)
        self._read(name, 0, memoryview(data), entry.crc32, "head")
        return bytes(data)

    def piece(self, key: str, entry: TensorEntry, piece: TensorPiece, place: Tensor | None = None) -> Tensor:
        """One box of a tensor in host memory.

        `place`: where it is read to, contiguous and of its shape and type. None: into memory of the reader, which the
        next piece overwrites. When the piece is damaged, what is there afterwards is undefined.
        """
        if place is None:
            place = self._room(entry.num_bytes(piece)).view(TORCH_DTYPES[entry.dtype]).view(piece.shape)
        self._read(piece.file, piece.start, bytes_of(place), piece.crc32, key)
        return place

    def check(self, name: str, start: int, size: int, crc32: str, what: str) -> None:
        """Verifies a range of a file without holding more than some megabytes of it. Raises Corrupt."""
        found, left = 0, size
        try:
            with open_regular(self._folder / name) as file:
                file.seek(start)
                while chunk := file.read(min(left, _CHUNK_BYTES)):
                    found, left = zlib.crc32(chunk, found), left - len(chunk)
        except OSError as error:
            raise CorruptCheckpoint(f"{name}: {error.strerror}") from error
        if left:
            raise CorruptCheckpoint(f"{name}: {what}: only {size - left} of {size} bytes at byte {start}")
        if f"{found:08x}" != crc32:
            raise CorruptCheckpoint(
                f"{name}: {what}: crc32 is {found:08x}, {crc32} was written (byte {start} on, {size} bytes)"
            )

    def mapped(self, entry: TensorEntry, piece: TensorPiece) -> Tensor:
        """One box of a tensor as a view of the file, which must have been verified; only what is used is read."""
        dtype = TORCH_DTYPES[entry.dtype]
        if not prod(piece.shape):
            return torch.empty(piece.shape, dtype=dtype)
        size = os.stat(self._folder / piece.file).st_size
        stored = torch.from_file(str(self._folder / piece.file), shared=False, size=size, dtype=torch.uint8)
        return stored[piece.start : piece.start + entry.num_bytes(piece)].view(dtype).view(piece.shape)

    def _room(self, num_bytes: int) -> Tensor:
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch[:num_bytes]

    def _read(self, name: str, start: int, data: memoryview, crc32: str, what: str) -> None:
        """Fills `data`; by parts, whose checksums are computed while they are in the cache."""
        num_read = found = 0
        try:
            with open_regular(self._folder / name) as file:
                file.seek(start)
                while count := file.readinto(data[num_read : num_read + _READ_BYTES]):
                    found = zlib.crc32(data[num_read : num_read + count], found)
                    num_read += count
        except OSError as error:
            raise CorruptCheckpoint(f"{name}: {error.strerror}") from error
        if num_read != len(data):
            raise CorruptCheckpoint(f"{name}: {what}: only {num_read} of {len(data)} bytes at byte {start}")
        if f"{found:08x}" != crc32:
            raise CorruptCheckpoint(f"{name}: {what}: crc32 is {found:08x}, {crc32} was written")


def fill(target: SavedTensor, entry: TensorEntry, read: Callable[[TensorPiece, Tensor | None], Tensor]) -> None:
    """Fills the boxes of `target` from the pieces of a saved tensor that overlap them, casting to their dtype.

    `read` gets a piece, and the place where it belongs if it may be read straight to there. Returns the values.
    """
    for piece in entry.pieces:
        overlaps = [(box, found) for box in target.boxes if (found := _intersection(box, piece))]
        if not overlaps:
            continue
        parts = [(box.data[_slices(found, box.offset)], _slices(found, piece.offset)) for box, found in overlaps]
        place = parts[0][0]
        straight = len(parts) == 1 and _fits(place, piece.shape, entry.dtype)
        data = read(piece, place if straight else None)
        if data is not place:
            for into, out_of in parts:
                into.copy_(data[out_of])


def _slices(block: tuple[tuple[int, ...], tuple[int, ...]], offset: tuple[int, ...]) -> tuple[slice, ...]:
    """A (begin, end) of the global tensor, inside of what begins at `offset`."""
    return tuple(slice(begin - o, end - o) for begin, end, o in zip(*block, offset, strict=True))


def _fits(place: Tensor, shape: tuple[int, ...], dtype: str) -> bool:
    """Bytes of a file may be read to here."""
    same = tuple(place.shape) == shape and place.dtype == TORCH_DTYPES[dtype]
    return same and place.device.type == "cpu" and place.is_contiguous()


def overlaps(tensor: SavedTensor, piece: TensorPiece) -> bool:
    """Some element is in both."""
    return any(_intersection(box, piece) for box in tensor.boxes)


def _intersection(box: TensorBox, piece: TensorPiece) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    return intersection(box.offset, tuple(box.data.shape), piece.offset, piece.shape)


def intersection(
    offset: tuple[int, ...], shape: tuple[int, ...], other_offset: tuple[int, ...], other_shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(begin, end) in the global tensor of what two blocks share; None when nothing."""
    begin = tuple(max(a, b) for a, b in zip(offset, other_offset, strict=True))
    ends = zip(offset, shape, other_offset, other_shape, strict=True)
    end = tuple(min(a + n, b + m) for a, n, b, m in ends)
    return (begin, end) if all(b < e for b, e in zip(begin, end, strict=True)) else None


def total_bytes(tensors: Mapping[str, SavedTensor]) -> int:
    return sum(tensor.num_bytes for tensor in tensors.values())
