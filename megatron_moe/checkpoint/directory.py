"""Folder of checkpoints: listing, tracker file, clean-up after crashes, and retention policy."""

import json
import os
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_moe.checkpoint.manifest import MAX_HEADER_BYTES, TRAIN_STATE
from megatron_moe.checkpoint.storage import Storage, open_regular, read_bounded
from megatron_moe.config.exit_codes import CheckpointProblem, EnvironmentProblem

TRACKER = "latest_checkpointed_iteration.txt"
RUN_FOLDER_CHECKPOINTS = "checkpoints"
_ITERATION = re.compile(r"iter_(\d{7,18})")
_INCOMPLETE = re.compile(r"\.(tmp|old)-.*")
_REPLACED = re.compile(r"\.replaced-(iter_\d{7,18})-\w+")


@dataclass(frozen=True)
class Candidate:
    """A folder with the name of a checkpoint. Its content may be incomplete or damaged."""

    path: Path
    iteration: int


def iteration_folder(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def list_checkpoints(folder: Path) -> tuple[Candidate, ...]:
    """Lists the folders `iter_NNNNNNN` in a folder, newest iteration first; empty if the folder does not exist."""
    try:
        names = os.listdir(folder)
    except OSError:
        return ()
    found = [Candidate(folder / name, int(match[1])) for name in names if (match := _ITERATION.fullmatch(name))]
    return tuple(sorted(found, key=lambda candidate: -candidate.iteration))


def as_checkpoint(path: Path) -> Candidate | None:
    """Describes the checkpoint at `path` by its name; None if the name is not `iter_NNNNNNN`."""
    match = _ITERATION.fullmatch(path.name)
    return Candidate(path, int(match[1])) if match else None


def checkpoints_folder(folder: Path) -> Path:
    """Returns the subfolder `checkpoints` if `folder` is a run folder, else `folder`."""
    inside = folder / RUN_FOLDER_CHECKPOINTS
    return inside if inside.is_dir() and not list_checkpoints(folder) else folder


def find_checkpoints(path: Path) -> tuple[Candidate, ...]:
    """The checkpoint at `path`, or all checkpoints in `path` (a folder of checkpoints or a run folder), newest first.
    Raises CheckpointProblem if there is none.
    """
    itself = as_checkpoint(path)
    found = (itself,) if itself and path.is_dir() else list_checkpoints(checkpoints_folder(path))
    if not found:
        if (path / "config.json").is_file():
            what = f"{path} is a folder of a Hugging Face model, not of checkpoints"
            raise CheckpointProblem(f"{what}; tools that read both take it as hf:{path}")
        what = f"{path} contains no checkpoint iter_NNNNNNN; give a checkpoint or a folder of checkpoints"
        raise CheckpointProblem(f"{what} (a run with --mock-data saves only with --save-interval)")
    return found


def read_tracker(folder: Path) -> str | None:
    """First 64 bytes of the tracker file, as text; None if it cannot be read. In folders of this program, the file is
    only a hint: loading looks at the folders iter_NNNNNNN."""
    try:
        with open_regular(folder / TRACKER) as file:
            return file.read(64).decode(errors="replace").strip()
    except OSError:
        return None


def write_tracker(folder: Path, iteration: int, storage: Storage) -> None:
    """Writes the tracker file atomically. Raises OSError."""
    temporary = folder / f".tmp-{TRACKER}-{os.getpid()}"
    if temporary.exists():
        storage.remove(temporary)
    storage.write_file(temporary, [str(iteration).encode()])
    storage.rename(temporary, folder / TRACKER)


def check_writable(folder: Path) -> None:
    """Creates the folder if needed and writes a test file, as permission bits are unreliable for root and on mounts.

    Raises:
        EnvironmentProblem: the folder cannot be created or written.
    """
    test_file = folder / f".tmp-probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        test_file.write_bytes(b"probe")
        test_file.unlink()
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot write to the --save folder {folder}: {error.strerror} (errno {error.errno}); "
            f"give a writable folder"
        ) from error


def remove_incomplete_checkpoints(folder: Path, storage: Storage, say: Callable[[str], None]) -> None:
    """Removes incomplete checkpoints left by crashed saves. The caller must hold the folder's lock.

    A checkpoint that was being replaced is restored if its replacement was not committed.
    """
    for path in sorted(folder.iterdir()):
        replaced = _REPLACED.fullmatch(path.name)
        try:
            if replaced and not (folder / replaced[1]).exists():
                storage.rename(path, folder / replaced[1])
                say(f"restored {replaced[1]} in {folder}: a crash interrupted its replacement")
            elif replaced or _INCOMPLETE.fullmatch(path.name):
                storage.remove(path)
                say(f"removed stale {path.name} from {folder}")
        except OSError as error:
            say(f"could not clean up {path}: {error.strerror}; it takes disk space but is otherwise harmless")


