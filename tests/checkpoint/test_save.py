"""Saving: files, folder lock, retention, and failures of the file system."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_moe.checkpoint import tensor_shards
from megatron_moe.checkpoint.load import find_checkpoint, load_checkpoint
from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.checkpoint.tensor_shards import PendingBox, TensorBox, TensorShard, partition_tensors
from megatron_moe.config import param_meta
from megatron_moe.config.checkpoint import CheckpointConfig
from megatron_moe.config.exit_codes import EnvironmentProblem, ExitCode, SaveProblem
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.checkpoint_files import (
    FaultyStorage,
    disk_full,
    load_some,
    save_some,
    saved_folder,
    some_state,
    some_tensors,
    verify,
    whole,
)
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT

ONE = ParallelContext.single()


def iterations(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("iter_")) for path in folder.glob("iter_*"))


def opened(folder: Path) -> list[str]:
    """Opens a folder for saving and returns the log lines."""
    said: list[str] = []
    CheckpointSaver(folder, ONE, say=said.append).close()
    return said


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.startswith((".tmp", ".old", ".replaced")))


def test_a_checkpoint_holds_json_and_safetensors_and_nothing_else(tmp_path: Path) -> None:
    folder = saved_folder(tmp_path / "save", 20)
    assert sorted(path.name for path in (folder / "iter_0000020").iterdir()) == [
        "manifest.json",
        "model-00000-of-00001.safetensors",
        "optim-00000-of-00001.safetensors",
        "run.yaml",
        "train_state.json",
    ]
    assert json.loads((folder / "iter_0000020" / "train_state.json").read_text()) == some_state(20)
    assert (folder / "iter_0000020" / "run.yaml").read_text() == "a: 1\n"
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "20"
    assert leftovers(folder) == []


def test_weights_have_their_global_names_in_the_safetensors_file(tmp_path: Path) -> None:
    folder = saved_folder(tmp_path, 20)
    weights = load_file(folder / "iter_0000020" / "model-00000-of-00001.safetensors")
    expected = {key.removeprefix("model."): t for key, t in some_tensors(20).items() if key.startswith("model.")}
    EXACT.check_all(weights, expected, "weights")
    assert {name: t.dtype for name, t in weights.items()} == {name: t.dtype for name, t in expected.items()}


def test_noncontiguous_views_are_saved_with_their_values(tmp_path: Path) -> None:
    tensor = torch.arange(24.0).view(4, 6)
    saver = CheckpointSaver(tmp_path, ONE)
    saver.save(1, {"model.a": TensorShard.whole(tensor.T), "model.b": TensorShard.whole(tensor[:, 1::2])}, {})
    weights = load_file(tmp_path / "iter_0000001" / "model-00000-of-00001.safetensors")
    EXACT.check_all(weights, {"a": tensor.T, "b": tensor[:, 1::2]})


def test_every_box_of_a_tensor_is_stored_separately(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).view(3, 4)
    boxes = (TensorBox((0, 0), matrix[:1]), TensorBox((1, 0), matrix[1:, :3]), TensorBox((1, 3), matrix[1:, 3:]))
    CheckpointSaver(tmp_path, ONE).save(1, {"model.a": TensorShard((3, 4), boxes)}, {})
    weights = load_file(tmp_path / "iter_0000001" / "model-00000-of-00001.safetensors")
    EXACT.check_all(weights, {"a@0,0": matrix[:1], "a@1,0": matrix[1:, :3], "a@1,3": matrix[1:, 3:]})
    assert verify(tmp_path / "iter_0000001") == []


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        ({}, [10, 20, 30, 40, 50]),
        ({"keep_last": 2}, [40, 50]),
        ({"retain_interval": 20}, [20, 40, 50]),
        ({"retain_interval": 40, "keep_last": 2}, [40, 50]),
    ],
)
def test_retention_keeps_the_newest_and_multiples_of_the_interval(tmp_path: Path, retention: dict, kept: list) -> None:
    assert iterations(saved_folder(tmp_path, 10, 20, 30, 40, 50, **retention)) == kept
    assert leftovers(tmp_path) == []


def test_retention_keeps_the_checkpoint_with_the_lowest_validation_loss(tmp_path: Path) -> None:
    """Checkpoints with unknown losses or torn files do not count; of equal losses, the newest is kept."""
    saver = CheckpointSaver(tmp_path, ONE, keep_last=1, keep_best=True, say=lambda line: None)
    for iteration, loss in ((10, 3.0), (20, 2.0), (30, None), (40, 2.5), (50, 2.0), (60, 9.0)):
        saver.save(iteration, {"model.a": TensorShard.whole(torch.zeros(2))}, {"state": {"validation_loss": loss}})
    assert iterations(tmp_path) == [50, 60]
    (tmp_path / "iter_0000050" / "train_state.json").write_text("{")
    save_some(saver, 70)
    assert iterations(tmp_path) == [60, 70]


def test_retention_keeps_the_loaded_and_the_latest_checkpoint(tmp_path: Path) -> None:
    saver = CheckpointSaver(saved_folder(tmp_path, 10, 20, 500), ONE, keep_last=1, say=lambda line: None)
    saver.loaded_from = tmp_path / "iter_0000020"
    save_some(saver, 30)
    assert iterations(tmp_path) == [20, 30, 500]


def test_a_checkpoint_that_cannot_be_deleted_is_kept_with_a_warning(tmp_path: Path) -> None:
    def refuse(number: int, operation: str, path: Path) -> OSError | None:
        return PermissionError(errno.EPERM, "Operation not permitted") if path.name.startswith(".old-") else None

    said: list[str] = []
    saver = CheckpointSaver(tmp_path, ONE, keep_last=1, storage=FaultyStorage(fail=refuse), say=said.append)
    assert save_some(saver, 10) and save_some(saver, 20)
    assert iterations(tmp_path) == [10, 20]
    assert said == [
        f"could not delete the old checkpoint {tmp_path / 'iter_0000010'}: Operation not permitted; it is kept"
    ]


def test_a_checkpoint_of_the_same_iteration_is_replaced(tmp_path: Path) -> None:
    saver = CheckpointSaver(tmp_path, ONE, say=lambda line: None)
    saver.save(10, {"model.a": TensorShard.whole(torch.zeros(2))}, {})
    save_some(saver, 10)
    loaded, tensors = load_some(tmp_path)
    EXACT.check_all(tensors, some_tensors(10))
    assert leftovers(tmp_path) == []


def test_insufficient_space_fails_the_save_before_anything_is_written(tmp_path: Path) -> None:
    class Small(FaultyStorage):
        def free_bytes(self, path: Path) -> int:
            return 100

    said: list[str] = []
    saver = CheckpointSaver(tmp_path, ONE, storage=(storage := Small()), say=said.append)
    assert save_some(saver, 10) is None
    ended = saver.start(20, whole(some_tensors(20)), {})
    assert ended is not None and ended.path is None and saver.pending is None, "asynchronous"
    assert not any(moment.startswith("write") for moment in storage.moments), storage.moments
    space = "the checkpoint needs 589 bytes with 10 % to spare, 100 are free"
    assert f"No space left on device (errno 28); {space}" in said[0]
    assert iterations(tmp_path) == [] and leftovers(tmp_path) == []


def test_a_folder_without_space_for_one_checkpoint_is_rejected_at_start(tmp_path: Path) -> None:
    class Small(FaultyStorage):
        def free_bytes(self, path: Path) -> int:
            return 11 * 10**8

    sentence = f"of this run takes 1.01 GB, and {tmp_path} has 1.1 GB free: free 11 MB for a margin of 10 %"
    with pytest.raises(EnvironmentProblem, match=sentence):
        CheckpointSaver(tmp_path, ONE, storage=Small(), expected_bytes=101 * 10**7)
    CheckpointSaver(tmp_path, ONE, storage=Small(), expected_bytes=10**9).close()


def test_a_folder_without_space_for_all_checkpoints_is_a_warning_at_start(tmp_path: Path) -> None:
    class Small(FaultyStorage):
        def free_bytes(self, path: Path) -> int:
            return 25 * 10**8

    def open_saver(number: int) -> list[str]:
        said: list[str] = []
        expected = {"expected_bytes": 10**9, "expected_number": number}
        CheckpointSaver(tmp_path, ONE, storage=Small(), say=said.append, **expected).close()
        return said

    assert open_saver(2) == []
    assert open_saver(4) == [
        f"warning: this run keeps up to 4 checkpoints of 1 GB, and {tmp_path} has 2.5 GB free, enough for 2 more: "
        "free 1.9 GB, give another --save folder, or keep fewer with --keep-last-checkpoints"
    ]
    for iteration in (10, 20):
        save_some(saver := CheckpointSaver(tmp_path, ONE), iteration)
        saver.close()
    assert open_saver(4) == [], "two of the four are in the folder already"


@pytest.mark.parametrize(
    ("number", "retention"),
    [
        (10, {}),
        (4, {"keep_last_checkpoints": 3}),
        (5, {"keep_last_checkpoints": 3, "keep_best_checkpoint": True}),
        (4, {"save_retain_interval": 50}),
        (10, {"keep_last_checkpoints": 30}),
        (1, {"save_interval": None}),
        (4, {"save_interval": 33}),
    ],
)
def test_maximum_number_of_checkpoints_during_a_run(number: int, retention: dict) -> None:
    assert CheckpointConfig(**{"save_interval": 10} | retention).max_num_checkpoints(100) == number


def test_the_third_consecutive_failed_save_ends_the_run(tmp_path: Path) -> None:
    broken = True

    def fail(number: int, operation: str, path: Path) -> OSError | None:
        return disk_full(number, operation, path) if broken and operation == "write" else None

    said: list[str] = []
    saver = CheckpointSaver(tmp_path, ONE, storage=FaultyStorage(fail=fail), say=said.append)
    assert save_some(saver, 10) is None and save_some(saver, 20) is None
    broken = False
    assert save_some(saver, 30) == tmp_path / "iter_0000030", "a success starts the count anew"
    broken = True
    assert save_some(saver, 40) is None and save_some(saver, 50) is None
    assert len(said) == 4 and "iteration 10" in said[0] and "training continues" in said[0]
    with pytest.raises(SaveProblem, match="iteration 60 .* failure 3 in a row") as problem:
        save_some(saver, 60)
    assert problem.value.code == ExitCode.SAVE_FAILED
    assert iterations(tmp_path) == [30] and leftovers(tmp_path) == []


def test_a_failing_tracker_is_a_warning_after_the_commit(tmp_path: Path) -> None:
    def fail(number: int, operation: str, path: Path) -> OSError | None:
        return disk_full(number, operation, path) if "latest" in path.name else None

    said: list[str] = []
    saver = CheckpointSaver(tmp_path, ONE, storage=FaultyStorage(fail=fail), say=said.append)
    assert save_some(saver, 10) == tmp_path / "iter_0000010"
    assert "tracker" in said[0]


def test_saving_recovers_after_a_mount_disappeared(tmp_path: Path) -> None:
    folder = tmp_path / "save"
    saver = CheckpointSaver(folder, ONE, say=lambda line: None)
    folder.rename(tmp_path / "away")
    assert save_some(saver, 10) is None
    (tmp_path / "away").rename(folder)
    assert save_some(saver, 20) == folder / "iter_0000020"


def test_a_second_job_is_rejected_with_the_owner_of_the_lock(tmp_path: Path) -> None:
    first = CheckpointSaver(tmp_path, ONE)
    with pytest.raises(EnvironmentProblem, match=f"another job saves .* process {os.getpid()} on .*, started 20"):
        CheckpointSaver(tmp_path, ONE)
    first.close()
    CheckpointSaver(tmp_path, ONE).close()


def test_incomplete_checkpoints_and_nothing_else_are_removed_at_start(tmp_path: Path) -> None:
    saved_folder(tmp_path, 10)
    for name in (".tmp-iter_0000020-abc", ".old-iter_0000005-abc", ".replaced-iter_0000010-abc", "notes", "iter_abc"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    said = opened(tmp_path)
    assert leftovers(tmp_path) == []
    assert (tmp_path / "notes" / "file").exists() and (tmp_path / "iter_abc" / "file").exists()
    assert len(said) == 3 and all(line.startswith("removed stale .") for line in said), said


def test_a_checkpoint_whose_replacement_crashed_is_restored(tmp_path: Path) -> None:
    saved_folder(tmp_path, 10, 20)
    (tmp_path / "iter_0000020").rename(tmp_path / ".replaced-iter_0000020-abc")
    assert opened(tmp_path) == [f"restored iter_0000020 in {tmp_path}: a crash interrupted its replacement"]
    assert load_some(tmp_path)[0].iteration == 20


@pytest.mark.parametrize("text", ["", "abc", "999999", "release", "10\x00\xff"])
def test_a_damaged_tracker_is_corrected_at_start(tmp_path: Path, text: str) -> None:
    saved_folder(tmp_path, 10)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text(text)
    said = opened(tmp_path)
    assert tracker.read_text() == "10"
    assert len(said) == 1 and "corrected the file" in said[0]


def test_fresh_moves_earlier_checkpoints_aside_and_deletes_none(tmp_path: Path) -> None:
    saved_folder(tmp_path, 10, 20)
    for number in (1, 2):
        saver = CheckpointSaver(tmp_path, ONE, fresh=True, say=lambda line: None)
        save_some(saver, 5)
        saver.close()
        assert iterations(tmp_path) == [5]
        aside = tmp_path / f"set-aside-{number:03d}"
        assert iterations(aside) == ([10, 20] if number == 1 else [5])
        assert all(verify(path) == [] for path in aside.glob("iter_*"))


def test_the_first_rank_writes_and_all_ranks_return_the_result(tmp_path: Path) -> None:
    def full_on_write(number: int, operation: str, path: Path) -> OSError | None:
        return disk_full(number, operation, path) if operation == "write" else None

    def save(context: ParallelContext) -> list[Path | None]:
        outcomes = []
        for name, storage in (("healthy", FaultyStorage()), ("full", FaultyStorage(fail=full_on_write))):
            saver = CheckpointSaver(tmp_path / name, context, storage=storage, say=lambda line: None)
            outcomes.append(save_some(saver, 10))
            assert (storage.moments == []) == (context.rank > 0), f"rank {context.rank} did {storage.moments}"
            saver.close()
        return outcomes

    assert on_threads(ParallelConfig(world_size=2), save) == [[tmp_path / "healthy" / "iter_0000010", None]] * 2
    assert verify(tmp_path / "healthy" / "iter_0000010") == []
    assert iterations(tmp_path / "full") == [] and leftovers(tmp_path / "full") == []


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_an_unwritable_folder_is_rejected_on_every_rank(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("in the way")

    def refused(context: ParallelContext) -> None:
        with pytest.raises(EnvironmentProblem, match="cannot write to the --save folder"):
            CheckpointSaver(tmp_path / name, context)

    on_threads(ParallelConfig(world_size=2), refused)


def test_durations_of_the_last_save_are_recorded(tmp_path: Path) -> None:
    saver = CheckpointSaver(tmp_path, ONE)
    assert saver.last is None
    save_some(saver, 10)
    assert saver.last is not None and saver.last.iteration == 10
    assert 0.0 < saver.last.write_seconds < saver.last.seconds == saver.last.blocked_seconds < 60.0


def test_every_rank_writes_the_boxes_that_no_lower_rank_holds(tmp_path: Path) -> None:
    matrix = torch.arange(24.0).view(4, 6)

    def main(context: ParallelContext) -> None:
        # ranks 0 and 1 hold the upper half, 2 and 3 the lower one; all hold the step
        top = 2 * (context.rank // 2)
        half = TensorShard((4, 6), (TensorBox((top, 0), matrix[top : top + 2]),))
        step = TensorShard.whole(torch.tensor(7))
        saver = CheckpointSaver(tmp_path, context, say=lambda line: None)
        assert saver.save(1, {"model.a": half, "optimizer.step": step}, {"iteration": 1}) is not None
        saver.close()

    on_threads(ParallelConfig(world_size=4), main)
    names = sorted(path.name for path in (tmp_path / "iter_0000001").glob("*.safetensors"))
    assert names == [
        "model-00000-of-00002.safetensors",
        "model-00001-of-00002.safetensors",
        "optim-00000-of-00001.safetensors",
    ]
    assert verify(tmp_path / "iter_0000001") == []
    loaded = torch.zeros(4, 6)
    source = find_checkpoint(CheckpointConfig(save=tmp_path), ONE)
    assert source is not None
    load_checkpoint(
        source, {"model.a": TensorShard.whole(loaded), "optimizer.step": TensorShard.whole(torch.tensor(0))}, ONE
    )
    EXACT.check(loaded, matrix, "both halves")


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowers the size threshold so that small states are split over several files."""
    monkeypatch.setattr(tensor_shards, "_MIN_BYTES_PER_THREAD", 100)


