"""Reading and writing of Megatron's token files `<prefix>.bin` and `<prefix>.idx`.

`.bin` holds the tokens of all sequences one after the other, in one dtype, without a header. `.idx` (little endian):

    offset        size  content
    0             9     magic
    9             8     u64 version = 1
    17            1     u8 dtype code
    18            8     u64 S, number of sequences
    26            8     u64 D, number of document boundaries
    34            4 S   int32 tokens of every sequence
    34 + 4 S      8 S   int64 byte offset of every sequence in .bin
    34 + 12 S     8 D   int64 document boundaries as sequence numbers, from 0 to S

`IndexedTokens` validates the complete index when it opens the files, so a run with damaged files fails at its start.
"""

import fcntl
import os
import re
import zlib
from array import array
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import numpy as np

from megatron_moe.config.data import INDEX_HEADER as HEADER
from megatron_moe.config.exit_codes import DataProblem, EnvironmentProblem
from megatron_moe.data.cache import crc32_of

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES: Mapping[int, np.dtype] = MappingProxyType(
    dict(enumerate(map(np.dtype, ("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2")), start=1))
)
"""Dtype code in the .idx file -> numpy dtype."""
_SAMPLED_BLOCKS = 64
_BLOCK_BYTES = 4096


def token_dtype(vocab_size: int) -> np.dtype:
    """Dtype in which Megatron's tools store the token ids of a vocabulary of `vocab_size`."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class IndexedTokens:
    """Sequences of one `<prefix>.bin/.idx` pair.

    `sequence_lengths` is in tokens, int32 [S]; `document_bounds` are sequence numbers, int64 [D]. Raises `DataProblem`
    if a file is missing or the index is invalid.
    """

    def __init__(self, prefix: str | Path, *, mmap: bool = True) -> None:
        self.prefix = str(prefix)
        self.bin_path = Path(f"{prefix}.bin")
        self.idx_path = Path(f"{prefix}.idx")
        for path in (self.idx_path, self.bin_path):
            if not os.path.isfile(path):  # False also for a name that is too long, such as a quoted blend
                raise DataProblem(
                    f"data file {path} does not exist: --data-path takes the common prefix of a .bin and an .idx file, "
                    f"as written by tools/preprocess_data.py"
                )
        index = _read_index(self.idx_path, mmap)
        self.dtype, self.sequence_lengths, self._pointers, self.document_bounds = index
        self._bin_size = self.bin_path.stat().st_size
        expected = int(self.sequence_lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        if self._bin_size != expected:
            described = f"{expected:,} ({len(self):,} sequences of {self.dtype.name})"
            raise _damaged(self.bin_path, f"{self._bin_size:,} bytes, but {self.idx_path.name} describes {described}")
        self._map: np.ndarray | None = None
        self._file: int | None = None
        if mmap and self._bin_size:
            self._map = _map(self.bin_path)
        else:
            self._file = os.open(self.bin_path, os.O_RDONLY)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    @property
    def num_tokens(self) -> int:
        return self._bin_size // self.dtype.itemsize

    @property
    def identity(self) -> dict[str, str | int]:
        """Properties by which the index cache detects that the data at the path was replaced."""
        return {
            "dtype": self.dtype.name,
            "sequences": len(self),
            "bytes": self._bin_size,
            "lengths_crc32": crc32_of(self.sequence_lengths),
        }

    def sample_content(self) -> str:
        """Text with the size of .bin and the crc32 of 64 evenly spaced 4 KiB blocks, to detect a replaced file."""
        blocks = min(_SAMPLED_BLOCKS, -(-self._bin_size // _BLOCK_BYTES))
        last = max(self._bin_size - _BLOCK_BYTES, 0)
        crc32 = 0
        with open(self.bin_path, "rb") as file:
            for block in range(blocks):
                start = block * last // max(blocks - 1, 1)
                crc32 = zlib.crc32(self._read(file.fileno(), start, min(_BLOCK_BYTES, self._bin_size - start)), crc32)
        return f"{self._bin_size} bytes, sampled crc32 {crc32:08x}"

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens [offset, offset + length) of a sequence, or from offset to its end if `length` is None. Read-only, in
        the stored dtype."""
        total = int(self.sequence_lengths[sequence])
        count = total - offset if length is None else length
        assert 0 <= offset and 0 <= count and offset + count <= total, f"{sequence=} {offset=} {length=} {total=}"
        start = int(self._pointers[sequence]) + offset * self.dtype.itemsize
        size = count * self.dtype.itemsize
        if self._map is not None:
            return self._map[start : start + size].view(self.dtype)
        assert self._file is not None
        return np.frombuffer(self._read(self._file, start, size), dtype=self.dtype)

    def close(self) -> None:
        self._map = None
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()

    def _read(self, file: int, start: int, size: int) -> bytes:
        """Reads exactly `size` bytes with repeated `pread` calls; thread-safe."""
        parts = []
        while size > 0:
            part = os.pread(file, size, start)
            if not part:
                raise _damaged(self.bin_path, f"ends at byte {start}, where {size} more bytes should be")
            parts.append(part)
            start += len(part)
            size -= len(part)
        return b"".join(parts)


