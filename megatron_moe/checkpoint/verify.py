"""Reads every byte of a checkpoint and says what is wrong with it and where. Bounded memory, nothing is loaded."""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_moe.checkpoint.folder import as_checkpoint
from megatron_moe.checkpoint.format import MANIFEST, TRAIN_STATE, Corrupt, Manifest, TooNew, parse_json
from megatron_moe.checkpoint.load import read_manifest
from megatron_moe.checkpoint.shards import FileReader
from megatron_moe.specs.exitcodes import CheckpointProblem, listed

_SAFETENSORS = ".safetensors"


@dataclass(frozen=True)
class Examined:
    """What an examination found."""

    path: Path
    manifest: Manifest | None
    """None when it cannot be read; nothing else can be examined then."""
    problems: tuple[str, ...]
    """Each makes the checkpoint unusable."""
    remarks: tuple[str, ...]
    """What is odd and does no harm."""
    num_bytes: int
    """Verified."""

    @property
    def sound(self) -> bool:
        return not self.problems


def examine(path: Path) -> Examined:
    """Verifies one checkpoint folder, to its last byte, and goes on after each problem to find all."""
    try:
        manifest = read_manifest(path)
    except (Corrupt, TooNew) as problem:
        return Examined(path, None, (str(problem),), (), 0)
    problems: list[str] = []
    named = as_checkpoint(path)
    if named is not None and named.iteration != manifest.iteration:
        problems.append(f"{MANIFEST}: of iteration {manifest.iteration}, in the folder {path.name}")
    reader = FileReader(path, manifest.files)
    _note(problems, reader.check_sizes)
    num_bytes = _examine_files(reader, manifest, problems) + _examine_pieces(reader, manifest, problems)
    known = {MANIFEST, *manifest.files}
    remarks = tuple(f"{entry.name}: not in the manifest" for entry in sorted(path.iterdir()) if entry.name not in known)
    return Examined(path, manifest, tuple(dict.fromkeys(problems)), remarks, num_bytes)


def verify(path: Path) -> list[str]:
    """All that is wrong with a checkpoint; empty when every byte is as it was written."""
    return list(examine(path).problems)


def verified(path: Path) -> tuple[Manifest, FileReader]:
    """A checkpoint of which every byte has just been read and verified, to be read through `FileReader.mapped`.

    Raises CheckpointProblem with all that is wrong.
    """
    found = examine(path)
    if found.manifest is None or not found.sound:
        raise CheckpointProblem(f"checkpoint {path} is damaged and not used:\n  {listed(found.problems)}")
    return found.manifest, FileReader(path, found.manifest.files)


def _examine_files(reader: FileReader, manifest: Manifest, problems: list[str]) -> int:
    """Heads and texts. Returns the bytes read."""
    for name, entry in manifest.files.items():
        if not _note(problems, partial(reader.check, name, 0, entry.head, entry.crc32, "head")):
            continue
        if name.endswith(_SAFETENSORS):
            _note(problems, partial(_check_header, name, reader, manifest))
        elif name == TRAIN_STATE:
            _note(problems, partial(_check_text, name, reader))
    if TRAIN_STATE not in manifest.files:
        problems.append(f"{MANIFEST}: names no {TRAIN_STATE}")
    return sum(entry.head for entry in manifest.files.values())


def _examine_pieces(reader: FileReader, manifest: Manifest, problems: list[str]) -> int:
    num_bytes = 0
    for key, entry in manifest.tensors.items():
        for piece in entry.pieces:
            size = entry.num_bytes(piece)
            what = key if piece.shape == entry.shape else f"{key} at {list(piece.offset)}"
            _note(problems, partial(reader.check, piece.file, piece.start, size, piece.crc32, what))
            num_bytes += size
    return num_bytes


def _check_text(name: str, reader: FileReader) -> None:
    parse_json(reader.head(name), name)


def _check_header(name: str, reader: FileReader, manifest: Manifest) -> None:
    """The header of a safetensors file says of every piece what the manifest says. Raises Corrupt."""
    head = reader.head(name)
    (length,) = struct.unpack_from("<Q", head) if len(head) >= 8 else (0,)
    if length != len(head) - 8:
        raise Corrupt(f"{name}: header: its length is {length}, the manifest has room for {len(head) - 8}")
    table = parse_json(head[8:], name)
    table.pop("__metadata__", None)
    theirs = sorted(_place(entry, len(head)) for entry in table.values())
    ours = sorted(
        (piece.start, entry.dtype, list(piece.shape))
        for entry in manifest.tensors.values()
        for piece in entry.pieces
        if piece.file == name and 0 not in piece.shape
    )
    if [place for place in theirs if 0 not in place[2]] != ours:
        raise Corrupt(f"{name}: header: it does not describe the {len(ours)} pieces that the manifest has there")


def _place(entry: Any, head: int) -> tuple[int, str, list[int]]:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int()]}:
            return head + begin, dtype, shape
    raise Corrupt(f"a header has an entry of another form: {json.dumps(entry)[:80]}")


def _note(problems: list[str], look: Callable[[], object]) -> bool:
    """Keeps what the look found to be wrong; False when anything was."""
    try:
        look()
    except Corrupt as problem:
        problems.append(str(problem))
        return False
    return True


def sizes_by_kind(manifest: Manifest) -> Mapping[str, int]:
    """Bytes by kind of tensor: model, master, exp_avg."""
    sizes: dict[str, int] = {}
    for key, entry in manifest.tensors.items():
        kind = key.partition(".")[0]
        sizes[kind] = sizes.get(kind, 0) + sum(entry.num_bytes(piece) for piece in entry.pieces)
    return sizes