@pytest.mark.usefixtures("large")
def test_a_large_state_is_written_to_several_files(tmp_path: Path) -> None:
    def save(context: ParallelContext) -> None:
        first = {"model.a": TensorShard.whole(torch.arange(100.0)), "model.b": TensorShard.whole(torch.ones(99))}
        second = {f"master.{name}": TensorShard.whole(torch.full((40,), 2.0)) for name in "abcd"}
        assert CheckpointSaver(tmp_path, context).save(1, second if context.rank else first, {}) is not None

    on_threads(ParallelConfig(world_size=2), save)
    names = sorted(path.name for path in (tmp_path / "iter_0000001").glob("*.safetensors"))
    model = [f"model-{number:05d}-of-00002.safetensors" for number in range(2)]
    assert names == [*model, *(f"optim-{number:05d}-of-00003.safetensors" for number in range(3))]
    assert verify(tmp_path / "iter_0000001") == []
    weights = {key: t for name in model for key, t in load_file(tmp_path / "iter_0000001" / name).items()}
    EXACT.check_all(weights, {"a": torch.arange(100.0), "b": torch.ones(99)})


@pytest.mark.usefixtures("large")
def test_an_error_in_one_of_several_files_leaves_nothing(tmp_path: Path) -> None:
    def refuse(number: int, operation: str, path: Path) -> OSError | None:
        return disk_full(number, operation, path) if path.name.startswith("optim-00001") else None

    said: list[str] = []
    saver = CheckpointSaver(tmp_path, ONE, storage=FaultyStorage(fail=refuse), say=said.append)
    state = {f"{kind}.{name}": TensorShard.whole(torch.ones(50)) for kind in ("model", "master") for name in "ab"}
    assert saver.save(1, state, {}) is None and "No space left on device" in said[0]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.usefixtures("large")
