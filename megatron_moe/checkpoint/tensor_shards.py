"""Shards of global tensors, and their storage in safetensors files.

A rank's shard of a tensor is one or more boxes (n-d slices). Saving writes the boxes. Loading fills them from the
overlapping boxes of a checkpoint, which may have been written with another parallel layout.
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

import torch
from torch import Tensor

from megatron_moe.checkpoint.manifest import (
    TORCH_DTYPES,
    CorruptCheckpoint,
    FileEntry,
    Manifest,
    TensorEntry,
    TensorPiece,
    checksum,
    read_manifest,
)
from megatron_moe.checkpoint.storage import Storage, open_regular
from megatron_moe.config import param_meta

FP8_AMAX_HISTORY = ".fp8_amax_history"
"""Suffix of the keys of amax histories, whose length is set by `--fp8-amax-history-len`."""
_HEADER_ALIGN = 8
_READ_BYTES = 1 << 20
_CHUNK_ELEMENTS = 1 << 22
_DIGEST_BYTES = 8
_MIN_BYTES_PER_THREAD = 1 << 27
_MAX_THREADS = 3


@dataclass(frozen=True)
class TensorBox:
    """Box (n-d slice) of a global tensor, with its values on this rank."""

    offset: tuple[int, ...]
    """Start index of the box in each dim of the global tensor."""
    data: Tensor
    """Values of the box. Loading writes into this tensor."""

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def values(self) -> Tensor:
        """Values to save."""
        return self.data


@dataclass(frozen=True)
class PendingBox(TensorBox):
    """A box whose values are computed by `make` when it is written, so that a model larger than memory can be saved.

    `data` is a meta tensor that only defines the shape and dtype of the box.
    """

    make: Callable[[], Tensor]

    def values(self) -> Tensor:
        made = self.make()
        assert (made.shape, made.dtype) == (self.data.shape, self.data.dtype), f"{made.shape} {made.dtype}: {self}"
        return made


@dataclass(frozen=True)
class TensorShard:
    """This rank's shard of one checkpoint tensor."""

    shape: tuple[int, ...]
    """Shape of the global tensor. Experts are stacked along dim 0 by global id."""
    boxes: tuple[TensorBox, ...]

    @classmethod
    def whole(cls, data: Tensor) -> "TensorShard":
        """Builds the shard of a rank that holds the entire tensor."""
        return cls(tuple(data.shape), (TensorBox((0,) * data.dim(), data),))

    @classmethod
    def part(
        cls, shape: tuple[int, ...], boxes: Sequence[param_meta.ParamBox], dim: int, flat: Tensor, start: int = 0
    ) -> "TensorShard":
        """Builds a shard from a flat range of the local tensor, e.g. the range that a distributed optimizer owns.

        Args:
            shape: shape of the global tensor.
            boxes: boxes of the global tensor whose concatenation along `dim` is the local tensor.
            flat: [n], elements `start` to `start + n` of the local tensor in row-major order. The shard views `flat`.
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
    """Splits a range of row-major indices of a tensor into rectangular blocks. Yields (offset, shape) of each block."""
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    while start < end:
        first, begin = divmod(start, row)
        num_rows = 0 if begin else (end - start) // row
        if num_rows:
            yield (first, *(0 for _ in shape[1:])), (num_rows, *shape[1:])
            start += num_rows * row
        else:
            stop = min(row, begin + end - start)
            for offset, size in _blocks(shape[1:], begin, stop):
                yield (first, *offset), (1, *size)
            start += stop - begin


def _placed(
    boxes: Sequence[param_meta.ParamBox], dim: int, offset: tuple[int, ...], data: Tensor
) -> Iterator[TensorBox]:
    """Splits `data`, a block that starts at index `offset` of the local tensor, into boxes of the global tensor.
    `boxes`, `dim`: see `TensorShard.part`."""
    begin, end = offset[dim], offset[dim] + data.shape[dim]
    before = 0
    for box in boxes:
        lower, upper = max(begin, before), min(end, before + box.size[dim])
        if lower < upper:
            place = [o + p for o, p in zip(box.offset, offset, strict=True)]
            place[dim] = box.offset[dim] + lower - before
            yield TensorBox(tuple(place), data.narrow(dim, lower - begin, upper - lower))
        before += box.size[dim]


def partition_tensors(tensors: Mapping[str, TensorShard]) -> list[dict[str, TensorShard]]:
    """Partitions the tensors into parts of similar size, one per I/O thread. Returns a single part if the tensors are
    small in total or, to limit memory, if any values are computed only when they are written (`PendingBox`)."""
    num_parts = min(_MAX_THREADS, total_bytes(tensors) // _MIN_BYTES_PER_THREAD, len(tensors))
    if num_parts < 2 or any(isinstance(box, PendingBox) for tensor in tensors.values() for box in tensor.boxes):
        return [dict(tensors)] if tensors else []
    parts: list[dict[str, TensorShard]] = [{} for _ in range(num_parts)]
    sizes = [0] * num_parts
    for key, tensor in sorted(tensors.items(), key=lambda item: -item[1].num_bytes):
        smallest = sizes.index(min(sizes))
        parts[smallest][key] = tensor
        sizes[smallest] += tensor.num_bytes
    return parts


def digest(*parts: object) -> bytes:
    """8-byte hash of `parts`. Ranks exchange hashes to compare tensor keys and boxes."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=_DIGEST_BYTES).digest()


