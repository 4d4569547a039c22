"""tools/check_checkpoint.py: one line per checkpoint, and under it all that is wrong with it."""

from pathlib import Path

import pytest

from megatron_moe.checkpoint.manifest import MANIFEST
from megatron_moe.config.exit_codes import ExitCode
from tests.helpers.checkpoint_files import flip_bit, saved_folder
from tools.check_checkpoint import main

SOUND, DAMAGED = ExitCode.OK, ExitCode.CHECKPOINT


def test_sound_checkpoints_are_listed_newest_first(tmp_path: Path, capsys):
    saved_folder(tmp_path / "checkpoints", 1, 20)
    assert main([str(tmp_path)]) == SOUND
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["checkpoint", "tensors", "files", "GB", "seconds", "state"]
    assert [line.split()[0][-7:] for line in lines] == ["0000020", "0000001"]
    assert all(line.endswith("sound") for line in lines)


def test_every_problem_is_told_with_its_place(tmp_path: Path, capsys):
    path = saved_folder(tmp_path, 3) / "iter_0000003"
    model, optim = sorted(path.glob("*.safetensors"))
    flip_bit(model, -1, 0)
    flip_bit(optim, 9, 0)
    flip_bit(path / "run.yaml", 0, 0)
    (path / "odd.txt").write_text("x")
    assert main([str(path)]) == DAMAGED
    said = capsys.readouterr().out
    assert "DAMAGED, problems: 3" in said
    assert f"{model.name}: model." in said and "crc32 is" in said
    assert f"{optim.name}: head: crc32 is" in said and "run.yaml: head: crc32 is" in said
    assert "(harmless: odd.txt: not in the manifest)" in said


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: (path / MANIFEST).unlink(), "No such file"),
        (lambda path: next(path.glob("model*")).unlink(), "No such file"),
        (lambda path: flip_bit(path / MANIFEST, 30, 1), "its own crc32 is"),
        (lambda path: path.rename(path.with_name("iter_0000009")), "of iteration 3, in the folder iter_0000009"),
        (lambda path: next(path.glob("optim*")).write_bytes(b""), "0 bytes, the manifest says"),
    ],
    ids=["no manifest", "no weights", "manifest", "renamed", "emptied"],
)
def test_each_kind_of_damage_has_its_exit_code(damage, said: str, tmp_path: Path, capsys):
    damage(saved_folder(tmp_path, 3) / "iter_0000003")
    assert main([str(tmp_path)]) == DAMAGED
    assert said in capsys.readouterr().out


def test_one_damaged_checkpoint_among_sound_ones_is_enough(tmp_path: Path, capsys):
    saved_folder(tmp_path, 1, 2)
    flip_bit(tmp_path / "iter_0000001" / "train_state.json", 2, 4)
    assert main([str(tmp_path)]) == DAMAGED
    assert main([str(tmp_path), "--newest"]) == SOUND
    assert capsys.readouterr().out.count("DAMAGED") == 1


def test_no_checkpoint_is_no_sound_checkpoint(tmp_path: Path, capsys):
    assert main([str(tmp_path)]) == DAMAGED
    assert "holds no checkpoint" in capsys.readouterr().err