def _map(path: Path) -> np.ndarray:
    # A plain array, because slicing the memmap subclass costs microseconds.
    return np.asarray(np.memmap(path, mode="r", dtype=np.uint8))


def _damaged(path: Path, what: str) -> DataProblem:
    return DataProblem(f"{path}: {what}; make the pair of files again with tools/preprocess_data.py, or copy it again")


def _read_index(path: Path, mmap: bool) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Reads and validates an index. Returns token dtype, lengths [S], byte offsets [S] and document bounds [D]."""
    size = path.stat().st_size
    if size < HEADER.size:
        raise _damaged(path, f"{size} bytes, at offset 0 a header of {HEADER.size} is expected")
    raw = _map(path) if mmap else np.fromfile(path, dtype=np.uint8)
    magic, version, code, num_sequences, num_bounds = HEADER.unpack(raw[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise _damaged(path, f"no index of this format: offset 0 holds {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise _damaged(path, f"version {version} at offset 9, expected {VERSION}")
    dtype = DTYPES.get(code)
    if dtype is None:
        raise _damaged(path, f"dtype code {code} at offset 17, expected 1 to 8")
    if dtype.kind == "f":
        raise _damaged(path, f"dtype code {code} ({dtype.name}) at offset 17, but token ids are integers")
    expected = HEADER.size + 12 * num_sequences + 8 * num_bounds
    if size != expected:
        multimodal = ": it has the modes of multimodal data" if size == expected + num_sequences else ""
        raise _damaged(
            path,
            f"{size:,} bytes, but the header (offsets 18 and 26: {num_sequences:,} sequences, {num_bounds:,} document "
            f"bounds) describes {expected:,}{multimodal}",
        )
    at_pointers = HEADER.size + 4 * num_sequences
    at_bounds = at_pointers + 8 * num_sequences
    lengths = raw[HEADER.size : at_pointers].view("<i4")
    pointers = raw[at_pointers:at_bounds].view("<i8")
    bounds = raw[at_bounds:].view("<i8")
    _check_lengths(path, lengths, pointers, dtype.itemsize)
    _check_bounds(path, bounds, num_sequences, at_bounds)
    return dtype, lengths, pointers, bounds


def _check_lengths(path: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int) -> None:
    """Checks that lengths are not negative and that `pointers` are the byte offsets computed from the lengths."""
    negative = lengths < 0
    if negative.any():
        first = int(negative.argmax())
        offset = HEADER.size + 4 * first
        raise _damaged(path, f"length {lengths[first]} of sequence {first} at offset {offset}, expected 0 or more")
    expected = _byte_offsets(lengths, itemsize)
    wrong = pointers != expected
    if wrong.any():
        first = int(wrong.argmax())
        offset = HEADER.size + 4 * len(lengths) + 8 * first
        found, wanted = pointers[first], expected[first]
        raise _damaged(path, f"sequence {first} points to byte {found} (offset {offset}), expected {wanted}")


def _byte_offsets(lengths: np.ndarray, itemsize: int) -> np.ndarray:
    """Byte offset in .bin of every sequence, int64 [S]."""
    offsets = np.zeros(len(lengths), dtype="<i8")
    np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
    return offsets * itemsize


def _check_bounds(path: Path, bounds: np.ndarray, num_sequences: int, offset: int) -> None:
    """Checks that document bounds start at 0, never decrease, and end at the number of sequences."""
    if len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != num_sequences:
        ends = f"{bounds[0]} to {bounds[-1]}" if len(bounds) else "nothing"
        raise _damaged(path, f"document bounds at offset {offset} span {ends}, expected 0 to {num_sequences}")
    falling = np.diff(bounds) < 0
    if falling.any():
        first = int(falling.argmax()) + 1
        found = f"document bound {first} at offset {offset + 8 * first} is {bounds[first]}"
        raise _damaged(path, f"{found}, expected at least {bounds[first - 1]}, the one before")


def unfinished_files(prefix: str | Path) -> list[Path]:
    """Temporary files of `prefix` from `IndexedWriter`s in other processes. Removes the files of processes that have
    ended, which is the case if no process on this host has the process id in the name and no process on any host holds
    the lock on the file."""
    path = Path(prefix)
    pattern = rf"{re.escape(path.name)}\.(bin|idx)\.writing-(\d+)"
    found = [(each, re.fullmatch(pattern, each.name)) for each in sorted(path.parent.glob("*.writing-*"))]
    others = [(each, int(match[2])) for each, match in found if match and int(match[2]) != os.getpid()]
    return [each for each, pid in others if not _remove_stale(each, pid)]


def _remove_stale(path: Path, pid: int) -> bool:
    """Removes a temporary file whose process has ended; returns False if it may be running."""
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            with suppress(OSError), open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                path.unlink()
                return True
    return False


class IndexedWriter:
    """Context manager that writes a `.bin/.idx` pair atomically.

    Files are written to temporary names and renamed at the end, or removed if an exception occurs. Raises
    `EnvironmentProblem` if a file cannot be created, and `DataProblem` if a token id does not fit the dtype.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype | type) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        assert self.dtype in DTYPES.values(), f"{dtype} has no code in the format"
        self._lengths = array("i")
        self._bounds = array("q", [0])
        self._aside = {suffix: Path(f"{prefix}{suffix}.writing-{os.getpid()}") for suffix in (".bin", ".idx")}
        try:
            Path(prefix).parent.mkdir(parents=True, exist_ok=True)
            self._bin = open(self._aside[".bin"], "wb")
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._bin, fcntl.LOCK_EX)
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot write {prefix}.bin: {error.strerror}; choose an output prefix in a folder you may write to"
            ) from error

    def add_sequence(self, tokens: np.ndarray | list[int]) -> None:
        """Appends one sequence of token ids to the current document."""
        given = np.asarray(tokens)
        stored = given.astype(self.dtype)
        if given.size and not np.array_equal(stored, given):
            raise DataProblem(
                f"token id {int(given[stored != given][0])} of sequence {len(self._lengths)} does not fit "
                f"{self.dtype.name}, the dtype of {self.prefix}.bin; the tokenizer's vocabulary size must cover its ids"
            )
        self._bin.write(stored.tobytes())
        self._lengths.append(len(stored))

    def end_document(self) -> None:
        """Ends the current document, which consists of the sequences added since the last call of this method."""
        self._bounds.append(len(self._lengths))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            # Closing fails again on a full disk, so temporary files are removed first.
            for path in self._aside.values():
                path.unlink(missing_ok=True)
            self._bin.close()

    def _commit(self) -> None:
        assert self._bounds[-1] == len(self._lengths), "end_document() was not called after the last sequence"
        lengths = np.asarray(self._lengths, dtype="<i4")
        pointers = _byte_offsets(lengths, self.dtype.itemsize)
        code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
        with open(self._aside[".idx"], "wb") as index:
            index.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(self._bounds)))
            for part in (lengths, pointers, np.asarray(self._bounds, dtype="<i8")):
                index.write(part.tobytes())
            index.flush()
            os.fsync(index.fileno())
        self._bin.flush()
        os.fsync(self._bin.fileno())
        # The old index is removed first and the new index renamed last, so that a .bin never has a wrong index.
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)
        for suffix, path in self._aside.items():
            os.replace(path, f"{self.prefix}{suffix}")
