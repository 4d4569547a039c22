"""Atomic checkpoint saving, synchronous or in background threads.

All files are written to a temporary folder, the manifest last. Renaming this folder commits the checkpoint. A crash
does not affect earlier checkpoints, and the next launch removes the temporary folder that remains.

A save has two stages: all ranks write their files, then the first rank commits. Each stage may run in a background
thread. Between the stages, the main threads gather the results or errors of all ranks over a gloo group. The background
threads run no collectives, because their order relative to those of training would differ between ranks.
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

from megatron_moe.checkpoint import directory
from megatron_moe.checkpoint.async_save import HostBuffer, run_parallel, submit
from megatron_moe.checkpoint.directory import Candidate, Retention
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
    merge_entries,
)
from megatron_moe.checkpoint.storage import Storage
from megatron_moe.checkpoint.tensor_shards import (
    TensorShard,
    digest,
    is_weight,
    partition_tensors,
    split_digests,
    total_bytes,
    write_tensors,
)
from megatron_moe.config.exit_codes import EnvironmentProblem, SaveProblem
from megatron_moe.config.text import num_bytes_text
from megatron_moe.logs.run_lock import RunLock
from megatron_moe.parallel.agreement import run_on_first_rank
from megatron_moe.parallel.collectives import all_reduce_, gather_objects
from megatron_moe.parallel.context import ParallelContext

WRITER = "megatron_moe 0.1"
_FREE_SPACE_MARGIN = 1.1
_CLOSE_TIMEOUT_S = 10.0
"""Maximum time for which `close` waits until a cancelled writer thread ends. A thread that used tensors during
interpreter shutdown would abort the process, and its exit code would be lost."""


@dataclass(frozen=True)
class _RankPlan:
    """Numbers of files and bytes that one rank will write."""

    temporary: str
    """Proposed name of the temporary folder; all ranks use the name that the first rank proposes."""
    num_files: Mapping[str, int]
    """Number of files by file name prefix ("model" or "optim")."""
    num_bytes: int


@dataclass
class _WriteResult:
    """Manifest entries of the files that one rank wrote; `error` is set if the rank failed."""

    files: dict[str, FileEntry] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0


_CommitResult = tuple[str | None, list[str]]
"""(error message or None, warnings to log)."""


@dataclass
class _PendingSave:
    """State of an unfinished save on one rank."""

    iteration: int
    final: Path
    temporary: Path
    tensors: Mapping[str, TensorShard]
    """Shards by tensor key, with only those boxes (n-d slices) that this rank writes."""
    texts: Mapping[str, str]
    plans: Sequence[_RankPlan]
    in_thread: bool
    begin: float
    blocked: float = 0.0
    """Time for which training was blocked so far, in seconds."""
    write_seconds: float = 0.0
    """Time that the slowest rank took to write its files."""
    writing: Future[_WriteResult] | None = None
    committing: Future[_CommitResult] | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def num_bytes(self) -> int:
        """Total size in bytes of the tensors that all ranks write."""
        return sum(plan.num_bytes for plan in self.plans)

    @property
    def needed_bytes(self) -> int:
        return int(_FREE_SPACE_MARGIN * self.num_bytes)

    @property
    def idle(self) -> bool:
        """True if no thread of this rank is running for this save."""
        stage = self.committing or self.writing
        return stage is None or stage.done()


@dataclass(frozen=True)
class SavedCheckpoint:
    """Size, duration and folder of a finished save."""

    iteration: int
    path: Path | None
    """Folder of the checkpoint. None if the save failed; then the error was logged and the files were removed."""
    num_bytes: int
    """Total size in bytes of the tensors that all ranks wrote."""
    seconds: float
    """Duration of the save, up to its commit. A preempted run needs this much time before SIGKILL to save."""
    blocked_seconds: float
    """Part of `seconds` during which training was blocked."""
    write_seconds: float
    """Time that the slowest rank took to write its files."""


class CheckpointSaver:
    """Writes the checkpoints of one run into one folder, which stays locked until `close`.

    All ranks call the constructor and every method together. If several ranks hold the same box (n-d slice of a
    tensor), the lowest of these ranks writes it.

    Args:
        keep_last: number of newest checkpoints to keep; None keeps all, or only the newest if `retain_interval` is set.
        retain_interval: additionally keep checkpoints whose iteration is a multiple of this number.
        keep_best: additionally keep the checkpoint whose train_state.json has the lowest validation loss.
        fresh: move existing checkpoints of the folder into a subfolder (`--fresh`).
        stop_after: number of consecutive failed saves after which SaveProblem is raised.
        expected_bytes: expected size of one checkpoint, which is compared with the free disk space.
        expected_number: largest number of checkpoints in the folder during the run; a warning is logged if the disk has
            no space for all of them.
        say: logs a line; called on the first rank only.
    Raises:
        EnvironmentProblem: the folder is not writable, lacks space for one checkpoint, or is locked by another job.
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
        expected_number: int = 1,
        storage: Storage | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.folder = folder
        keep_last = 1 if keep_last is None and retain_interval else keep_last
        self.retention = Retention(keep_last, retain_interval, keep_best)
        self.loaded_from: Path | None = None
        """Checkpoint from which the run was loaded; it is never deleted. The caller sets this field after loading."""
        self.last: SavedCheckpoint | None = None
        """The last successful save."""
        self._context = context
        self._group = context.host_group()
        self._storage = storage or Storage()
        self._say = say
        self._stop_after = stop_after
        self._failures = 0
        self._pending: _PendingSave | None = None
        self._buffer = HostBuffer()
        self._lock: RunLock | None = None
        run_on_first_rank(partial(self._open, fresh, expected_bytes, expected_number), context)

    def close(self) -> int | None:
        """Unlocks the folder. Cancels a save whose files are still being written (call `wait` first to complete it).
        Completes a commit that has begun. Returns its iteration on the first rank if it succeeded, otherwise None."""
        save, self._pending = self._pending, None
        committed = None
        if save is not None and save.writing is not None:
            save.cancelled.set()
            wait([save.writing], _CLOSE_TIMEOUT_S)
        if save is not None and save.committing is not None and self._context.is_first:
            done = save.committing.exception() is None  # waits for the commit, which is short
            committed = save.iteration if done and save.committing.result()[0] is None else None
        if save is None or save.idle:
            self._buffer.release()
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        return committed

    def save(
        self,
        iteration: int,
        tensors: Mapping[str, TensorShard],
        train_state: Mapping[str, Any],
        *,
        texts: Mapping[str, str] | None = None,
    ) -> Path | None:
        """Writes one checkpoint and returns after its commit. The arguments are those of `CheckpointSaver.start`.

        Returns:
            Folder of the checkpoint. None if the save failed; then the error was logged and the files were removed.
        Raises:
            SaveProblem: `stop_after` consecutive saves failed.
        """
        saved = self.start(iteration, tensors, train_state, texts=texts, in_thread=False) or self.wait()
        return None if saved is None else saved.path

    def start(
        self,
        iteration: int,
        tensors: Mapping[str, TensorShard],
        train_state: Mapping[str, Any],
        *,
        texts: Mapping[str, str] | None = None,
        in_thread: bool = True,
    ) -> SavedCheckpoint | None:
        """Starts writing one checkpoint, which replaces any checkpoint of the same iteration. Call `poll` or `wait` to
        complete it. Raises SaveProblem if `stop_after` consecutive saves failed.

        Args:
            tensors: shards by `tensor_key`.
            train_state: content of train_state.json.
            texts: contents of additional text files by file name, e.g. run.yaml; None if there are none.
            in_thread: copy all tensors to host memory before returning, then write the files in a thread. False: write
                the files before returning, without a copy.
        Returns:
            None if the save has started. If it could not start, a `SavedCheckpoint` whose `path` is None.
        """
        assert self._pending is None, f"the save of iteration {self.pending} is unfinished"
        begin, first = time.monotonic(), self._context.is_first
        final = self.folder / directory.iteration_folder(iteration)
        tensors = self._deduplicate(tensors)
        num_files = {prefix: len(parts) for prefix, parts in _file_parts(tensors).items()}
        name = f".tmp-{final.name}-{uuid.uuid4().hex[:12]}"
        plans = self._gather(_RankPlan(name, num_files, total_bytes(tensors)))
        state = {TRAIN_STATE: json.dumps(train_state, indent=1, allow_nan=False)}
        texts = {**state, **(texts or {})} if first else {}
        save = _PendingSave(iteration, final, self.folder / plans[0].temporary, tensors, texts, plans, in_thread, begin)
        (error, *_) = self._gather(self._make_temporary(save) if first else None)
        if error is not None:
            return self._finish(save, error)
        if in_thread:
            save.tensors = self._buffer.copy(tensors)
        save.writing = submit(partial(self._write, save), in_thread=in_thread)
        self._pending = save
        save.blocked = time.monotonic() - begin
        return None

    @property
    def pending(self) -> int | None:
        """Iteration of the unfinished save; None if no save is unfinished."""
        return None if self._pending is None else self._pending.iteration

    def poll(self) -> SavedCheckpoint | None:
        """Advances the unfinished save by one stage if all ranks have finished the current stage, else returns
        immediately.

        All ranks call this method at every training step. It communicates only while a save is unfinished.

        Returns:
            Result of the save if this call finished it, else None.
        Raises:
            SaveProblem: `stop_after` consecutive saves failed.
        """
        if self._pending is None:
            return None
        with _blocking(self._pending):
            ready = torch.tensor([float(self._pending.idle)])
            # collective over world: 4 bytes, in host memory
            if not all_reduce_(ready, self._group, "min").item():
                return None
            return self._advance(self._pending)

    def wait(self) -> SavedCheckpoint | None:
        """Completes the unfinished save and returns its result. Returns None if no save is unfinished.

        Raises:
            SaveProblem: `stop_after` consecutive saves failed.
        """
        saved = None
        while self._pending is not None and saved is None:
            with _blocking(self._pending):
                saved = self._advance(self._pending)
        return saved

    def _advance(self, save: _PendingSave) -> SavedCheckpoint | None:
        """Waits for the current stage of the save and starts the next one. Returns the result after the last stage or
        an error, otherwise None."""
        assert save.writing is not None, f"the save of iteration {save.iteration} was not started"
        if save.committing is None:
            results = self._gather(save.writing.result())
            save.write_seconds = max(result.seconds for result in results)
            errors = [f"rank {rank}: {result.error}" for rank, result in enumerate(results) if result.error is not None]
            if errors:
                return self._finish(save, errors[0])
            if self._context.is_first:
                save.committing = submit(partial(self._commit, save, results), in_thread=save.in_thread)
            else:
                save.committing = submit(lambda: (None, []), in_thread=False)
            return None
        error, messages = save.committing.result()
        for message in messages:
            self._say(message)
        (error, *_) = self._gather(error)
        return self._finish(save, error)

    def _finish(self, save: _PendingSave, error: str | None) -> SavedCheckpoint:
        self._pending = None
        seconds = time.monotonic() - save.begin
        blocked = save.blocked if save.in_thread else seconds
        path = save.final if error is None else None
        saved = SavedCheckpoint(save.iteration, path, save.num_bytes, seconds, blocked, save.write_seconds)
        if error is not None:
            self._report_failure(save, error)
        else:
            self._failures = 0
            self.last = saved
        return saved

    def _open(self, fresh: bool, expected_bytes: int, expected_number: int) -> None:
        directory.check_writable(self.folder)
        self._lock = RunLock(self.folder, does="saves checkpoints to", option="--save")
        if self._lock.warning is None:
            directory.remove_incomplete_checkpoints(self.folder, self._storage, self._say)
        else:
            self._say(self._lock.warning)
        if fresh:
            directory.set_aside_checkpoints(self.folder, self._storage, self._say)
        directory.repair_tracker(self.folder, self._storage, self._say)
        needed, free = _FREE_SPACE_MARGIN * expected_bytes, self._storage.free_bytes(self.folder)
        if free < needed:
            self._lock.release()
            raise EnvironmentProblem(
                f"a checkpoint of this run takes {num_bytes_text(expected_bytes)}, and {self.folder} has "
                f"{num_bytes_text(free)} free: free {num_bytes_text(needed - free)} for a margin of 10 %, give another "
                f"--save folder, or use --no-save-optim to save weights only"
            )
        missing = (expected_number - len(directory.list_checkpoints(self.folder))) * needed - free
        if missing > 0:
            self._say(
                f"warning: this run keeps up to {expected_number} checkpoints of {num_bytes_text(expected_bytes)}, and "
                f"{self.folder} has {num_bytes_text(free)} free, enough for {int(free // needed)} more: free "
                f"{num_bytes_text(missing)}, give another --save folder, or keep fewer with --keep-last-checkpoints"
            )

    def _deduplicate(self, tensors: Mapping[str, TensorShard]) -> dict[str, TensorShard]:
        """Selects the boxes (n-d slices) that this rank writes. The lowest rank that holds a box writes it."""
        digests = [digest(key, box.offset, tuple(box.data.shape)) for key, t in tensors.items() for box in t.boxes]
        # collective over world: 8 bytes per box of every rank
        lower = set(split_digests(b"".join(self._gather(b"".join(digests))[: self._context.rank])))
        each = iter(digests)
        kept = {
            key: TensorShard(tensor.shape, tuple(box for box in tensor.boxes if next(each) not in lower))
            for key, tensor in tensors.items()
        }
        return {key: tensor for key, tensor in kept.items() if tensor.boxes}

    def _make_temporary(self, save: _PendingSave) -> str | None:
        """Creates the temporary folder. Returns an error message if this fails or if disk space is insufficient,
        otherwise None."""
        try:
            self._storage.make_dir(save.temporary)
            if self._storage.free_bytes(save.temporary) < save.needed_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            return f"rank 0: {self._describe(error, save.needed_bytes)}"
        return None

    def _write(self, save: _PendingSave) -> _WriteResult:
        """Writes the files of this rank into the temporary folder."""
        result, begin = _WriteResult(), time.monotonic()
        calls = [
            partial(write_tensors, self._storage, save.temporary / name, part, save.cancelled.is_set)
            for prefix, parts in _file_parts(save.tensors).items()
            for name, part in zip(_file_names(prefix, save.plans, self._context.rank), parts, strict=True)
        ]
        try:
            # With at most two files, at least one is too small to gain from a thread.
            for file, tensors in run_parallel(calls) if len(calls) > 2 else (call() for call in calls):
                result.files |= file
                result.tensors |= tensors
            for name, text in save.texts.items():
                data = text.encode()
                self._storage.write_file(save.temporary / name, [data])
                result.files[name] = FileEntry(size=len(data), head=len(data), crc32=checksum(data))
        except OSError as error:
            result.error = self._describe(error, save.needed_bytes)
        result.seconds = time.monotonic() - begin
        return result

    def _commit(self, save: _PendingSave, written: Sequence[_WriteResult]) -> _CommitResult:
        """Writes the manifest and renames the temporary folder. Then updates the tracker file and deletes old
        checkpoints; failures of these two steps are only warnings."""
        ranks = {axis: self._context.group(axis).size for axis in ("tp", "cp", "dp", "pp", "ep", "etp", "edp")}
        files = {name: entry for part in written for name, entry in part.files.items()}
        manifest = Manifest(save.iteration, WRITER, ranks, files, merge_entries([part.tensors for part in written]))
        content = encode(manifest)
        messages: list[str] = []
        try:
            decode(content)  # checks that the boxes of all ranks cover every tensor exactly once
            self._storage.write_file(save.temporary / MANIFEST, [content])
            self._storage.sync_dir(save.temporary)
            self._rename(save, messages)
            self._storage.sync_dir(self.folder)
        except OSError as error:
            return self._describe(error, 0), messages
        except CorruptCheckpoint as problem:
            return str(problem), messages
        self._update_folder(Candidate(save.final, save.iteration), messages)
        return None, messages

    def _rename(self, save: _PendingSave, messages: list[str]) -> None:
        """Renames the temporary folder to `save.final`. Replaces an existing checkpoint, and restores it on failure."""
        if not save.final.exists():
            self._storage.rename(save.temporary, save.final)
            return
        replaced = self.folder / f".replaced-{save.final.name}-{uuid.uuid4().hex[:12]}"
        self._storage.rename(save.final, replaced)
        try:
            self._storage.rename(save.temporary, save.final)
        except OSError:
            self._storage.rename(replaced, save.final)
            raise
        directory.remove(replaced, self._storage, messages.append)

    def _describe(self, error: OSError, needed: int) -> str:
        text = f"{error.strerror} (errno {error.errno})"
        if not needed or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return text
        try:
            free = str(self._storage.free_bytes(self.folder))
        except OSError:
            free = "an unknown number"
        return f"{text}; the checkpoint needs {needed} bytes with 10 % to spare, {free} are free"

    def _report_failure(self, save: _PendingSave, error: str) -> None:
        """Logs a failed save and removes its files. Raises SaveProblem after `stop_after` consecutive failures."""
        self._failures += 1
        if self._context.is_first and save.temporary.exists():
            directory.remove(save.temporary, self._storage, self._say)
        sentence = f"the checkpoint of iteration {save.iteration} could not be saved to {self.folder}: {error}"
        if self._failures >= self._stop_after:
            raise SaveProblem(f"{sentence}; failure {self._failures} in a row: free disk space or repair the folder")
        if self._context.is_first:
            self._say(f"{sentence}; training continues; failure {self._failures} of {self._stop_after} in a row")

    def _update_folder(self, saved: Candidate, messages: list[str]) -> None:
        """Updates the tracker file and deletes checkpoints that are not retained. Appends failures to `messages`."""
        try:
            directory.write_tracker(self.folder, saved.iteration, self._storage)
        except OSError as error:
            messages.append(
                f"could not write {self.folder / directory.TRACKER}: {error.strerror}; the file is only a "
                "hint for users and tools"
            )
        protected = [saved.path, *([self.loaded_from] if self.loaded_from else [])]
        self.retention.apply(self.folder, protected, self._storage, messages.append)

    def _gather(self, value: Any) -> list[Any]:
        # collective over world: the manifest entries of one rank, a few hundred bytes per tensor
        return gather_objects(value, self._group)


def _file_names(prefix: str, plans: Sequence[_RankPlan], rank: int) -> list[str]:
    """Names of the files with this prefix that `rank` writes. Files are numbered consecutively over all ranks."""
    num_files = [plan.num_files[prefix] for plan in plans]
    first, total = sum(num_files[:rank]), sum(num_files)
    return [f"{prefix}-{first + number:05d}-of-{total:05d}.safetensors" for number in range(num_files[rank])]


def _file_parts(tensors: Mapping[str, TensorShard]) -> dict[str, list[dict[str, TensorShard]]]:
    """Assigns the tensors of one rank to files. Returns: file name prefix -> list with the tensors of each file."""
    weights = {key: tensor for key, tensor in tensors.items() if is_weight(key)}
    others = {key: tensor for key, tensor in tensors.items() if key not in weights}
    return {"model": partition_tensors(weights), "optim": partition_tensors(others)}


@contextmanager
def _blocking(save: _PendingSave) -> Iterator[None]:
    """Context manager that adds the time spent in its body to `save.blocked`."""
    begin = time.monotonic()
    try:
        yield
    finally:
        save.blocked += time.monotonic() - begin
