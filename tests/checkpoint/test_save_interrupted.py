"""Wherever a save is interrupted, its checkpoint is complete or absent, and no committed checkpoint is lost."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.checkpoint_files import (
    FaultyStorage,
    Killed,
    load_some,
    save_some,
    saved_folder,
    some_state,
    some_tensors,
    verify,
    whole,
)
from tests.helpers.tolerances import EXACT

ONE = ParallelContext.single()
SCENARIOS = {
    "another iteration, the oldest goes": ((10, 20), 30, 20),
    "the newest iteration again": ((10, 20), 20, 20),
    "the first checkpoint": ((), 10, None),
}
"""Maps names to (iterations of the existing checkpoints, iteration to save, newest iteration that must survive)."""


def start(folder: Path, storage: FaultyStorage) -> CheckpointSaver:
    return CheckpointSaver(folder, ONE, keep_last=2, storage=storage, say=lambda line: None)


def template(folder: Path, iterations: tuple[int, ...]) -> Path:
    folder.mkdir()
    return saved_folder(folder, *iterations)


def save_in_background(saver: CheckpointSaver, iteration: int) -> None:
    assert saver.start(iteration, whole(some_tensors(iteration)), some_state(iteration)) is None
    saver.wait()


def moments_of(folder: Path, iteration: int, save: Callable = save_some) -> tuple[int, list[str]]:
    """Number of interruption points before the save, and names of all interruption points."""
    saver = start(folder, storage := FaultyStorage())
    before = len(storage.moments)
    save(saver, iteration)
    saver.close()
    return before, storage.moments


def check_all_visible(folder: Path, newest: int | None) -> None:
    """Asserts that every visible checkpoint verifies, and that no committed checkpoint is lost."""
    for path in folder.glob("iter_*"):
        assert verify(path) == [], f"{path.name} is visible and incomplete"
    if newest is not None:
        loaded, tensors = load_some(folder)
        assert loaded.iteration >= newest, f"fell back from {newest} to {loaded.iteration}"
        EXACT.check_all(tensors, some_tensors(loaded.iteration), "tensors")


@pytest.mark.parametrize("save", [save_some, save_in_background])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_kill_at_any_moment_loses_no_committed_checkpoint(tmp_path: Path, name: str, save: Callable) -> None:
    there, iteration, newest = SCENARIOS[name]
    original = template(tmp_path / "original", there)
    before, moments = moments_of(Path(shutil.copytree(original, tmp_path / "counted")), iteration, save)
    assert len(moments) - before >= 23, f"only {len(moments) - before} moments: {moments}"
    for moment in range(before, len(moments)):
        folder = Path(shutil.copytree(original, tmp_path / f"killed-{moment}"))
        saver = start(folder, FaultyStorage(kill_at=moment))
        with pytest.raises(Killed):
            save(saver, iteration)
        saver.close()  # the operating system would release the lock of a dead process
        replacing = moments[moment].startswith("rename iter_") and iteration in there
        if not replacing:
            check_all_visible(folder, newest)
        saver = start(folder, FaultyStorage())
        check_all_visible(folder, newest)
        hidden = sorted(p.name for p in folder.iterdir() if p.name.startswith((".tmp", ".old", ".replaced")))
        assert hidden == [], f"killed at {moments[moment]}: {hidden} stays"
        assert save_some(saver, 40) is not None
        saver.close()
        assert load_some(folder)[0].iteration == 40
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["disk full", "input/output error"])
def test_after_an_error_at_any_moment_the_next_save_succeeds(tmp_path: Path, name: str, number: int) -> None:
    there, iteration, newest = SCENARIOS[name]
    original = template(tmp_path / "original", there)
    before, moments = moments_of(Path(shutil.copytree(original, tmp_path / "counted")), iteration)
    for moment in range(before, len(moments)):
        folder = Path(shutil.copytree(original, tmp_path / f"failed-{moment}"))
        error = OSError(number, "injected")
        saver = start(folder, FaultyStorage(fail=lambda n, op, path, m=moment, e=error: e if n == m else None))
        path = save_some(saver, iteration)
        check_all_visible(folder, newest if path is None else iteration)
        assert (path is not None) <= (folder / f"iter_{iteration:07d}").exists()
        assert save_some(saver, 40) is not None, f"after an error at {moments[moment]}"
        assert load_some(folder)[0].iteration == 40
        saver.close()
        shutil.rmtree(folder)