def split_digests(joined: bytes) -> list[bytes]:
    return [joined[i : i + _DIGEST_BYTES] for i in range(0, len(joined), _DIGEST_BYTES)]


def tensor_key(kind: str, name: str) -> str:
    """Key of a tensor in a checkpoint. `kind`: "model" for weights and buffers, otherwise e.g. "exp_avg"."""
    return f"{kind}.{name}"


def is_weight(key: str) -> bool:
    return key.startswith("model.")


def is_scaling_state(key: str) -> bool:
    """True for the state of delayed FP8 scaling. A run can start without it, with scales of 1 and an empty history."""
    return key.endswith((".fp8_scales", FP8_AMAX_HISTORY))


def dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, known in TORCH_DTYPES.items() if known == dtype)


def write_tensors(
    storage: Storage, path: Path, tensors: Mapping[str, TensorShard], cancelled: Callable[[], bool] = lambda: False
) -> tuple[dict[str, FileEntry], dict[str, TensorEntry]]:
    """Writes the tensors to a safetensors file. Copies one box at a time to host memory.

    Returns the manifest entries of the file and of its tensors. A tensor's entry lists only the pieces in this file.

    Raises:
        OSError: the file cannot be written, or `cancelled` returned True.
    """
    boxes = [(key, box) for key, tensor in tensors.items() for box in tensor.boxes]
    # Wide elements first, so that every tensor is aligned to its element size.
    boxes.sort(key=lambda item: -item[1].data.element_size())
    labels = [_label(key, tensors[key], box) for key, box in boxes]
    assert len(set(labels)) == len(labels), f"duplicate names in one file: {sorted(labels)}"
    header = safetensors_header({label: box.data for label, (_, box) in zip(labels, boxes, strict=True)})
    checksums: list[str] = []

    def file_chunks() -> Iterator[bytes | memoryview]:
        yield header
        for _, box in boxes:
            if cancelled():
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            data = bytes_of(box.values())
            checksums.append(checksum(data))
            yield data

    storage.write_file(path, file_chunks())
    pieces: dict[str, list[TensorPiece]] = {}
    start = len(header)
    for (key, box), crc32 in zip(boxes, checksums, strict=True):
        piece = TensorPiece(path.name, start, box.offset, tuple(box.data.shape), crc32)
        pieces.setdefault(key, []).append(piece)
        start += box.num_bytes
    entries = {
        key: TensorEntry(dtype_name(tensors[key].dtype), tensors[key].shape, tuple(stored))
        for key, stored in pieces.items()
    }
    return {path.name: FileEntry(size=start, head=len(header), crc32=checksum(header))}, entries


