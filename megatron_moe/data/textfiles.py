"""Reads documents from JSONL and plain text files, optionally compressed with gzip or Zstandard.

A byte order mark at the start of a file is ignored.
"""

import codecs
import gzip
import importlib
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Literal

from megatron_moe.config.exit_codes import DataProblem, EnvironmentProblem
from megatron_moe.data.files import open_atomically

TEXT_SEPARATOR = "<|endoftext|>"
"""Line that ends a document in a plain text file."""
Format = Literal["jsonl", "text"]
_CHUNK_BYTES = 1 << 20
_PACKED_BYTES = 1 << 14
"""Number of compressed bytes per read. The number is small because text may decompress to many times its size."""


def format_of(path: Path) -> Format:
    """Format of a file, from its name without compression suffix: `.txt` is plain text, all other names are JSONL."""
    name = path.with_suffix("") if path.suffix in (".gz", ".zst") else path
    return "text" if name.suffix == ".txt" else "jsonl"


@dataclass(frozen=True)
class TextRecord:
    """One line of JSONL, or one document of plain text."""

    path: Path
    line: int
    """Line number of the first line of the record, counted from 1."""
    content: bytes


@dataclass(frozen=True)
class TextChunk:
    """Consecutive records of one file, which one worker tokenizes."""

    records: list[TextRecord]
    file_bytes: int
    """Number of bytes read from the file, before decompression, for these records."""


class BadLine(ValueError):
    """Raised for an invalid document; the message is the reason, without file and line number."""


def parse_record(record: TextRecord, keys: Sequence[str]) -> list[str]:
    """Texts of a record: one per key for JSONL, a single one for plain text. Raises `BadLine` for an invalid record."""
    if format_of(record.path) == "text":
        return [_decoded(record.content)]
    line = _decoded(record.content)
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:  # invalid JSON, numbers with thousands of digits, deep nesting
        raise BadLine(f"not JSON ({error})") from error
    if not isinstance(entry, dict):
        raise BadLine("the line is not a JSON object")
    for key in keys:
        if key in entry and not isinstance(entry[key], str):
            raise BadLine(f'the value of the key "{key}" is not a JSON string')
        if key not in entry:
            raise BadLine(f'no text under the key "{key}" (the line has {", ".join(entry) or "no key"})')
        _check_surrogates(entry[key], key)
    return [entry[key] for key in keys]


def _check_surrogates(text: str, key: str) -> None:
    """Raises `BadLine` if the text has an unpaired surrogate (such as \\ud83d), which tokenizers cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = ascii(text[error.start])[1:-1]
        raise BadLine(f'unpaired surrogate {surrogate} at position {error.start} of the text under "{key}"') from error


def read_records(path: Path) -> Iterator[TextRecord]:
    """Yields the records of one file. Raises `DataProblem` if the file cannot be read completely."""
    for chunk in read_chunks(path):
        yield from chunk.records


def read_chunks(path: Path) -> Iterator[TextChunk]:
    """Yields the records of a file in chunks of about 1 MiB. Raises `DataProblem` if the file cannot be read fully."""
    with _opened(path) as (stream, file):
        records: list[TextRecord] = []
        size = before = 0
        for record in _split(path, stream):
            records.append(record)
            size += len(record.content)
            if size >= _CHUNK_BYTES:
                yield TextChunk(records, file.tell() - before)
                records, size, before = [], 0, file.tell()
        if records:
            yield TextChunk(records, file.tell() - before)


def _split(path: Path, stream: IO[bytes]) -> Iterator[TextRecord]:
    first = (line.removeprefix(codecs.BOM_UTF8) for line in islice(stream, 1))
    lines_of_file = enumerate(chain(first, stream), start=1)
    if format_of(path) == "jsonl":
        for number, line in lines_of_file:
            if line.strip():
                yield TextRecord(path, number, line)
        return
    begin, lines = 1, []
    for number, line in lines_of_file:
        if line.strip() != TEXT_SEPARATOR.encode():
            lines.append(line)
            continue
        yield TextRecord(path, begin, b"".join(lines))
        begin, lines = number + 1, []
    if lines:
        yield TextRecord(path, begin, b"".join(lines))


def read_documents(paths: Sequence[Path], key: str) -> Iterator[str]:
    """Yields the text of every document in the files. Raises `DataProblem` for an invalid document."""
    for path in paths:
        for record in read_records(path):
            try:
                yield parse_record(record, [key])[0]
            except BadLine as error:
                raise DataProblem(f"{record.path}, line {record.line}: {error}") from error


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file atomically. Raises `EnvironmentProblem` if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_atomically(path) as file:
            file.write(content)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {path}: {error.strerror}; choose another output path") from error


def _decoded(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise BadLine(f"not UTF-8 (byte {error.start}: {error.reason})") from error


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Context manager that yields (decompressed stream, raw file). Raises `DataProblem` if reading fails."""
    zstandard: Any = optional_package("zstandard", "reading .zst files") if path.suffix == ".zst" else None
    damage: tuple[type[Exception], ...] = (EOFError, zlib.error)
    try:
        with open(path, "rb") as raw:
            if path.suffix == ".gz":
                yield io.BufferedReader(gzip.open(raw)), raw
            elif zstandard is not None:
                damage += (zstandard.ZstdError,)
                yield io.BufferedReader(_Joined(_decompressed(zstandard, raw)), _CHUNK_BYTES), raw
            else:
                yield raw, raw
    except OSError as error:
        raise DataProblem(f"cannot read {path}: {error.strerror or error}; check --input") from error
    except damage as error:
        raise DataProblem(f"{path} is damaged or truncated ({error}); copy it again") from error


def _decompressed(zstandard: Any, raw: IO[bytes]) -> Iterator[bytes]:
    """Yields the decompressed data of a .zst file. zstandard's own reader does not detect truncated files."""
    frame = None
    while data := raw.read(_PACKED_BYTES):
        while data:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(data)
            data = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the last frame is incomplete")


class _Joined(io.RawIOBase):
    """File object that reads the concatenated byte strings of an iterator."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


def optional_package(name: str, purpose: str) -> Any:
    """Imports and returns a package. Raises `EnvironmentProblem` if the package is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise EnvironmentProblem(f"{purpose} needs the package {name} ({error}); run pip install {name}") from error
