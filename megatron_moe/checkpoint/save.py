"""Saving: a checkpoint is complete and verified, or does not exist.

Everything is written into a folder aside, the manifest last, and the folder is then renamed: the rename is the commit.
A crash at any moment leaves the earlier checkpoints as they were, and at most a folder aside that the next start
removes. All ranks learn the outcome from gathered reports, never from a barrier that a failed rank cannot reach.

A save has two stages, each of which may run in a thread: every rank writes its part, then the first rank commits. All
that ranks say to each other, the main threads say, between the stages and over a group in host memory: a thread that
took part in collectives would meet those of a training step in another order on every rank.
"""

import errno
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_moe.checkpoint.async_save import (
    HostSnapshot,
    at_once,
    started,
)
from megatron_moe.checkpoint.directory import (
    Candidate,
    Retention,
    iteration_folder,
    mend_tracker,
    probe,
    remove,
    set_aside,
    sweep,
    write_tracker,
)
from megatron_moe.checkpoint.manifest import (
    MANIFEST,
    TRAIN_STATE,
    CorruptCheckpoint,
    FileEntry,
    Manifest,
    TensorEntry,
    checksum,
    decode,
    encode,
    merged,
)
from megatron_moe.checkpoint.storage import Storage
from megatron_moe.checkpoint.tensor_shards import (
    SavedTensor,
    digest,
    in_parts,
    is_weight,
    split_digests,
    total_bytes,
    write_tensors,
)
from megatron_moe.config.exit_codes import EnvironmentProblem, SaveProblem
from megatron_moe.logs.run_lock import RunLock
from megatron_moe.parallel.agreement import first_rank_does
from megatron_moe.parallel.collectives import all_reduce_, gather_objects
from megatron_moe.parallel.context import ParallelContext

WRITER = "megatron_moe 0.1"
_FREE_SPACE_MARGIN = 1.1
_GOODBYE_SECONDS = 10.0
"""How long the end of a run waits for a thread that still writes. One that computes with tensors while the interpreter
ends would abort the process, and the exit code would be lost."""


@dataclass(frozen=True)
class _Share:
    """What one rank is about to write."""

    aside: str
    """Name of the folder aside; the first rank's is used."""
    num_model_files: int
    num_optim_files: int
    num_bytes: int


@dataclass
class _Written:
    """What one rank wrote, or why it could not."""

    files: dict[str, FileEntry] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0


@dataclass
class _Committed:
    """What became of the commit on the first rank; on the others nothing did."""

    error: str | None = None
    remarks: list[str] = field(default_factory=list)
    """To be told in the log."""


@dataclass
class _Job:
    """A save under way, on one rank."""

    iteration: int
    final: Path
    aside: Path
    tensors: Mapping[str, SavedTensor]
    """What this rank writes."""
    documents: Mapping[str, str]
    shares: Sequence[_Share]
    in_thread: bool
    begin: float
    blocked: float = 0.0
    """Seconds that the caller has waited so far."""
    write_seconds: float = 0.0
    """Of the slowest rank."""
    writing: Future[_Written] | None = None
    committing: Future[_Committed] | None = None
    given_up: threading.Event = field(default_factory=threading.Event)
    """Threads that write shall come to an end."""

    @property
    def num_bytes(self) -> int:
        """Of the tensors of all ranks."""
        return sum(share.num_bytes for share in self.shares)

    @property
    def resting(self) -> bool:
        """No thread of this rank is at work for it."""
        stage = self.committing or self.writing
        return stage is None or stage.done()


@dataclass(frozen=True)
class SavedCheckpoint:
    """A save that has ended."""

    iteration: int
    path: Path | None
    """The checkpoint's folder; None when the save failed, which has been reported and leaves nothing behind."""
    num_bytes: int
    """Of the tensors of all ranks."""
    seconds: float
    """From the call to the commit: the grace time that a preemption needs."""
    blocked_seconds: float
    """How much of it the caller has waited."""
    write_seconds: float
    """How long the slowest rank wrote."""