def _label(key: str, tensor: TensorShard, box: TensorBox) -> str:
    """Name of a box in the safetensors header. A whole weight is named like its parameter, as other programs expect."""
    name = key.removeprefix("model.")
    if tuple(box.data.shape) == tensor.shape:
        return name
    return f"{name}@{','.join(map(str, box.offset))}"


def safetensors_header(tensors: Mapping[str, Tensor]) -> bytes:
    """Header of a safetensors file that stores the tensors in this order. Meta tensors are sufficient."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for label, tensor in tensors.items():
        end = begin + tensor.numel() * tensor.element_size()
        table[label] = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGN)
    return len(text).to_bytes(8, "little") + text


def bytes_of(data: Tensor) -> memoryview:
    """Row-major bytes of a tensor in host memory. Shares memory with contiguous CPU tensors."""
    flat = data.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


class CheckpointReader:
    """Reads and verifies byte ranges of one checkpoint folder. Raises CorruptCheckpoint if verification fails.

    Args:
        manifest: manifest of the folder. None means that the constructor reads the manifest and may also raise
        FormatTooNewError.
    """

    def __init__(self, folder: Path, manifest: Manifest | None = None) -> None:
        self.manifest = manifest or read_manifest(folder)
        self._folder = folder
        self._scratch = torch.empty(0, dtype=torch.uint8)
        """Reused scratch buffer, because reading into newly allocated memory is several times slower."""

    def check_sizes(self) -> None:
        """Raises CorruptCheckpoint if a file is missing or its size differs from the manifest's."""
        for name, entry in self.manifest.files.items():
            try:
                size = os.stat(self._folder / name).st_size
            except OSError as error:
                raise CorruptCheckpoint(f"{name}: {error.strerror}") from error
            if size != entry.size:
                raise CorruptCheckpoint(f"{name}: {size} bytes, the manifest says {entry.size}")

    def read_head(self, name: str) -> bytes:
        """Reads and verifies the header of a safetensors file, or all of a text file."""
        entry = self.manifest.files.get(name)
        if entry is None:
            raise CorruptCheckpoint(f"{name}: not in the manifest")
        data = bytearray(entry.head)
        self._read(name, 0, entry.head, entry.crc32, "head", memoryview(data))
        return bytes(data)

    def read_piece(self, key: str, piece: TensorPiece, out: Tensor | None = None) -> Tensor:
        """Reads and verifies one piece into host memory.

        Args:
            out: contiguous tensor of the piece's shape and dtype; its contents are undefined if the piece is corrupt.
                If None, returns a tensor in the reader's scratch memory, which the next call overwrites.
        """
        entry = self.manifest.tensors[key]
        num_bytes = entry.num_bytes(piece)
        if out is None:
            if self._scratch.numel() < num_bytes:
                self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
            out = self._scratch[:num_bytes].view(TORCH_DTYPES[entry.dtype]).view(piece.shape)
        self._read(piece.file, piece.start, num_bytes, piece.crc32, key, bytes_of(out))
        return out

    def verify_piece(self, key: str, piece: TensorPiece) -> None:
        """Verifies one piece without keeping its values. Raises CorruptCheckpoint if it is damaged."""
        entry = self.manifest.tensors[key]
        label = key if piece.shape == entry.shape else f"{key} at {list(piece.offset)}"
        self._read(piece.file, piece.start, entry.num_bytes(piece), piece.crc32, label)

    def mmap_piece(self, key: str, piece: TensorPiece) -> Tensor:
        """Memory-maps one piece without verifying it; call `verify_piece` first."""
        entry = self.manifest.tensors[key]
        dtype = TORCH_DTYPES[entry.dtype]
        if not prod(piece.shape):
            return torch.empty(piece.shape, dtype=dtype)
        size = os.stat(self._folder / piece.file).st_size
        stored = torch.from_file(str(self._folder / piece.file), shared=False, size=size, dtype=torch.uint8)
        return stored[piece.start : piece.start + entry.num_bytes(piece)].view(dtype).view(piece.shape)

    def _read(self, name: str, start: int, size: int, crc32: str, what: str, out: memoryview | None = None) -> None:
        """Verifies a byte range of a file and reads it into `out` if given, in chunks that fit in the CPU cache."""
        buffer = memoryview(bytearray(min(size, _READ_BYTES))) if out is None else out
        num_read = found = 0
        try:
            with open_regular(self._folder / name) as file:
                file.seek(start)
                while num_read < size:
                    begin = num_read if buffer is out else 0
                    chunk = buffer[begin : begin + min(_READ_BYTES, size - num_read)]
                    count = file.readinto(chunk)
                    if not count:
                        raise CorruptCheckpoint(f"{name}: {what}: only {num_read} of {size} bytes at byte {start}")
                    found = zlib.crc32(chunk[:count], found)
                    num_read += count
        except OSError as error:
            raise CorruptCheckpoint(f"{name}: {error.strerror}") from error
        if f"{found:08x}" != crc32:
            raise CorruptCheckpoint(
                f"{name}: {what}: crc32 is {found:08x}, expected {crc32} ({size} bytes from byte {start})"
            )