def test_partitions_are_balanced_and_pending_boxes_stay_in_one() -> None:
    state = {f"model.{size}": TensorShard.whole(torch.zeros(size)) for size in range(10, 30)}
    parts = partition_tensors(state)
    assert sorted(key for part in parts for key in part) == sorted(state)
    sizes = [tensor_shards.total_bytes(part) for part in parts]
    assert len(parts) == 3 and max(sizes) - min(sizes) <= 30 * 4
    later = TensorShard((99,), (PendingBox((0,), torch.zeros(99, device="meta"), lambda: torch.zeros(99)),))
    assert len(partition_tensors(state | {"model.later": later})) == 1
    assert partition_tensors({}) == []


def test_boxes_that_do_not_cover_a_tensor_fail_the_save(tmp_path: Path) -> None:
    said: list[str] = []
    saver = CheckpointSaver(tmp_path, ONE, say=said.append)
    upper_half = TensorShard((4, 6), (TensorBox((0, 0), torch.zeros(2, 6)),))
    assert saver.save(1, {"model.a": upper_half}, {}) is None
    assert "its boxes do not cover shape (4, 6) exactly once" in said[-1]
    assert iterations(tmp_path) == [] and leftovers(tmp_path) == []


def test_a_manifest_beyond_the_limit_of_reading_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("megatron_moe.checkpoint.manifest.MAX_MANIFEST_BYTES", 100)
    saver = CheckpointSaver(tmp_path, ONE, say=said.append)
    assert saver.save(1, {"model.a": TensorShard((4,), (TensorBox((0,), torch.zeros(4)),))}, {}) is None
    assert "more than the limit of 100" in said[-1]
    assert iterations(tmp_path) == [] and leftovers(tmp_path) == []