def repair_tracker(folder: Path, storage: Storage, say: Callable[[str], None]) -> None:
    """Rewrites the tracker file if it does not name the newest checkpoint."""
    checkpoints = list_checkpoints(folder)
    tracker = read_tracker(folder)
    if not checkpoints or tracker == str(checkpoints[0].iteration):
        return
    newest = checkpoints[0].iteration
    say(f"{folder / TRACKER} says {tracker!r}, but the newest checkpoint is iteration {newest}; corrected the file")
    try:
        write_tracker(folder, newest, storage)
    except OSError as error:
        say(f"could not correct {folder / TRACKER}: {error.strerror}; the file is only a hint for users and tools")


def remove(path: Path, storage: Storage, say: Callable[[str], None]) -> None:
    """Removes a file or folder; a failure is only logged."""
    try:
        storage.remove(path)
    except OSError as error:
        say(
            f"could not remove {path}: {error.strerror}; it takes disk space, and the next launch tries again to "
            "remove it"
        )


@dataclass(frozen=True)
class Retention:
    """Retention policy, applied after a save: keeps every checkpoint that at least one field selects."""

    keep_last: int | None = None
    """Number of newest checkpoints to keep. None means that all checkpoints are kept."""
    interval: int | None = None
    """Selects the checkpoints whose iteration is a multiple of `interval`. If None, selects no checkpoints."""
    keep_best: bool = False
    """Keeps the checkpoint with the lowest validation loss in train_state.json; on a tie, keeps the newest one."""

    def apply(self, folder: Path, protected: Iterable[Path], storage: Storage, say: Callable[[str], None]) -> None:
        """Deletes all checkpoints in `folder` that are neither in `protected` nor selected by a field. Failures are
        only logged."""
        if self.keep_last is None:
            return
        kept = {path.resolve() for path in protected}
        checkpoints = list_checkpoints(folder)
        best = _best(checkpoints) if self.keep_best else None
        for candidate in checkpoints[self.keep_last :]:
            retained = self.interval and candidate.iteration % self.interval == 0
            if not retained and candidate != best and candidate.path.resolve() not in kept:
                _delete(candidate, storage, say)


def _delete(candidate: Candidate, storage: Storage, say: Callable[[str], None]) -> None:
    """Deletes a checkpoint. Renames it first, so that a half-deleted folder never has the name of a checkpoint."""
    renamed = candidate.path.parent / f".old-{candidate.path.name}-{uuid.uuid4().hex[:12]}"
    try:
        storage.rename(candidate.path, renamed)
    except OSError as error:
        say(f"could not delete the old checkpoint {candidate.path}: {error.strerror}; it is kept")
    else:
        remove(renamed, storage, say)


def _best(checkpoints: Sequence[Candidate]) -> Candidate | None:
    """Checkpoint with the lowest validation loss; None if no checkpoint has a validation loss."""
    losses: dict[Candidate, float] = {}
    for candidate in checkpoints:
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            loss = json.loads(read_bounded(candidate.path / TRAIN_STATE, MAX_HEADER_BYTES))["state"]["validation_loss"]
            if isinstance(loss, float):
                losses[candidate] = loss
    return min(losses, key=losses.__getitem__, default=None)


def set_aside_checkpoints(folder: Path, storage: Storage, say: Callable[[str], None]) -> None:
    """Moves all checkpoints into a new subfolder `set-aside-NNN` (`--fresh`).

    Raises:
        EnvironmentProblem: a checkpoint cannot be moved.
    """
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        return
    number = 1
    while (subfolder := folder / f"set-aside-{number:03d}").exists():
        number += 1
    try:
        storage.make_dir(subfolder)
        for candidate in checkpoints:
            storage.rename(candidate.path, subfolder / candidate.path.name)
        if (folder / TRACKER).exists():
            storage.rename(folder / TRACKER, subfolder / TRACKER)
    except OSError as error:
        raise EnvironmentProblem(
            f"--fresh could not move the {len(checkpoints)} checkpoints of {folder} to {subfolder}: {error.strerror}; "
            f"give another --save folder"
        ) from error
    say(f"--fresh: moved {len(checkpoints)} checkpoints of {folder} to {subfolder}")
