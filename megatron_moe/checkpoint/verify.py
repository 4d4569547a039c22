"""Verification of all files of a checkpoint, in bounded memory and without building a model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from megatron_moe.checkpoint.directory import as_checkpoint
from megatron_moe.checkpoint.load import CheckState
from megatron_moe.checkpoint.manifest import (
    MANIFEST,
    SAFETENSORS,
    TRAIN_STATE,
    CorruptCheckpoint,
    FormatTooNewError,
    Manifest,
    check_header,
    extents_by_file,
    parse_json,
)
from megatron_moe.checkpoint.tensor_shards import CheckpointReader, float64_chunks
from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.text import listed


@dataclass(frozen=True)
class VerificationReport:
    """Problems and remarks that `verify_checkpoint` found in a checkpoint."""

    path: Path
    manifest: Manifest | None
    """Manifest of the checkpoint. None if it cannot be read; then no other file was verified."""
    problems: tuple[str, ...]
    """Errors, each of which makes the checkpoint unusable."""
    remarks: tuple[str, ...]
    """Harmless findings, such as unlisted files."""
    num_bytes: int
    """Number of bytes that were read and compared with their checksums."""

    @property
    def valid(self) -> bool:
        return not self.problems


def verify_checkpoint(
    path: Path, check_state: CheckState | None = None, *, check_finite: bool = False
) -> VerificationReport:
    """Verifies every byte of a checkpoint folder and collects all problems.

    Args:
        check_state: function that validates the content of train_state.json.
        check_finite: report tensors with NaN or infinite values as problems too.
    """
    try:
        reader = CheckpointReader(path)
    except (CorruptCheckpoint, FormatTooNewError) as problem:
        return VerificationReport(path, None, (str(problem),), (), 0)
    manifest = reader.manifest
    problems: list[str] = []
    named = as_checkpoint(path)
    if named is not None and named.iteration != manifest.iteration:
        problems.append(f"{MANIFEST}: its iteration {manifest.iteration} differs from that of the folder {path.name}")
    with _collecting(problems):
        reader.check_sizes()
    num_bytes = _verify_files(reader, problems, check_state) + _verify_pieces(reader, problems, check_finite)
    known = {MANIFEST, *manifest.files}
    remarks = tuple(f"{entry.name}: not in the manifest" for entry in sorted(path.iterdir()) if entry.name not in known)
    return VerificationReport(path, manifest, tuple(dict.fromkeys(problems)), remarks, num_bytes)


def open_verified(path: Path) -> CheckpointReader:
    """Verifies a checkpoint and opens it, so that `CheckpointReader.mmap_piece` can be used safely.

    Raises CheckpointProblem, listing all problems, if the checkpoint is damaged.
    """
    report = verify_checkpoint(path)
    if report.manifest is None or not report.valid:
        raise CheckpointProblem(f"checkpoint {path} is damaged and not used:\n  {listed(report.problems)}")
    return CheckpointReader(path, report.manifest)


def _verify_files(reader: CheckpointReader, problems: list[str], check_state: CheckState | None) -> int:
    """Verifies safetensors headers and text files, adds errors to `problems`. Returns the number of verified bytes."""
    manifest, extents = reader.manifest, extents_by_file(reader.manifest)
    for name in manifest.files:
        with _collecting(problems):
            head = reader.read_head(name)
            if name.endswith(SAFETENSORS):
                check_header(name, head, extents.get(name, []))
            elif name == TRAIN_STATE:
                state = parse_json(head, name)
                if check_state is not None:
                    check_state(state, manifest.iteration)
    if TRAIN_STATE not in manifest.files:
        problems.append(f"{MANIFEST}: lists no {TRAIN_STATE}")
    return sum(entry.head for entry in manifest.files.values())


def _verify_pieces(reader: CheckpointReader, problems: list[str], check_finite: bool) -> int:
    num_bytes = 0
    for key, entry in reader.manifest.tensors.items():
        num_nonfinite = 0
        for piece in entry.pieces:
            num_bytes += entry.num_bytes(piece)
            with _collecting(problems):
                reader.verify_piece(key, piece)
                if check_finite:
                    chunks = float64_chunks(reader.mmap_piece(key, piece))
                    num_nonfinite += sum(chunk.numel() - int(torch.isfinite(chunk).sum()) for chunk in chunks)
        if num_nonfinite:
            problems.append(f"{key}: {num_nonfinite} of {prod(entry.shape)} values are NaN or infinite")
    return num_bytes


@contextmanager
def _collecting(problems: list[str]) -> Iterator[None]:
    """Context manager that catches CorruptCheckpoint and appends its message to `problems`."""
    try:
        yield
    except CorruptCheckpoint as problem:
        problems.append(str(problem))


def sizes_by_kind(manifest: Manifest) -> Mapping[str, int]:
    """Total size in bytes of the tensors of each kind ("model", "master", "exp_avg", ...)."""
    sizes: dict[str, int] = {}
    for key, entry in manifest.tensors.items():
        kind = key.partition(".")[0]
        sizes[kind] = sizes.get(kind, 0) + sum(entry.num_bytes(piece) for piece in entry.pieces)
    return sizes
