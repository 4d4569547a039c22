"""Reads every byte of a checkpoint and says what is wrong with it and where. Bounded memory, nothing is loaded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_moe.checkpoint.directory import as_checkpoint
from megatron_moe.checkpoint.load import CheckState, read_manifest
from megatron_moe.checkpoint.manifest import (
    MANIFEST,
    SAFETENSORS,
    TRAIN_STATE,
    CorruptCheckpoint,
    Manifest,
    NewerFormat,
    Place,
    check_header,
    parse_json,
    places_by_file,
)
from megatron_moe.checkpoint.tensor_shards import FileReader
from megatron_moe.config.exit_codes import CheckpointProblem, listed


@dataclass(frozen=True)
class VerifiedCheckpoint:
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


def examine_checkpoint(path: Path, check_state: CheckState | None = None) -> VerifiedCheckpoint:
    """Verifies one checkpoint folder, to its last byte, and goes on after each problem to find all.

    `check_state` validates the content of train_state.json.
    """
    try:
        manifest = read_manifest(path)
    except (CorruptCheckpoint, NewerFormat) as problem:
        return VerifiedCheckpoint(path, None, (str(problem),), (), 0)
    problems: list[str] = []
    named = as_checkpoint(path)
    if named is not None and named.iteration != manifest.iteration:
        problems.append(f"{MANIFEST}: of iteration {manifest.iteration}, in the folder {path.name}")
    reader = FileReader(path, manifest.files)
    _note(problems, reader.check_sizes)
    num_bytes = _examine_files(reader, manifest, problems, check_state) + _examine_pieces(reader, manifest, problems)
    known = {MANIFEST, *manifest.files}
    remarks = tuple(f"{entry.name}: not in the manifest" for entry in sorted(path.iterdir()) if entry.name not in known)
    return VerifiedCheckpoint(path, manifest, tuple(dict.fromkeys(problems)), remarks, num_bytes)


def verify(path: Path) -> list[str]:
    """All that is wrong with a checkpoint; empty when every byte is as it was written."""
    return list(examine_checkpoint(path).problems)


def verified(path: Path) -> tuple[Manifest, FileReader]:
    """A checkpoint of which every byte has just been read and verified, to be read through `FileReader.mapped`.

    Raises CheckpointProblem with all that is wrong.
    """
    found = examine_checkpoint(path)
    if found.manifest is None or not found.sound:
        raise CheckpointProblem(f"checkpoint {path} is damaged and not used:\n  {listed(found.problems)}")
    return found.manifest, FileReader(path, found.manifest.files)


def _examine_files(reader: FileReader, manifest: Manifest, problems: list[str], check_state: CheckState | None) -> int:
    """Heads and texts. Returns the bytes read."""
    places = places_by_file(manifest)
    for name, entry in manifest.files.items():
        if not _note(problems, partial(reader.check, name, 0, entry.head, entry.crc32, "head")):
            continue
        if name.endswith(SAFETENSORS):
            _note(problems, partial(_check_header, name, reader, places.get(name, [])))
        elif name == TRAIN_STATE:
            _note(problems, partial(_check_text, name, reader, manifest.iteration, check_state))
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


def _check_header(name: str, reader: FileReader, places: Sequence[Place]) -> None:
    check_header(name, reader.head(name), places)


def _check_text(name: str, reader: FileReader, iteration: int, check_state: CheckState | None) -> None:
    content = parse_json(reader.head(name), name)
    if check_state is not None:
        check_state(content, iteration)


def _note(problems: list[str], look: Callable[[], object]) -> bool:
    """Keeps what the look found to be wrong; False when anything was."""
    try:
        look()
    except CorruptCheckpoint as problem:
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
