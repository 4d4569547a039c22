"""The save folder: which checkpoints it holds, who may write to it, and what crashes left behind."""

import json
import os
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_moe.checkpoint.bounded_read import open_regular, read_bounded
from megatron_moe.checkpoint.manifest import MAX_HEADER_BYTES, TRAIN_STATE
from megatron_moe.checkpoint.storage import Storage
from megatron_moe.config.exit_codes import EnvironmentProblem

TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d{7,18})")
_WRITING = re.compile(r"\.tmp-.*")
_DELETING = re.compile(r"\.old-.*")
_REPLACING = re.compile(r"\.replaced-(iter_\d{7,18})-\w+")


@dataclass(frozen=True)
class Candidate:
    """A folder that is named like a checkpoint."""

    path: Path
    iteration: int


def iteration_folder(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def list_checkpoints(folder: Path) -> tuple[Candidate, ...]:
    """All `iter_NNNNNNN` of a folder, newest first; none when the folder does not exist."""
    try:
        names = os.listdir(folder)
    except OSError:
        return ()
    found = [Candidate(folder / name, int(match[1])) for name in names if (match := _ITERATION.fullmatch(name))]
    return tuple(sorted(found, key=lambda candidate: -candidate.iteration))


def as_checkpoint(path: Path) -> Candidate | None:
    """The checkpoint when the path is one itself."""
    match = _ITERATION.fullmatch(path.name)
    return Candidate(path, int(match[1])) if match else None


def read_tracker(folder: Path) -> str | None:
    """The text of the tracker file, which is a hint for people and other tools; None when there is none."""
    try:
        with open_regular(folder / TRACKER) as file:
            return file.read(64).decode(errors="replace").strip()
    except OSError:
        return None


def write_tracker(folder: Path, iteration: int, storage: Storage) -> None:
    """Written aside and put in place in one step."""
    aside = folder / f".tmp-{TRACKER}-{os.getpid()}"
    if aside.exists():
        storage.remove(aside)
    storage.write_file(aside, [str(iteration).encode()])
    storage.rename(aside, folder / TRACKER)


def probe(folder: Path) -> None:
    """Makes the folder if needed and writes a file into it, because permission bits do not tell (root, mounts).

    Raises:
        EnvironmentProblem: it cannot be made or written.
    """
    test_file = folder / f".tmp-probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        test_file.write_bytes(b"probe")
        test_file.unlink()
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot write to the --save folder {folder}: {error.strerror} (errno {error.errno}); "
            f"give a folder that can be written"
        ) from error


def sweep(folder: Path, storage: Storage, say: Callable[[str], None]) -> None:
    """Removes what earlier crashes left; only for the holder of the lock.

    A checkpoint that was about to be replaced by another of its iteration comes back when that one never arrived.
    """
    for path in sorted(folder.iterdir()):
        replaced = _REPLACING.fullmatch(path.name)
        try:
            if replaced and not (folder / replaced[1]).exists():
                storage.rename(path, folder / replaced[1])
                say(f"put back {replaced[1]} in {folder}: a crash came before its replacement was complete")
            elif replaced or _WRITING.fullmatch(path.name) or _DELETING.fullmatch(path.name):
                storage.remove(path)
                say(f"removed stale {path.name} from {folder}")
        except OSError as error:
            say(f"could not clean up {path}: {error.strerror}; it takes space but does no harm")


def mend_tracker(folder: Path, storage: Storage, say: Callable[[str], None]) -> None:
    """Makes the tracker name the newest checkpoint."""
    checkpoints = list_checkpoints(folder)
    tracker = read_tracker(folder)
    if not checkpoints or tracker == str(checkpoints[0].iteration):
        return
    newest = checkpoints[0].iteration
    say(f"{folder / TRACKER} says {tracker!r}, the newest checkpoint is of iteration {newest}: the file is mended")
    try:
        write_tracker(folder, newest, storage)
    except OSError as error:
        say(f"could not mend {folder / TRACKER}: {error.strerror}; nothing depends on it")


def remove(path: Path, storage: Storage, say: Callable[[str], None]) -> None:
    """Removes what nobody needs any more; a failure is told and harmless."""
    try:
        storage.remove(path)
    except OSError as error:
        say(f"could not remove {path}: {error.strerror}; it takes space, and the next start tries again")


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay when a new one has come."""

    keep_last: int | None = None
    """The newest so many; None: all."""
    interval: int | None = None
    """Besides, those of multiples of it."""
    keep_best: bool = False
    """Besides, the one whose train_state.json has the lowest validation loss, the newest of equals."""

    def apply(self, folder: Path, spared: Iterable[Path], storage: Storage, say: Callable[[str], None]) -> None:
        """Deletes the other checkpoints of the folder, but none of those `spared`. A failure is told."""
        if self.keep_last is None:
            return
        kept = {path.resolve() for path in spared}
        checkpoints = list_checkpoints(folder)
        best = _best(checkpoints) if self.keep_best else None
        for candidate in checkpoints[self.keep_last :]:
            retained = self.interval and candidate.iteration % self.interval == 0
            if not retained and candidate != best and candidate.path.resolve() not in kept:
                _delete(candidate, storage, say)


def _delete(candidate: Candidate, storage: Storage, say: Callable[[str], None]) -> None:
    """Renamed first, so that no half-deleted folder bears the name of a checkpoint."""
    doomed = candidate.path.parent / f".old-{candidate.path.name}-{uuid.uuid4().hex[:12]}"
    try:
        storage.rename(candidate.path, doomed)
    except OSError as error:
        say(f"could not delete the old checkpoint {candidate.path}: {error.strerror}; it is kept")
    else:
        remove(doomed, storage, say)


def _best(checkpoints: Sequence[Candidate]) -> Candidate | None:
    """None when none has a loss."""
    losses = {candidate: loss for candidate in checkpoints if (loss := _validation_loss(candidate)) is not None}
    return min(losses, key=lambda candidate: losses[candidate], default=None)


def _validation_loss(candidate: Candidate) -> float | None:
    try:
        loss = json.loads(read_bounded(candidate.path / TRAIN_STATE, MAX_HEADER_BYTES))["state"]["validation_loss"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return loss if isinstance(loss, float) else None


def set_aside(folder: Path, storage: Storage, say: Callable[[str], None]) -> None:
    """Moves all checkpoints into a subfolder, so that a run that starts afresh does not mix with the earlier one.

    Raises:
        EnvironmentProblem: they cannot be moved.
    """
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        return
    number = 1
    while (aside := folder / f"set-aside-{number:03d}").exists():
        number += 1
    try:
        storage.make_dir(aside)
        for candidate in checkpoints:
            storage.rename(candidate.path, aside / candidate.path.name)
        if (folder / TRACKER).exists():
            storage.rename(folder / TRACKER, aside / TRACKER)
    except OSError as error:
        raise EnvironmentProblem(
            f"--fresh could not move the {len(checkpoints)} checkpoints of {folder} to {aside}: {error.strerror}; "
            f"give another --save folder"
        ) from error
    say(f"--fresh: moved {len(checkpoints)} checkpoints of {folder} to {aside}")
