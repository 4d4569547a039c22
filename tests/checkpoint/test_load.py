"""Loading detects all damage, selects the newest intact checkpoint, and lists all tensor_mismatches."""

import os
import pickle
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_moe.checkpoint import tensor_shards
from megatron_moe.checkpoint.load import LoadedCheckpoint, find_checkpoint, load_checkpoint
from megatron_moe.checkpoint.manifest import Manifest, TensorEntry, TensorPiece, checksum, decode, encode
from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.checkpoint.tensor_shards import TensorBox, TensorShard
from megatron_moe.config.checkpoint import CheckpointConfig
from megatron_moe.config.exit_codes import CheckpointProblem, ExitCode
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.checkpoint_files import (
    blank,
    flip_bit,
    load_some,
    rewrite_text,
    saved_folder,
    some_state,
    some_tensors,
    verify,
    whole,
)
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT

ONE = ParallelContext.single()


def silent(line: str) -> None:
    pass


def read_manifest(path: Path) -> Manifest:
    return decode((path / "manifest.json").read_bytes())


def rewrite_manifest(path: Path, **changes: object) -> None:
    """Replaces fields of a manifest and updates its checksum."""
    (path / "manifest.json").write_bytes(encode(replace(read_manifest(path), **changes)))


def test_a_checkpoint_round_trips_exactly(tmp_path: Path) -> None:
    loaded, tensors = load_some(saved_folder(tmp_path, 20))
    expected = some_tensors(20)
    EXACT.check_all(tensors, expected)
    assert {key: t.dtype for key, t in tensors.items()} == {key: t.dtype for key, t in expected.items()}
    assert loaded == LoadedCheckpoint(tmp_path / "iter_0000020", 20, some_state(20))


def test_a_large_state_is_read_and_verified_by_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_shards, "_MIN_BYTES_PER_THREAD", 60)
    folder = saved_folder(tmp_path, 20)
    assert len(tensor_shards.partition_tensors(whole(some_tensors(20)))) == 3
    loaded, tensors = load_some(folder)
    assert loaded.iteration == 20
    EXACT.check_all(tensors, some_tensors(20))
    for path in (folder / "iter_0000020").glob("*.safetensors"):
        flip_bit(path, -1, 0)
        with pytest.raises(CheckpointProblem, match=rf"{path.name}: .*crc32"):
            load_some(folder)
        flip_bit(path, -1, 0)


def test_nan_infinity_and_signed_zero_round_trip_exactly(tmp_path: Path) -> None:
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45])
    CheckpointSaver(tmp_path, ONE, say=silent).save(1, {"model.odd": TensorShard.whole(odd)}, {})
    target = torch.zeros(5)
    load_checkpoint(
        find_checkpoint(CheckpointConfig(save=tmp_path), ONE), {"model.odd": TensorShard.whole(target)}, ONE
    )
    EXACT.check(target.view(torch.int32), odd.view(torch.int32), "bits")


def test_the_train_state_round_trips_exactly(tmp_path: Path) -> None:
    state = {"flops": 1.2345678901234567e21, "third": 1 / 3, "consumed": 1 << 62, "list": [1, None, True, "ä"]}
    CheckpointSaver(tmp_path, ONE, say=silent).save(1, whole(some_tensors(1)), state)
    assert load_some(tmp_path)[0].train_state == state


def test_flipped_bits_are_detected(tmp_path: Path) -> None:
    path = saved_folder(tmp_path, 20) / "iter_0000020"
    files = sorted(path.iterdir())
    chance = random.Random(20)
    for file in files * 40:
        position, bit = chance.randrange(file.stat().st_size), chance.randrange(8)
        flip_bit(file, position, bit)
        assert verify(path), f"bit {bit} of byte {position} of {file.name} was not detected"
        with pytest.raises(CheckpointProblem, match="none of the 1 checkpoints .* --fresh to start over"):
            load_some(tmp_path)
        flip_bit(file, position, bit)
    assert verify(path) == []