def fill_shard(target: TensorShard, entry: TensorEntry, read: Callable[[TensorPiece, Tensor | None], Tensor]) -> None:
    """Fills the boxes of `target` from the overlapping pieces of a saved tensor. Values are cast to the boxes' dtype.

    `read(piece, out)` returns the values of a piece. `out` is the destination tensor if the piece can be read into it
    directly, otherwise None.
    """
    for piece in entry.pieces:
        common = [(box, found) for box in target.boxes if (found := _intersection(box, piece))]
        if not common:
            continue
        copies = [
            (box.data[block_slices(found, box.offset)], block_slices(found, piece.offset)) for box, found in common
        ]
        out = copies[0][0]
        direct = len(copies) == 1 and _reads_directly(out, piece.shape, entry.dtype)
        data = read(piece, out if direct else None)
        if data is not out:
            for destination, source in copies:
                destination.copy_(data[source])


def block_slices(block: tuple[tuple[int, ...], tuple[int, ...]], offset: tuple[int, ...]) -> tuple[slice, ...]:
    """Slices that select `block` from a box. `block`: (begin, end) in global indices; `offset`: start of the box."""
    return tuple(slice(begin - o, end - o) for begin, end, o in zip(*block, offset, strict=True))


def _reads_directly(out: Tensor, shape: tuple[int, ...], dtype: str) -> bool:
    """True if a stored piece of this shape and dtype can be read into `out` without an intermediate copy."""
    same = tuple(out.shape) == shape and out.dtype == TORCH_DTYPES[dtype]
    return same and out.device.type == "cpu" and out.is_contiguous()


def overlaps(tensor: TensorShard, piece: TensorPiece) -> bool:
    """True if any box of the shard overlaps the piece."""
    return any(_intersection(box, piece) for box in tensor.boxes)


def _intersection(box: TensorBox, piece: TensorPiece) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    return intersection(box.offset, tuple(box.data.shape), piece.offset, piece.shape)


def intersection(
    offset: tuple[int, ...], shape: tuple[int, ...], other_offset: tuple[int, ...], other_shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Intersection of two boxes of a tensor as (begin, end) index tuples; None if they do not overlap."""
    begin = tuple(max(a, b) for a, b in zip(offset, other_offset, strict=True))
    ends = zip(offset, shape, other_offset, other_shape, strict=True)
    end = tuple(min(a + n, b + m) for a, n, b, m in ends)
    return (begin, end) if all(b < e for b, e in zip(begin, end, strict=True)) else None


def float64_chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the elements of a tensor in row-major order, as 1-d fp64 chunks of at most 32 MiB."""
    for chunk in tensor.reshape(-1).split(_CHUNK_ELEMENTS):
        yield chunk.double()


def total_bytes(tensors: Mapping[str, TensorShard]) -> int:
    return sum(tensor.num_bytes for tensor in tensors.values())