class CheckpointSaver:
    """Writes the checkpoints of one run into one folder, which it holds until `close`.

    All ranks construct it and call its methods together. Every rank writes a file of its own, with those of its boxes
    that no lower rank holds.

    Args:
        keep_last: checkpoints to keep; None keeps all, but with `retain_interval` the last one.
        retain_interval: checkpoints of multiples of it are kept besides.
        keep_best: so is the one whose train_state.json has the lowest validation loss.
        fresh: moves checkpoints that the folder holds already into a subfolder (`--fresh`).
        stop_after: that many failed saves in a row end the run.
        expected_bytes: of one checkpoint.
        say: where the first rank reports.
    Raises:
        EnvironmentProblem: the folder cannot be written, has no space for a checkpoint, or another job holds it.
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
        expected_bytes: int = 0,
        storage: Storage | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.folder = folder
        keep_last = 1 if keep_last is None and retain_interval else keep_last
        self.retention = Retention(keep_last, retain_interval, keep_best)
        self.loaded_from: Path | None = None
        """Never deleted by retention; set it after loading."""
        self.last: SavedCheckpoint | None = None
        """The last save that succeeded."""
        self._context = context
        self._group = context.host_group()
        self._storage = storage or Storage()
        self._say = say
        self._stop_after = stop_after
        self._failures = 0
        self._job: _Job | None = None
        self._copies = HostSnapshot()
        self._lock: RunLock | None = None
        first_rank_does(partial(self._open, fresh, expected_bytes), context)

    def close(self) -> int | None:
        """Lets other jobs use the folder. A save that is still being written is given up and leaves no checkpoint; wait
        for it first (`wait`). One that is being committed is completed.

        Returns:
            Iteration of the latter, on the first rank.
        """
        job, self._job = self._job, None
        committed = None
        if job is not None and job.writing is not None:
            job.given_up.set()
            wait([job.writing], _GOODBYE_SECONDS)
        if job is not None and job.committing is not None and self._context.is_first:
            done = job.committing.exception() is None  # waits a moment
            committed = job.iteration if done and job.committing.result().error is None else None
        if job is None or job.resting:
            self._copies.release()
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        return committed

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
        saved = self._begin(iteration, tensors, train_state, texts or {}, in_thread=False) or self.wait()
        return None if saved is None else saved.path

    def start(
        self,
        iteration: int,
        tensors: Mapping[str, SavedTensor],
        train_state: Mapping[str, Any],
        *,
        texts: Mapping[str, str] | None = None,
    ) -> SavedCheckpoint | None:
        """Copies everything to host memory and leaves the rest of `save` to a thread and to later calls of `poll`.

        Returns:
            None; or how it ended, when it already did, with a failure.
        """
        return self._begin(iteration, tensors, train_state, texts or {}, in_thread=True)

    @property
    def pending(self) -> int | None:
        """Iteration of the checkpoint that is under way."""
        return None if self._job is None else self._job.iteration

    def poll(self) -> SavedCheckpoint | None:
        """Takes the save that is under way one stage on, if all ranks are ready for it; waits for none.

        To be called by all ranks at every step. Without a save under way it says nothing to the other ranks.

        Returns:
            How the save has ended; None when it has not.
        Raises:
            SaveProblem: the third failure in a row.
        """
        if self._job is None:
            return None
        with _counted(self._job):
            ready = torch.tensor([float(self._job.resting)])
            # world: 4 bytes, in host memory
            if not all_reduce_(ready, self._group, "min").item():
                return None
            return self._advance(self._job)

    def wait(self) -> SavedCheckpoint | None:
        """Waits for the save that is under way; returns how it has ended, None when there was none.

        Raises:
            SaveProblem: the third failure in a row.
        """
        saved = None
        while self._job is not None and saved is None:
            with _counted(self._job):
                saved = self._advance(self._job)
        return saved

    def _begin(
        self,
        iteration: int,
        tensors: Mapping[str, SavedTensor],
        train_state: Mapping[str, Any],
        texts: Mapping[str, str],
        *,
        in_thread: bool,
    ) -> SavedCheckpoint | None:
        assert self._job is None, f"the save of iteration {self.pending} is under way"
        begin = time.monotonic()
        final = self.folder / iteration_folder(iteration)
        mine = self._mine(tensors)
        documents = {TRAIN_STATE: json.dumps(train_state, indent=1, allow_nan=False), **texts}
        num_model_files, num_optim_files = len(in_parts(_weights(mine))), len(in_parts(_optimizer(mine)))
        shares = self._gather(_Share(_name_aside(final), num_model_files, num_optim_files, total_bytes(mine)))
        aside = self.folder / shares[0].aside
        first = self._context.is_first
        job = _Job(iteration, final, aside, mine, documents if first else {}, shares, in_thread, begin)
        (error, *_) = self._gather(self._prepared(aside, shares) if first else None)
        if error is not None:
            return self._ended(job, error)
        if in_thread:
            job.tensors = self._copies.take(mine)
        job.writing = started(partial(self._written, job), in_thread=in_thread)
        self._job = job
        job.blocked = time.monotonic() - begin
        return None

    def _advance(self, job: _Job) -> SavedCheckpoint | None:
        """Waits for the stage that the save is in and begins the next one; the outcome after the last."""
        assert job.writing is not None, f"the save of iteration {job.iteration} has not begun"
        if job.committing is None:
            reports = self._gather(job.writing.result())
            job.write_seconds = max(report.seconds for report in reports)
            error = _first_error(reports)
            if error is not None:
                return self._ended(job, error)
            commit = partial(self._committed, job, reports) if self._context.is_first else _Committed
            job.committing = started(commit, in_thread=job.in_thread)
            return None
        committed = job.committing.result()
        for remark in committed.remarks:
            self._say(remark)
        (error, *_) = self._gather(committed.error)
        return self._ended(job, error)

    def _ended(self, job: _Job, error: str | None) -> SavedCheckpoint:
        self._job = None
        seconds = time.monotonic() - job.begin
        blocked = job.blocked if job.in_thread else seconds
        path = job.final if error is None else None
        saved = SavedCheckpoint(job.iteration, path, job.num_bytes, seconds, blocked, job.write_seconds)
        if error is not None:
            self._failed(job, error)
        else:
            self._failures = 0
            self.last = saved
        return saved

    def _open(self, fresh: bool, expected_bytes: int) -> None:
        probe(self.folder)
        self._lock = RunLock(self.folder, does="saves checkpoints to", option="--save")
        if self._lock.warning is None:
            sweep(self.folder, self._storage, self._say)
        else:
            self._say(self._lock.warning)
        if fresh:
            set_aside(self.folder, self._storage, self._say)
        mend_tracker(self.folder, self._storage, self._say)
        needed, free = _FREE_SPACE_MARGIN * expected_bytes, self._storage.free_bytes(self.folder)
        if free < needed:
            self._lock.release()
            raise EnvironmentProblem(
                f"a checkpoint of this run takes {expected_bytes / 1e9:,.2f} GB, and {self.folder} has "
                f"{free / 1e9:,.2f} GB free: free {(needed - free) / 1e9:,.2f} GB for a margin of 10 %, give another "
                f"--save folder, or --no-save-optim for weights alone"
            )

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
        needed = _needed(shares)
        try:
            self._storage.make_dir(aside)
            if self._storage.free_bytes(aside) < needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            return f"rank 0: {self._reason(error, needed)}"
        return None

    def _written(self, job: _Job) -> _Written:
        """Writes this rank's part of the checkpoint."""
        done, begin = _Written(), time.monotonic()
        model = _names("model", [share.num_model_files for share in job.shares], self._context.rank)
        optim = _names("optim", [share.num_optim_files for share in job.shares], self._context.rank)
        parts = in_parts(_weights(job.tensors)) + in_parts(_optimizer(job.tensors))
        calls = [
            partial(write_tensors, self._storage, job.aside / name, part, job.given_up.is_set)
            for name, part in zip(model + optim, parts, strict=True)
        ]
        try:
            # two files are little to write, or one is
            for file, tensors in at_once(calls) if len(calls) > 2 else (call() for call in calls):
                done.files |= file
                done.tensors |= tensors
            for name, text in job.documents.items():
                data = text.encode()
                self._storage.write_file(job.aside / name, [data])
                done.files[name] = FileEntry(size=len(data), head=len(data), crc32=checksum(data))
        except OSError as error:
            done.error = self._reason(error, _needed(job.shares))
        done.seconds = time.monotonic() - begin
        return done

    def _committed(self, job: _Job, reports: Sequence[_Written]) -> _Committed:
        """Writes the manifest and gives the folder its name; then tracker and retention, of which a failure is a
        warning."""
        ranks = {axis: self._context.group(axis).size for axis in ("tp", "cp", "dp", "pp", "ep", "etp", "edp")}
        files = {name: entry for report in reports for name, entry in report.files.items()}
        manifest = Manifest(job.iteration, WRITER, ranks, files, merged([report.tensors for report in reports]))
        content = encode(manifest)
        done = _Committed()
        try:
            decode(content)  # the boxes of all ranks cover every tensor exactly once
            self._storage.write_file(job.aside / MANIFEST, [content])
            self._storage.sync_dir(job.aside)
            self._put_in_place(job, done.remarks)
            self._storage.sync_dir(self.folder)
        except OSError as error:
            done.error = self._reason(error, 0)
        except CorruptCheckpoint as problem:
            done.error = str(problem)
        else:
            self._tidy(Candidate(job.final, job.iteration), done.remarks)
        return done

    def _put_in_place(self, job: _Job, remarks: list[str]) -> None:
        if not job.final.exists():
            self._storage.rename(job.aside, job.final)
            return
        replaced = self.folder / f".replaced-{job.final.name}-{uuid.uuid4().hex[:12]}"
        self._storage.rename(job.final, replaced)
        try:
            self._storage.rename(job.aside, job.final)
        except OSError:
            self._storage.rename(replaced, job.final)
            raise
        remove(replaced, self._storage, remarks.append)

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

    def _failed(self, job: _Job, error: str) -> None:
        """Reports a failed save and leaves nothing of it; ends the run after too many in a row."""
        self._failures += 1
        if self._context.is_first and job.aside.exists():
            remove(job.aside, self._storage, self._say)
        sentence = f"the checkpoint of iteration {job.iteration} could not be saved to {self.folder}: {error}"
        if self._failures >= self._stop_after:
            raise SaveProblem(f"{sentence}; that was failure {self._failures} in a row: make room or repair the folder")
        if self._context.is_first:
            self._say(f"{sentence}; training goes on, failure {self._failures} in a row ends it at {self._stop_after}")

    def _tidy(self, saved: Candidate, remarks: list[str]) -> None:
        """After the commit: tracker and retention."""
        try:
            write_tracker(self.folder, saved.iteration, self._storage)
        except OSError as error:
            where = f"the tracker file in {self.folder}"
            remarks.append(f"could not write {where}: {error.strerror}; nothing depends on it")
        spared = [saved.path, *([self.loaded_from] if self.loaded_from else [])]
        self.retention.apply(self.folder, spared, self._storage, remarks.append)

    def _gather(self, value: Any) -> list[Any]:
        # world: the manifest's entries of one rank, some hundred bytes per tensor
        return gather_objects(value, self._group)