def test_truncated_missing_and_longer_files_are_detected(tmp_path: Path) -> None:
    path = saved_folder(tmp_path, 20) / "iter_0000020"
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for torn in (b"", data[: len(data) // 2], data[:-1], data + b"\n", None):
            file.unlink()
            if torn is not None:
                file.write_bytes(torn)
            assert verify(path), f"{file.name} with {torn and len(torn)} of {len(data)} bytes was not detected"
            with pytest.raises(CheckpointProblem, match="iter_0000020: rank 0: "):
                load_some(tmp_path)
            file.write_bytes(data)
    assert verify(path) == []


def test_damage_is_reported_with_file_tensor_and_both_checksums(tmp_path: Path) -> None:
    path = saved_folder(tmp_path, 20) / "iter_0000020"
    flip_bit(path / "model-00000-of-00001.safetensors", -1, 3)
    assert len(verify(path)) == 1
    with pytest.raises(CheckpointProblem) as problem:
        load_some(tmp_path)
    assert problem.value.code == ExitCode.CHECKPOINT
    (line,) = str(problem.value).splitlines()[1:]
    assert "model-00000-of-00001.safetensors: model.embedding.weight: crc32 is " in line and "expected " in line


def test_files_that_are_not_in_the_manifest_are_ignored(tmp_path: Path) -> None:
    saved_folder(tmp_path, 20)
    (tmp_path / "iter_0000020" / "notes.txt").write_text("mine")
    assert load_some(tmp_path)[0].iteration == 20


def test_the_newest_intact_checkpoint_is_used_with_one_line_per_damaged_one(tmp_path: Path) -> None:
    saved_folder(tmp_path, 10, 20, 30)
    flip_bit(tmp_path / "iter_0000030" / "train_state.json", 0, 0)
    (tmp_path / "iter_0000020" / "manifest.json").unlink()
    said: list[str] = []
    loaded, tensors = load_some(tmp_path, said)
    assert loaded.iteration == 10
    EXACT.check_all(tensors, some_tensors(10))
    assert [line.split(" is damaged")[0] for line in said] == [
        f"checkpoint {tmp_path / 'iter_0000030'}",
        f"checkpoint {tmp_path / 'iter_0000020'}",
    ]


def test_a_folder_with_only_damaged_checkpoints_ends_the_run_with_every_reason(tmp_path: Path) -> None:
    saved_folder(tmp_path, 10, 20)
    for path in tmp_path.glob("iter_*"):
        (path / "manifest.json").write_bytes(b"")
    with pytest.raises(CheckpointProblem, match="none of the 2 checkpoints .* --fresh") as problem:
        load_some(tmp_path, load=str(saved_folder(tmp_path / "other", 5)))
    assert "iter_0000010" in str(problem.value) and "iter_0000020" in str(problem.value)


def test_ckpt_step_never_falls_back_to_another_iteration(tmp_path: Path) -> None:
    saved_folder(tmp_path, 10, 20)
    flip_bit(tmp_path / "iter_0000020" / "train_state.json", 0, 0)
    with pytest.raises(CheckpointProblem, match="--ckpt-step is damaged; no other iteration is tried"):
        load_some(tmp_path, ckpt_step=20)
    assert load_some(tmp_path, ckpt_step=10)[0].iteration == 10
    with pytest.raises(CheckpointProblem, match="--ckpt-step 15: .* holds no such iteration; available: 20, 10"):
        load_some(tmp_path, ckpt_step=15)


def test_a_folder_named_after_another_iteration_is_not_used(tmp_path: Path) -> None:
    saved_folder(tmp_path, 10)
    shutil.copytree(tmp_path / "iter_0000010", tmp_path / "iter_0000099")
    assert load_some(tmp_path)[0].iteration == 10


def test_damage_on_one_rank_rejects_the_checkpoint_on_all(tmp_path: Path) -> None:
    saved_folder(tmp_path / "0", 10, 20)
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    flip_bit(tmp_path / "1" / "iter_0000020" / "optim-00000-of-00001.safetensors", -1, 0)

    def load_own(context: ParallelContext) -> tuple[int, list[str]]:
        said: list[str] = []
        source = find_checkpoint(CheckpointConfig(save=tmp_path / "0"), context)
        own = tuple(replace(c, path=tmp_path / str(context.rank) / c.path.name) for c in source.candidates)
        tensors = blank()
        loaded = load_checkpoint(replace(source, candidates=own), whole(tensors), context, say=said.append)
        EXACT.check_all(tensors, some_tensors(loaded.iteration), f"rank {context.rank}")
        return loaded.iteration, said

    (first, said), (second, silence) = on_threads(ParallelConfig(world_size=2), load_own)
    assert first == second == 10
    assert len(said) == 1 and "is damaged and not used: rank 1: optim-" in said[0] and silence == []


def test_all_mismatches_are_listed_and_no_older_checkpoint_is_tried(tmp_path: Path) -> None:
    saved_folder(tmp_path, 10, 20)
    wanted = whole(blank())
    wanted["model.extra"] = TensorShard.whole(torch.zeros(2))
    wanted["master.embedding.weight"] = TensorShard.whole(torch.zeros(5, 6))
    wanted["exp_avg.embedding.weight"] = TensorShard.whole(torch.zeros(6, 5))
    del wanted["optimizer.step_count"]
    with pytest.raises(CheckpointProblem, match="iter_0000020 does not fit this run in 4 tensors") as problem:
        load_checkpoint(find_checkpoint(CheckpointConfig(save=tmp_path), ONE), wanted, ONE)
    assert str(problem.value).splitlines()[1:] == [
        "  missing in the checkpoint: model.extra",
        "  shape of master.embedding.weight: [6, 5] in the checkpoint, [5, 6] in this run",
        "  type of exp_avg.embedding.weight: F64 in the checkpoint, F32 in this run",
        "  unknown to this run: optimizer.step_count",
    ]


def test_twenty_mismatches_are_listed_and_the_rest_counted(tmp_path: Path) -> None:
    saved_folder(tmp_path, 10)
    wanted = {f"model.{i}": TensorShard.whole(torch.zeros(1)) for i in range(30)} | whole(blank())
    with pytest.raises(CheckpointProblem) as problem:
        load_checkpoint(find_checkpoint(CheckpointConfig(save=tmp_path), ONE), wanted, ONE)
    assert len(str(problem.value).splitlines()) == 22 and str(problem.value).endswith("and 10 more")


def test_loading_weights_only_casts_and_skips_the_optimizer(tmp_path: Path) -> None:
    saved_folder(tmp_path, 10)
    for flags in ({"finetune": True}, {"load_optim": False}):
        tensors = {key: tensor.double() for key, tensor in blank().items()}
        source = find_checkpoint(CheckpointConfig(load=str(tmp_path), **flags), ONE)
        load_checkpoint(source, whole(tensors), ONE)
        for key, saved in some_tensors(10).items():
            EXACT.check(tensors[key], saved if key.startswith("model.") else torch.zeros_like(saved), key)
        assert source.train_state == ("finetune" not in flags)


def test_loading_weights_only_ignores_damaged_optimizer_files(tmp_path: Path) -> None:
    saved_folder(tmp_path, 10)
    flip_bit(tmp_path / "iter_0000010" / "optim-00000-of-00001.safetensors", -1, 0)
    load_checkpoint(find_checkpoint(CheckpointConfig(load=str(tmp_path), finetune=True), ONE), whole(blank()), ONE)
    with pytest.raises(CheckpointProblem):
        load_checkpoint(find_checkpoint(CheckpointConfig(load=str(tmp_path)), ONE), whole(blank()), ONE)


def test_any_partition_loads_into_any_other(tmp_path: Path) -> None:
    stack = torch.arange(4.0 * 6 * 3).view(4, 6, 3)
    by_expert = tuple(TensorBox((e, 0, 0), stack[e : e + 1]) for e in (2, 0, 3, 1))
    by_rows = tuple(TensorBox((0, r, 0), stack[:, r : r + n]) for r, n in ((0, 1), (1, 4), (5, 1)))
    whole_stack = (TensorBox((0, 0, 0), stack),)
    for number, saved in enumerate((by_expert, by_rows, whole_stack), start=1):
        CheckpointSaver(tmp_path, ONE, say=silent).save(number, {"model.fc1": TensorShard(stack.shape, saved)}, {})
        source = find_checkpoint(CheckpointConfig(save=tmp_path), ONE)
        for wanted in (by_expert[:2], by_rows[1:], whole_stack, (TensorBox((1, 2, 1), stack[1:3, 2:5, 1:]),)):
            targets = tuple(TensorBox(box.offset, torch.zeros(box.data.shape)) for box in wanted)
            load_checkpoint(source, {"model.fc1": TensorShard(stack.shape, targets)}, ONE)
            for target, box in zip(targets, wanted, strict=True):
                EXACT.check(target.data, box.data, f"box at {box.offset} from partition {number}")


def test_pickles_in_the_folder_are_not_executed(tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    class Bomb:
        def __reduce__(self) -> tuple:
            return Path.touch, (marker,)

    path = saved_folder(tmp_path / "save", 10) / "iter_0000010"
    for name in ("model-00000-of-00001.safetensors", "train_state.json", "manifest.json", "common.pt", ".metadata"):
        original = (path / name).read_bytes() if (path / name).exists() else None
        (path / name).write_bytes(pickle.dumps(Bomb()))
        if original is None:
            load_some(tmp_path / "save")
        else:
            with pytest.raises(CheckpointProblem):
                load_some(tmp_path / "save")
            (path / name).write_bytes(original)
    assert not marker.exists()


def test_a_manifest_with_a_huge_tensor_is_rejected_before_allocation(tmp_path: Path) -> None:
    path = saved_folder(tmp_path, 10) / "iter_0000010"
    manifest = read_manifest(path)
    name, huge = "model-00000-of-00001.safetensors", 1 << 40
    entry = TensorEntry("U8", (huge,), (TensorPiece(name, manifest.files[name].size, (0,), (huge,), "00000000"),))
    files = {**manifest.files, name: replace(manifest.files[name], size=manifest.files[name].size + huge)}
    rewrite_manifest(path, files=files, tensors={**manifest.tensors, "model.huge": entry})
    with pytest.raises(CheckpointProblem, match=f"{name}: .* bytes, the manifest says 10995116"):
        load_some(tmp_path)


@pytest.mark.parametrize("name", ["manifest.json", "train_state.json", "model-00000-of-00001.safetensors", "run.yaml"])
@pytest.mark.parametrize("kind", ["fifo", "endless device", "folder"])
def test_only_regular_files_are_read(tmp_path: Path, name: str, kind: str) -> None:
    folder = saved_folder(tmp_path, 10, 20)
    path = folder / "iter_0000020" / name
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    said: list[str] = []
    assert load_some(folder, said)[0].iteration == 10
    assert len(said) == 1 and name in said[0]
    assert any(name in problem for problem in verify(path.parent))


def test_a_fifo_as_tracker_is_ignored(tmp_path: Path) -> None:
    tracker = saved_folder(tmp_path, 10) / "latest_checkpointed_iteration.txt"
    tracker.unlink()
    os.mkfifo(tracker)
    assert load_some(tmp_path)[0].iteration == 10


def test_a_train_state_that_is_not_an_object_is_damage(tmp_path: Path) -> None:
    rewrite_text(saved_folder(tmp_path, 10) / "iter_0000010", "train_state.json", b"[1]")
    with pytest.raises(CheckpointProblem, match="train_state.json: holds list, not an object"):
        load_some(tmp_path)


def test_a_manifest_beyond_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved_folder(tmp_path, 10)
    monkeypatch.setattr("megatron_moe.checkpoint.manifest.MAX_MANIFEST_BYTES", 100)
    with pytest.raises(CheckpointProblem, match=r"manifest.json: the file has \d+ bytes, more than the limit of 100"):
        load_some(folder)


def test_a_later_format_version_is_rejected_without_fallback(tmp_path: Path) -> None:
    saved_folder(tmp_path, 10, 20)
    text = (tmp_path / "iter_0000020" / "manifest.json").read_bytes()
    text = text[: -len(',"crc32":"01234567"}\n')].replace(b'"version":1', b'"version":9')
    (tmp_path / "iter_0000020" / "manifest.json").write_bytes(text + f',"crc32":"{checksum(text)}"}}\n'.encode())
    with pytest.raises(CheckpointProblem, match="iter_0000020 was written in format version 9 by 'megatron_moe"):
        load_some(tmp_path)


def test_a_renamed_tensor_in_a_consistent_manifest_is_missing_and_unknown(tmp_path: Path) -> None:
    path = saved_folder(tmp_path, 10) / "iter_0000010"
    tensors = dict(read_manifest(path).tensors)
    tensors["model.other"] = tensors.pop("model.embedding.weight")
    rewrite_manifest(path, tensors=tensors)
    with pytest.raises(CheckpointProblem, match="in 2 tensors") as problem:
        load_some(tmp_path)
    assert "missing in the checkpoint: model.embedding.weight" in str(problem.value)
    assert "unknown to this run: model.other" in str(problem.value)


def test_a_wrong_dtype_in_the_manifest_is_damage(tmp_path: Path) -> None:
    """The wrong dtype has the same element size and the checksum is valid, so the load would cast the values."""
    path = saved_folder(tmp_path, 10) / "iter_0000010"
    tensors = dict(read_manifest(path).tensors)
    tensors["model.embedding.weight"] = replace(tensors["model.embedding.weight"], dtype="F16")
    rewrite_manifest(path, tensors=tensors)
    source = find_checkpoint(CheckpointConfig(load=str(tmp_path), finetune=True), ONE)
    with pytest.raises(CheckpointProblem, match="header: does not describe the manifest.s 3 pieces"):
        load_checkpoint(source, whole(blank()), ONE)


def test_a_stored_version_1_checkpoint_loads(tmp_path: Path) -> None:
    golden = Path(__file__).parent.parent / "goldens" / "checkpoint_v1"
    assert verify(golden / "iter_0000003") == []
    source = find_checkpoint(CheckpointConfig(load=str(golden)), ONE, say=silent)
    weight, moment = torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(2, 3)
    targets = {"model.a.weight": TensorShard.whole(weight), "exp_avg.a.weight": TensorShard.whole(moment)}
    loaded = load_checkpoint(source, targets, ONE)
    assert loaded.train_state == {"iteration": 3, "lr": 0.1}
    EXACT.check(weight, torch.arange(6.0).view(2, 3).bfloat16(), "weight")
    EXACT.check(moment, torch.arange(6.0).view(2, 3) / 3, "moment")
