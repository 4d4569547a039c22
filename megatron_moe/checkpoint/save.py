"""Saving: a checkpoint is complete and verified, or does not exist.

Everything is written into a folder aside, the manifest last, and the folder is then renamed: the rename is the commit.
A crash at any moment leaves the earlier checkpoints as they were, and at most a folder aside that the next start
removes. All ranks learn the outcome from gathered reports, never from a barrier that a failed rank cannot reach.
"""

import errno
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_moe.checkpoint.folder import (
    Candidate,
    FolderLock,
    iteration_folder,
    list_checkpoints,
    mend_tracker,
    probe,
    set_aside,
    sweep,
    write_tracker,
)
from megatron_moe.checkpoint.format import (
    MANIFEST,
    TRAIN_STATE,
    Corrupt,
    FileEntry,
    Manifest,
    TensorEntry,
    checksum,
    decode,
    encode,
    merged,
)
from megatron_moe.checkpoint.shards import (
    SavedTensor,
    digest,
    is_weight,
    split_digests,
    total_bytes,
    write_tensors,
)
from megatron_moe.checkpoint.storage import Storage
from megatron_moe.parallel.collectives import gather_objects
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.specs.exitcodes import EnvironmentProblem, SaveProblem

WRITER = "megatron_moe 0.1"
_FREE_SPACE_MARGIN = 1.1


@dataclass(frozen=True)
class _Share:
    """What one rank is about to write."""

    aside: str
    """Name of the folder aside; the first rank's is used."""
    weights: bool
    optimizer: bool
    num_bytes: int


@dataclass
class _Written:
    """What one rank wrote, or why it could not."""

    files: dict[str, FileEntry] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    error: str | None = None