def test_any_flat_range_of_a_shard_is_split_into_boxes(tmp_path: Path) -> None:
    whole = torch.arange(3.0 * 8 * 5).view(3, 8, 5)
    held = (
        param_meta.ParamBox((1, 2, 0), (2, 2, 5)),
        param_meta.ParamBox((1, 6, 0), (2, 2, 5)),
    )  # tensor parallelism shards gate and up separately
    local = torch.cat([whole[1:3, 2:4], whole[1:3, 6:8]], dim=1)
    for start, end in ((0, 40), (0, 1), (3, 4), (7, 33), (19, 21), (20, 40), (39, 40), (5, 5)):
        flat = local.flatten()[start:end].clone()
        part = TensorShard.part((3, 8, 5), held, 1, flat, start)
        found = torch.full_like(whole, -1)
        for box in part.boxes:
            found[tuple(slice(o, o + n) for o, n in zip(box.offset, box.data.shape, strict=True))] = box.data
            box.data.fill_(-2)
        assert (flat == -2).all(), "boxes are views of the range"
        assert sorted(found[found >= 0].tolist()) == sorted(local.flatten()[start:end].tolist())
        assert torch.equal(found[found >= 0], whole[found >= 0])


def test_a_shard_of_a_scalar_is_its_value() -> None:
    part = TensorShard.part((), (param_meta.ParamBox((), ()),), 0, torch.tensor([4.0]))
    assert part.boxes[0].offset == () and part.boxes[0].data.item() == 4.0