def _name_aside(final: Path) -> str:
    return f".tmp-{final.name}-{uuid.uuid4().hex[:12]}"


def _names(prefix: str, num_files: Sequence[int], rank: int) -> list[str]:
    """Of the files that a rank writes: numbered among those of all ranks."""
    before, of = sum(num_files[:rank]), sum(num_files)
    return [f"{prefix}-{before + number:05d}-of-{of:05d}.safetensors" for number in range(num_files[rank])]


def _weights(tensors: Mapping[str, SavedTensor]) -> dict[str, SavedTensor]:
    return {key: tensor for key, tensor in tensors.items() if is_weight(key)}


def _optimizer(tensors: Mapping[str, SavedTensor]) -> dict[str, SavedTensor]:
    return {key: tensor for key, tensor in tensors.items() if not is_weight(key)}


def _needed(shares: Sequence[_Share]) -> int:
    """Bytes of free space that a save asks for."""
    return int(_FREE_SPACE_MARGIN * sum(share.num_bytes for share in shares))


@contextmanager
def _counted(job: _Job) -> Iterator[None]:
    """Adds the seconds inside to those that the caller has waited for the save."""
    begin = time.monotonic()
    try:
        yield
    finally:
        job.blocked += time.monotonic() - begin


def _first_error(reports: list[_Written]) -> str | None:
    errors = [f"rank {rank}: {report.error}" for rank, report in enumerate(reports) if report.error is not None]
    return errors[0] if errors else None