class Saver:
    """Writes the checkpoints of one run into one folder, which it holds until `close`.

    All ranks construct it and call its methods together. Every rank writes a file of its own, with those of its boxes
    that no lower rank holds.

    Args:
        keep_last: checkpoints to keep; None keeps all, but with `retain_interval` the last one.
        retain_interval: checkpoints of multiples of it are kept besides.
        keep_best: so is the one whose train_state.json has the lowest validation loss.
        fresh: moves checkpoints that the folder holds already into a subfolder (`--fresh`).
        stop_after: that many failed saves in a row end the run.
        say: where the first rank reports.
    Raises:
        EnvironmentProblem: the folder cannot be written, or another job holds it.
    """

    def __init__(
        self,
        folder: Path,
        context: ParallelContext,
        *,
        keep_last: int | None = None,
        retain_interval: int | None = None,
        keep_best: bool = False,
        fresh: bool = False,
        stop_after: int = 3,
        storage: Storage | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.folder = folder
        self.keep_last = 1 if keep_last is None and retain_interval else keep_last
        self.retain_interval = retain_interval
        self.keep_best = keep_best
        self.loaded_from: Path | None = None
        """Never deleted by retention; set it after loading."""
        self.last_seconds: float | None = None
        """Duration of the last save that succeeded: the grace time that a preemption needs."""
        self._context = context
        self._storage = storage or Storage()
        self._say = say
        self._stop_after = stop_after
        self._failures = 0
        self._lock: FolderLock | None = None
        self._together(lambda: self._open(fresh), EnvironmentProblem)

    def close(self) -> None:
        """Lets other jobs use the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def save(
        self,
        iteration: int,
        tensors: Mapping[str, SavedTensor],
        train_state: Mapping[str, Any],
        *,
        texts: Mapping[str, str] | None = None,
    ) -> Path | None:
        """Writes one checkpoint; a checkpoint of the same iteration is replaced.

        Args:
            tensors: by `shards.tensor_key`. Tensors on a device are copied to the host one at a time.
            train_state: written as train_state.json.
            texts: further files by name, e.g. run.yaml.
        Returns:
            The checkpoint's folder; None when it failed, which has been reported and leaves nothing behind.
        Raises:
            SaveProblem: the third failure in a row (`stop_after`).
        """
        started = time.monotonic()
        final = self.folder / iteration_folder(iteration)
        mine = self._mine(tensors)
        documents = {TRAIN_STATE: json.dumps(train_state, indent=1, allow_nan=False), **(texts or {})}
        shares = self._gather(
            _Share(_name_aside(final), bool(_weights(mine)), bool(_optimizer(mine)), total_bytes(mine))
        )
        aside = self.folder / shares[0].aside
        error = self._prepared(aside, shares) if self._context.is_first else None
        (error, *_) = self._gather(error)
        if error is None:
            reports = self._gather(self._written(aside, mine, documents if self._context.is_first else {}, shares))
            error = _first_error(reports)
        if error is None and self._context.is_first:
            error = self._committed(aside, final, iteration, reports)
        (error, *_) = self._gather(error)
        if error is not None:
            self._failed(iteration, aside, error)
            return None
        self._failures = 0
        self.last_seconds = time.monotonic() - started
        if self._context.is_first:
            self._tidy(Candidate(final, iteration))
        return final

    def _open(self, fresh: bool) -> None:
        probe(self.folder)
        self._lock = FolderLock(self.folder)
        if self._lock.works:
            sweep(self.folder, self._storage, self._say)
        else:
            self._say(f"{self.folder} is on a file system without locks: a second job would not be noticed")
        if fresh:
            set_aside(self.folder, self._storage, self._say)
        mend_tracker(self.folder, self._storage, self._say)

    def _mine(self, tensors: Mapping[str, SavedTensor]) -> dict[str, SavedTensor]:
        """The boxes that this rank writes: of the ranks that hold the same box, the lowest does."""
        digests = [digest(key, box.offset, tuple(box.data.shape)) for key, t in tensors.items() for box in t.boxes]
        # world: 8 bytes per box of every rank
        lower = b"".join(self._gather(b"".join(digests))[: self._context.rank])
        taken = set(split_digests(lower))
        every = iter(digests)
        kept = {
            key: SavedTensor(tensor.shape, tuple(box for box in tensor.boxes if next(every) not in taken))
            for key, tensor in tensors.items()
        }
        return {key: tensor for key, tensor in kept.items() if tensor.boxes}

    def _prepared(self, aside: Path, shares: Sequence[_Share]) -> str | None:
        """Makes the folder aside, on the first rank. Returns why there cannot be a checkpoint in it."""
        needed = int(_FREE_SPACE_MARGIN * sum(share.num_bytes for share in shares))
        try:
            self._storage.make_dir(aside)
            if self._storage.free_bytes(aside) < needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            return f"rank 0: {self._reason(error, needed)}"
        return None

    def _written(
        self,
        aside: Path,
        tensors: Mapping[str, SavedTensor],
        documents: Mapping[str, str],
        shares: Sequence[_Share],
    ) -> _Written:
        """Writes this rank's part of the checkpoint."""
        done = _Written()
        rank, needed = self._context.rank, int(_FREE_SPACE_MARGIN * sum(share.num_bytes for share in shares))
        writers = {
            "model": [r for r, share in enumerate(shares) if share.weights],
            "optim": [r for r, share in enumerate(shares) if share.optimizer],
        }
        try:
            for prefix, part in (("model", _weights(tensors)), ("optim", _optimizer(tensors))):
                if part:
                    number, of = writers[prefix].index(rank), len(writers[prefix])
                    path = aside / f"{prefix}-{number:05d}-of-{of:05d}.safetensors"
                    done.files[path.name], entries = write_tensors(self._storage, path, part)
                    done.tensors |= entries
            for name, text in documents.items():
                data = text.encode()
                self._storage.write_file(aside / name, [data])
                done.files[name] = FileEntry(size=len(data), head=len(data), crc32=checksum(data))
        except OSError as error:
            done.error = self._reason(error, needed)
        return done

    def _committed(self, aside: Path, final: Path, iteration: int, reports: list[_Written]) -> str | None:
        """Writes the manifest and gives the folder its name. Returns why it could not."""
        ranks = {axis: self._context.group(axis).size for axis in ("tp", "cp", "dp", "pp", "ep", "etp", "edp")}
        files = {name: entry for report in reports for name, entry in report.files.items()}
        manifest = Manifest(iteration, WRITER, ranks, files, merged([report.tensors for report in reports]))
        content = encode(manifest)
        try:
            decode(content)  # the boxes of all ranks cover every tensor exactly once
            self._storage.write_file(aside / MANIFEST, [content])
            self._storage.sync_dir(aside)
            self._put_in_place(aside, final)
            self._storage.sync_dir(self.folder)
        except OSError as error:
            return self._reason(error, 0)
        except Corrupt as problem:
            return str(problem)
        return None

    def _put_in_place(self, aside: Path, final: Path) -> None:
        if not final.exists():
            self._storage.rename(aside, final)
            return
        replaced = self.folder / f".replaced-{final.name}-{uuid.uuid4().hex[:12]}"
        self._storage.rename(final, replaced)
        try:
            self._storage.rename(aside, final)
        except OSError:
            self._storage.rename(replaced, final)
            raise
        self._remove(replaced)

    def _remove(self, path: Path) -> None:
        try:
            self._storage.remove(path)
        except OSError as error:
            self._say(f"could not remove {path}: {error.strerror}; it takes space, and the next start tries again")

    def _reason(self, error: OSError, needed: int) -> str:
        space = ""
        if needed and error.errno in (errno.ENOSPC, errno.EDQUOT):
            space = f"; the checkpoint needs {needed} bytes with 10 % to spare, {self._free_bytes()} are free"
        return f"{error.strerror} (errno {error.errno}){space}"

    def _free_bytes(self) -> str:
        try:
            return str(self._storage.free_bytes(self.folder))
        except OSError:
            return "an unknown number"

    def _failed(self, iteration: int, aside: Path, error: str) -> None:
        """Reports a failed save and leaves nothing of it; ends the run after too many in a row."""
        self._failures += 1
        if self._context.is_first and aside.exists():
            self._remove(aside)
        sentence = f"the checkpoint of iteration {iteration} could not be saved to {self.folder}: {error}"
        if self._failures >= self._stop_after:
            raise SaveProblem(f"{sentence}; that was failure {self._failures} in a row: make room or repair the folder")
        if self._context.is_first:
            self._say(f"{sentence}; training goes on, failure {self._failures} in a row ends it at {self._stop_after}")

    def _tidy(self, saved: Candidate) -> None:
        """After the commit: tracker and retention. What fails here is a warning."""
        try:
            write_tracker(self.folder, saved.iteration, self._storage)
        except OSError as error:
            self._say(f"could not write the tracker file in {self.folder}: {error.strerror}; nothing depends on it")
        if self.keep_last is None:
            return
        protected = {saved.path.resolve(), self.loaded_from.resolve() if self.loaded_from else None}
        checkpoints = list_checkpoints(self.folder)
        best = _best(checkpoints) if self.keep_best else None
        for candidate in checkpoints[self.keep_last :]:
            retained = self.retain_interval and candidate.iteration % self.retain_interval == 0
            if not retained and candidate != best and candidate.path.resolve() not in protected:
                self._delete(candidate)

    def _delete(self, candidate: Candidate) -> None:
        """Renamed first, so that no half-deleted folder bears the name of a checkpoint."""
        doomed = self.folder / f".old-{candidate.path.name}-{uuid.uuid4().hex[:12]}"
        try:
            self._storage.rename(candidate.path, doomed)
        except OSError as error:
            self._say(f"could not delete the old checkpoint {candidate.path}: {error.strerror}; it is kept")
        else:
            self._remove(doomed)

    def _gather(self, value: Any) -> list[Any]:
        # world: the manifest's entries of one rank, some hundred bytes per tensor
        return gather_objects(value, self._context.group("world"))

    def _together(self, act: Callable[[], None], problem: type[EnvironmentProblem]) -> None:
        """The first rank acts; what it raises is raised on all."""
        sentence = None
        if self._context.is_first:
            try:
                act()
            except (problem, OSError) as error:
                sentence = str(error)
        (sentence, *_) = self._gather(sentence)
        if sentence is not None:
            raise problem(sentence)


def _best(checkpoints: Sequence[Candidate]) -> Candidate | None:
    """The one with the lowest validation loss, the newest of equals; None when none has one."""
    losses = {candidate: loss for candidate in checkpoints if (loss := _validation_loss(candidate)) is not None}
    return min(losses, key=lambda candidate: losses[candidate], default=None)


def _validation_loss(candidate: Candidate) -> float | None:
    try:
        loss = json.loads((candidate.path / TRAIN_STATE).read_text())["state"]["validation_loss"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return loss if isinstance(loss, float) else None


def _name_aside(final: Path) -> str:
    return f".tmp-{final.name}-{uuid.uuid4().hex[:12]}"


def _weights(tensors: Mapping[str, SavedTensor]) -> dict[str, SavedTensor]:
    return {key: tensor for key, tensor in tensors.items() if is_weight(key)}


def _optimizer(tensors: Mapping[str, SavedTensor]) -> dict[str, SavedTensor]:
    return {key: tensor for key, tensor in tensors.items() if not is_weight(key)}


def _first_error(reports: list[_Written]) -> str | None:
    errors = [f"rank {rank}: {report.error}" for rank, report in enumerate(reports) if report.error is not None]
    return errors[0] if errors else None
