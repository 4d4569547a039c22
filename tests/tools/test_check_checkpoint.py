"""tools/check_checkpoint.py: one line per checkpoint, followed by its errors."""

from pathlib import Path

import pytest
import torch

from megatron_moe.checkpoint.manifest import MANIFEST
from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.checkpoint.tensor_shards import TensorBox, TensorShard
from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.checkpoint_files import flip_bit, saved_folder, some_state, verify
from tools.check_checkpoint import main

VALID, INVALID = ExitCode.OK, ExitCode.CHECKPOINT


def test_valid_checkpoints_are_listed_newest_first(tmp_path: Path, capsys):
    saved_folder(tmp_path / "checkpoints", 1, 20)
    assert main([str(tmp_path)]) == VALID
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["checkpoint", "tensors", "files", "size", "seconds", "state"]
    assert [line.split()[0][-7:] for line in lines] == ["0000020", "0000001"]
    assert all(line.endswith("  valid") for line in lines)


def test_every_problem_is_reported_with_its_location(tmp_path: Path, capsys):
    path = saved_folder(tmp_path, 3) / "iter_0000003"
    model, optim = sorted(path.glob("*.safetensors"))
    flip_bit(model, -1, 0)
    flip_bit(optim, 9, 0)
    flip_bit(path / "run.yaml", 0, 0)
    (path / "odd.txt").write_text("x")
    assert main([str(path)]) == INVALID
    said = capsys.readouterr().out
    assert "INVALID, problems: 3" in said
    assert f"{model.name}: model." in said and "crc32 is" in said
    assert f"{optim.name}: head: crc32 is" in said and "run.yaml: head: crc32 is" in said
    assert "(harmless: odd.txt: not in the manifest)" in said


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: (path / MANIFEST).unlink(), "No such file"),
        (lambda path: next(path.glob("model*")).unlink(), "No such file"),
        (lambda path: flip_bit(path / MANIFEST, 30, 1), "its own crc32 is"),
        (
            lambda path: path.rename(path.with_name("iter_0000009")),
            "its iteration 3 differs from that of the folder iter_0000009",
        ),
        (lambda path: next(path.glob("optim*")).write_bytes(b""), "0 bytes, the manifest says"),
    ],
    ids=["no manifest", "no weights", "manifest", "renamed", "emptied"],
)
def test_each_kind_of_damage_has_its_exit_code(damage, said: str, tmp_path: Path, capsys):
    damage(saved_folder(tmp_path, 3) / "iter_0000003")
    assert main([str(tmp_path)]) == INVALID
    assert said in capsys.readouterr().out


def test_nonfinite_values_are_reported_although_every_byte_verifies(tmp_path: Path, capsys):
    moment, weight = torch.zeros(2, 3, dtype=torch.bfloat16), torch.ones(4)
    moment[1, 0], moment[0, 2] = torch.nan, -torch.inf
    tensors = {
        "model.a": TensorShard.whole(weight),
        "model.fp8": TensorShard.whole(weight.to(torch.float8_e4m3fn)),
        "exp_avg.a": TensorShard((2, 3), (TensorBox((0, 0), moment[:1]), TensorBox((1, 0), moment[1:]))),
        "optimizer.step": TensorShard.whole(torch.tensor(1)),
    }
    saver = CheckpointSaver(tmp_path, ParallelContext.single(), say=lambda line: None)
    assert saver.save(1, tensors, some_state(1)) is not None
    saver.close()
    assert verify(tmp_path / "iter_0000001") == []
    assert main([str(tmp_path)]) == INVALID
    *_, line, problem = capsys.readouterr().out.splitlines()
    assert line.endswith("INVALID, problems: 1")
    assert problem.strip() == "exp_avg.a: 2 of 6 values are NaN or infinite"


def test_one_damaged_checkpoint_among_valid_ones_is_an_error(tmp_path: Path, capsys):
    saved_folder(tmp_path, 1, 2)
    flip_bit(tmp_path / "iter_0000001" / "train_state.json", 2, 4)
    assert main([str(tmp_path)]) == INVALID
    assert main([str(tmp_path), "--newest"]) == VALID
    assert capsys.readouterr().out.count("INVALID") == 1


def test_a_folder_without_checkpoints_is_an_error(tmp_path: Path, capsys):
    assert main([str(tmp_path)]) == INVALID
    assert "contains no checkpoint" in capsys.readouterr().err
