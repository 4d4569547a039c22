"""Full verification of a checkpoint, in bounded memory, without loading it into a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch

from megatron_moe.checkpoint.directory import as_checkpoint
from megatron_moe.checkpoint.load import CheckState, read_manifest
from megatron_moe.checkpoint.manifest import (
    MANIFEST,
    SAFETENSORS,
    TRAIN_STATE,
    CorruptCheckpoint,
    Extent,
    Manifest,
    NewerFormat,
    TensorEntry,
    TensorPiece,
    check_header,
    extents_by_file,
    parse_json,
)
from megatron_moe.checkpoint.tensor_shards import TORCH_DTYPES, FileReader, float64_chunks
from megatron_moe.config.exit_codes import CheckpointProblem, listed


@dataclass(frozen=True)
class VerificationReport:
    """Result of `verify_checkpoint`."""

    path: Path
    manifest: Manifest | None
    """None if it cannot be read; nothing else was verified then."""
    problems: tuple[str, ...]
    """Errors, each of which makes the checkpoint unusable."""
    remarks: tuple[str, ...]
    """Harmless findings, such as unlisted files."""
    num_bytes: int
    """Number of bytes verified."""

    @property
    def valid(self) -> bool:
        return not self.problems


def verify_checkpoint(
    path: Path, check_state: CheckState | None = None, *, check_finite: bool = False
) -> VerificationReport:
    """Verifies every byte of a checkpoint folder and collects all problems.

    Args:
        check_state: validates the content of train_state.json.
        check_finite: also report tensors with NaN or infinite values.
    """
    try:
        manifest = read_manifest(path)
    except (CorruptCheckpoint, NewerFormat) as problem:
        return VerificationReport(path, None, (str(problem),), (), 0)
    problems: list[str] = []
    named = as_checkpoint(path)
    if named is not None and named.iteration != manifest.iteration:
        problems.append(f"{MANIFEST}: iteration {manifest.iteration} in the folder {path.name}")
    reader = FileReader(path, manifest.files)
    _collect(problems, reader.check_sizes)
    num_bytes = _verify_files(reader, manifest, problems, check_state)
    num_bytes += _verify_pieces(reader, manifest, problems, check_finite)
    known = {MANIFEST, *manifest.files}
    remarks = tuple(f"{entry.name}: not in the manifest" for entry in sorted(path.iterdir()) if entry.name not in known)
    return VerificationReport(path, manifest, tuple(dict.fromkeys(problems)), remarks, num_bytes)


def verify(path: Path) -> list[str]:
    """Lists all problems of a checkpoint; empty if every byte verifies."""
    return list(verify_checkpoint(path).problems)


def open_verified(path: Path) -> tuple[Manifest, FileReader]:
    """Verifies a checkpoint and opens it for `FileReader.mapped`. Raises CheckpointProblem that lists all problems."""
    report = verify_checkpoint(path)
    if report.manifest is None or not report.valid:
        raise CheckpointProblem(f"checkpoint {path} is damaged and not used:\n  {listed(report.problems)}")
    return report.manifest, FileReader(path, report.manifest.files)


def _verify_files(reader: FileReader, manifest: Manifest, problems: list[str], check_state: CheckState | None) -> int:
    """Verifies safetensors headers and text files. Returns the number of bytes."""
    extents = extents_by_file(manifest)
    for name, entry in manifest.files.items():
        if not _collect(problems, partial(reader.check, name, 0, entry.head, entry.crc32, "head")):
            continue
        if name.endswith(SAFETENSORS):
            _collect(problems, partial(_check_header, name, reader, extents.get(name, [])))
        elif name == TRAIN_STATE:
            _collect(problems, partial(_check_text, name, reader, manifest.iteration, check_state))
    if TRAIN_STATE not in manifest.files:
        problems.append(f"{MANIFEST}: lists no {TRAIN_STATE}")
    return sum(entry.head for entry in manifest.files.values())


def _verify_pieces(reader: FileReader, manifest: Manifest, problems: list[str], check_finite: bool) -> int:
    num_bytes = 0
    for key, entry in manifest.tensors.items():
        num_nonfinite = 0
        for piece in entry.pieces:
            size = entry.num_bytes(piece)
            label = key if piece.shape == entry.shape else f"{key} at {list(piece.offset)}"
            intact = _collect(problems, partial(reader.check, piece.file, piece.start, size, piece.crc32, label))
            if intact and check_finite:
                num_nonfinite += _count_nonfinite(reader, entry, piece)
            num_bytes += size
        if num_nonfinite:
            problems.append(f"{key}: {num_nonfinite} of {prod(entry.shape)} values are NaN or infinite")
    return num_bytes


def _count_nonfinite(reader: FileReader, entry: TensorEntry, piece: TensorPiece) -> int:
    if not TORCH_DTYPES[entry.dtype].is_floating_point:
        return 0
    chunks = float64_chunks(reader.mapped(entry, piece))
    return sum(chunk.numel() - int(torch.isfinite(chunk).sum()) for chunk in chunks)


def _check_header(name: str, reader: FileReader, extents: Sequence[Extent]) -> None:
    check_header(name, reader.head(name), extents)


def _check_text(name: str, reader: FileReader, iteration: int, check_state: CheckState | None) -> None:
    content = parse_json(reader.head(name), name)
    if check_state is not None:
        check_state(content, iteration)


def _collect(problems: list[str], check: Callable[[], object]) -> bool:
    """Runs a check and appends its CorruptCheckpoint error to `problems`. Returns True if it passed."""
    try:
        check()
    except CorruptCheckpoint as problem:
        problems.append(str(problem))
        return False
    return True


def sizes_by_kind(manifest: Manifest) -> Mapping[str, int]:
    """Bytes by kind of tensor ("model", "master", "exp_avg", ...)."""
    sizes: dict[str, int] = {}
    for key, entry in manifest.tensors.items():
        kind = key.partition(".")[0]
        sizes[kind] = sizes.get(kind, 0) + sum(entry.num_bytes(piece) for piece in entry.pieces)
    return sizes
