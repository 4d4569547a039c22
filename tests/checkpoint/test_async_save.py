"""Asynchronous saves write the bytes of synchronous saves and never leave an incomplete checkpoint."""

import errno
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from megatron_moe.checkpoint import save as save_module
from megatron_moe.checkpoint.async_save import HostBuffer, submit
from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.checkpoint.storage import Storage
from megatron_moe.checkpoint.tensor_shards import TensorBox, TensorShard
from megatron_moe.config.exit_codes import SaveProblem
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.checkpoint_files import (
    FaultyStorage,
    disk_full,
    load_some,
    save_some,
    some_state,
    some_tensors,
    verify,
    whole,
)
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT

ONE = ParallelContext.single()
PATIENCE = 120.0


class Gated(Storage):
    """Storage that blocks every write until `gate` is set."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        assert self.gate.wait(timeout=600)
        super().write_file(path, chunks)


def silent(line: str) -> None:
    pass


def writers() -> set[threading.Thread]:
    """Live writer threads, including unfinished ones of earlier tests."""
    return {thread for thread in threading.enumerate() if thread.name == "checkpoint"}


def start_some(saver: CheckpointSaver, iteration: int) -> None:
    """Starts a save and immediately overwrites the tensors that it saves, as training would."""
    tensors = some_tensors(iteration)
    started = saver.start(iteration, whole(tensors), some_state(iteration), texts={"run.yaml": "a: 1\n"})
    assert started is None and saver.pending == iteration
    for tensor in tensors.values():
        tensor.zero_()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_equal_those_of_a_synchronous_save_although_tensors_change(tmp_path: Path) -> None:
    plain, background = CheckpointSaver(tmp_path / "a", ONE), CheckpointSaver(tmp_path / "b", ONE, keep_last=1)
    for iteration in (10, 20):
        save_some(plain, iteration)
        start_some(background, iteration)
        saved = background.wait()
        assert saved is not None and saved == background.last and background.pending is None
        name = f"iter_{iteration:07d}"
        assert saved.path == tmp_path / "b" / name
        assert contents(tmp_path / "a" / name) == contents(tmp_path / "b" / name)
    assert [path.name for path in (tmp_path / "b").glob("iter_*")] == ["iter_0000020"], "retention"
    assert (tmp_path / "b" / "latest_checkpointed_iteration.txt").read_text() == "20"


def test_slow_storage_does_not_block_the_caller(tmp_path: Path) -> None:
    saver = CheckpointSaver(tmp_path, ONE, storage=(storage := Gated()))
    start_some(saver, 10)
    assert saver.poll() is None and list(tmp_path.glob("iter_*")) == []
    storage.gate.set()
    saved = saver.wait()
    assert saved is not None and verify(tmp_path / "iter_0000010") == []
    assert 0.0 < saved.blocked_seconds <= saved.seconds and saved.num_bytes > 400
    assert saver.poll() is None and saver.wait() is None


def test_no_checkpoint_is_visible_until_the_last_rank_has_written(tmp_path: Path) -> None:
    at_work = threading.Barrier(2)

    def main(context: ParallelContext) -> bool:
        half = torch.full((2, 3), float(context.rank))
        boxes = {"model.a": TensorShard((4, 3), (TensorBox((2 * context.rank, 0), half),))}
        storage = Gated()
        saver = CheckpointSaver(tmp_path, context, storage=storage, say=silent)
        if context.rank == 0:
            storage.gate.set()
        assert saver.start(1, boxes, {"iteration": 1}) is None
        for _ in range(3):
            assert saver.poll() is None, "rank 1 has not written"
        assert list(tmp_path.glob("iter_*")) == []
        storage.gate.set()
        while (saved := saver.poll()) is None:
            at_work.wait()
        saver.close()
        return saved.path == tmp_path / "iter_0000001"

    assert on_threads(ParallelConfig(world_size=2), main) == [True, True]
    assert verify(tmp_path / "iter_0000001") == []


def test_a_failure_in_the_thread_is_reported_and_leaves_no_files(tmp_path: Path) -> None:
    """`--on-save-failure` applies to asynchronous saves too."""

    def fail(number: int, operation: str, path: Path) -> OSError | None:
        return disk_full(number, operation, path) if operation == "write" else None

    def main(context: ParallelContext) -> list[str]:
        said: list[str] = []
        storage = FaultyStorage(fail=fail) if context.rank == 1 else Storage()
        saver = CheckpointSaver(tmp_path, context, storage=storage, stop_after=2, say=said.append)
        half = {"model.a": TensorShard((2, 3), (TensorBox((context.rank, 0), torch.ones(1, 3)),))}
        assert saver.start(1, half, {}) is None
        saved = saver.wait()
        assert saved is not None and saved.path is None and saver.last is None
        assert saver.start(2, half, {}) is None
        with pytest.raises(SaveProblem, match="iteration 2 .* rank 1: No space left .* failure 2 in a row"):
            saver.wait()
        saver.close()
        return said

    first, second = on_threads(ParallelConfig(world_size=2), main)
    assert "iteration 1 could not be saved" in first[0] and "rank 1: No space left on device" in first[0]
    assert second == []
    assert not list(tmp_path.glob("iter_*")) and not list(tmp_path.glob(".tmp*"))


def test_close_cancels_an_unwritten_save_and_the_next_start_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates a process that exits in the middle of a save."""
    saver = CheckpointSaver(tmp_path, ONE, storage=(storage := Gated()))
    save_some_after(saver, storage, 10)
    storage.gate.clear()
    before = writers()
    start_some(saver, 20)
    threads = writers() - before
    assert threads and all(thread.daemon for thread in threads), "the process would wait for it"
    monkeypatch.setattr(save_module, "_CLOSE_TIMEOUT_S", 0.1)
    saver.close()
    said: list[str] = []
    second = CheckpointSaver(tmp_path, ONE, say=said.append)
    assert len(said) == 1 and said[0].startswith("removed stale .tmp-iter_0000020")
    storage.gate.set()
    for thread in threads:
        thread.join()
    assert load_some(tmp_path)[0].iteration == 10
    second.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises the timeout of `close`, which a slow machine could exceed."""
    monkeypatch.setattr(save_module, "_CLOSE_TIMEOUT_S", PATIENCE)


class Slow(Storage):
    """Storage that reads the chunks of a file slowly and counts them."""

    def __init__(self) -> None:
        self.num_chunks = 0

    def write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        for _ in chunks:
            self.num_chunks += 1
            time.sleep(0.2)


def test_close_waits_for_the_writer_thread(tmp_path: Path, patient: None) -> None:
    """A thread that runs tensor operations during interpreter shutdown would abort the process."""
    before = writers()
    saver = CheckpointSaver(tmp_path, ONE, storage=(storage := Slow()))
    tensors = {f"model.{number}": torch.zeros(2) for number in range(1000)}
    saver.start(20, whole(tensors), {"iteration": 20})
    while not storage.num_chunks:
        time.sleep(0.01)
    (thread,) = writers() - before
    saver.close()
    written = storage.num_chunks
    thread.join(PATIENCE)  # the thread may still run its last statements
    assert not thread.is_alive() and storage.num_chunks == written < 100
    assert not list(tmp_path.glob("iter_*"))


def test_close_completes_a_commit_and_returns_its_iteration(tmp_path: Path, patient: None) -> None:
    saver = CheckpointSaver(tmp_path, ONE, storage=(storage := GatedCommit()))
    start_some(saver, 20)
    while not storage.reached.is_set():
        saver.poll()
    threading.Timer(0.2, storage.gate.set).start()
    assert saver.close() == 20 and saver.close() is None
    assert load_some(tmp_path)[0].iteration == 20


class GatedCommit(Storage):
    """Storage that blocks the final rename of a checkpoint until `gate` is set."""

    def __init__(self) -> None:
        self.gate, self.reached = threading.Event(), threading.Event()

    def rename(self, source: Path, target: Path) -> None:
        self.reached.set()
        assert self.gate.wait(timeout=600)
        super().rename(source, target)


def save_some_after(saver: CheckpointSaver, storage: Gated, iteration: int) -> None:
    storage.gate.set()
    assert save_some(saver, iteration) is not None


def test_the_host_buffer_copies_any_view_and_dtype_and_is_reused() -> None:
    base = torch.arange(24.0).view(4, 6)
    tensors = {
        "a": TensorShard((6, 4), (TensorBox((0, 0), base.T),)),
        "b": TensorShard((4, 2), (TensorBox((0, 0), base[:2, ::3]), TensorBox((2, 0), base[2:, ::3]))),
        "c": TensorShard.whole(torch.tensor(7)),
        "d": TensorShard.whole(torch.ones(3, dtype=torch.bool)),
        "e": TensorShard.whole(torch.zeros(0, 3)),
        "f": TensorShard.whole(torch.ones(5, dtype=torch.bfloat16)),
    }
    buffer = HostBuffer()
    places = []
    for _ in range(2):
        taken = buffer.copy(tensors)
        for key, tensor in tensors.items():
            assert taken[key].shape == tensor.shape
            for copy, box in zip(taken[key].boxes, tensor.boxes, strict=True):
                assert copy.offset == box.offset and copy.data.dtype == box.data.dtype and copy.data.is_contiguous()
                EXACT.check(copy.data, box.data, key)
        places.append([box.data.data_ptr() for tensor in taken.values() for box in tensor.boxes if box.data.numel()])
        base += 1
    assert places[0] == places[1] and len(set(places[0])) == len(places[0])


def test_the_caller_receives_an_exception_of_the_thread() -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "injected")

    for in_thread in (False, True):
        with pytest.raises(OSError, match="injected"):
            submit(fail, in_thread=in_thread).result()
