"""tools/inspect_checkpoint.py: contents of a checkpoint, and differences between two."""

from pathlib import Path

import pytest
import torch

from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.checkpoint.statistics import OpenCheckpoint
from megatron_moe.checkpoint.tensor_shards import TensorBox, TensorShard
from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.checkpoint_files import flip_bit, saved_folder
from tests.helpers.tolerances import FP64_LAYOUT
from tools.inspect_checkpoint import main

RUN = """model:
  num-layers: 4                                         # recipe.yaml
  hidden-size: 32                                       # default
"""


def save(folder: Path, iteration: int, tensors: dict[str, TensorShard], run: str = RUN) -> Path:
    saver = CheckpointSaver(folder, ParallelContext.single(), say=lambda line: None)
    path = saver.save(iteration, tensors, {}, texts={"run.yaml": run})
    saver.close()
    assert path is not None
    return path


def in_two(tensor: torch.Tensor) -> TensorShard:
    upper, lower = tensor[:2], tensor[2:]
    return TensorShard(tuple(tensor.shape), (TensorBox((0, 0), upper), TensorBox((2, 0), lower)))


def test_the_table_has_every_tensor_with_its_norm(tmp_path: Path, capsys):
    weight = torch.full((5, 4), 3.0)
    weight[4, 3] = torch.nan
    save(tmp_path, 7, {"model.a": in_two(weight), "exp_avg.a": TensorShard.whole(torch.zeros(5, 4).double())})
    assert main([str(tmp_path)]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert "iteration 7" in lines[0] and lines[1] == "layout: tp 1 cp 1 dp 1 pp 1 ep 1 etp 1 edp 1"
    assert "settings given:" in lines and "  num-layers: 4" in lines
    assert not any("hidden-size" in line for line in lines)
    rows = {line.split()[0]: line.split()[1:] for line in lines[-2:]}
    assert rows["model.a"] == ["F32", "5x4", "2", f"{3 * 19**0.5:.6g}", f"{3 * (19 / 20) ** 0.5:.4g}", "3", "1"]
    assert rows["exp_avg.a"][:3] == ["F64", "5x4", "1"]


def test_statistics_are_those_of_all_pieces_together(tmp_path: Path):
    weight = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = OpenCheckpoint(save(tmp_path, 1, {"model.a": in_two(weight)})).statistics("model.a")
    FP64_LAYOUT.check(torch.tensor(found.norm, dtype=torch.float64), weight.norm(), "norm")
    assert found.largest == float(weight.abs().max()) and found.num_elements == 20


def test_names_can_be_chosen_and_norms_left_out(tmp_path: Path, capsys):
    saved_folder(tmp_path, 1)
    assert main([str(tmp_path), "--only", r"^model\..*bias", "--no-norms"]) == ExitCode.OK
    table = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert [row.split() for row in table] == [
        ["tensor", "dtype", "shape", "pieces"],
        ["model.decoder.layers.0.mlp.router.expert_bias", "F32", "3", "1"],
    ]


def test_a_checkpoint_equals_itself_in_other_pieces(tmp_path: Path, capsys):
    weight = torch.arange(20.0).view(5, 4)
    weight[0, 0] = torch.nan
    one = save(tmp_path / "a", 1, {"model.a": in_two(weight)})
    other = save(tmp_path / "b", 1, {"model.a": TensorShard.whole(weight)})
    assert main([str(one), "--against", str(other)]) == ExitCode.OK
    assert main([str(other), "--against", str(one)]) == ExitCode.OK
    assert capsys.readouterr().out.count("1 of 1 tensors are equal") == 2


def test_differences_are_listed_by_tensor(tmp_path: Path, capsys):
    weight = torch.full((5, 4), 2.0)
    changed = weight.clone()
    changed[4, 1] = 2.5
    same = {"model.same": TensorShard.whole(weight)}
    one = {"model.a": in_two(weight), "model.b": TensorShard.whole(weight), "model.c": TensorShard.whole(weight)}
    other = {"model.a": TensorShard.whole(changed), "model.b": TensorShard.whole(weight.double())}
    save(tmp_path / "a", 1, {**one, **same, "model.d": TensorShard.whole(weight)})
    save(tmp_path / "b", 2, {**other, **same, "model.d": TensorShard.whole(weight[:3])}, RUN.replace("4 ", "8 "))
    assert main([str(tmp_path / "a"), "--against", str(tmp_path / "b")]) == ExitCode.DRIFT
    said = capsys.readouterr().out
    assert "num-layers: 4 and 8" in said and "1 of 5 tensors are equal" in said
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in said.splitlines() if line.startswith("model.")}
    assert rows["model.a"].split() == ["values", "0.5", f"{0.5 / 80**0.5:.4g}"]
    assert rows["model.b"].startswith("type F32 and F64") and rows["model.d"].startswith("shape [5, 4] and [3, 4]")
    assert rows["model.c"].startswith(f"missing in {tmp_path / 'b'}")


def test_nan_on_one_side_is_the_largest_difference(tmp_path: Path, capsys):
    weight = torch.arange(20.0).view(5, 4)
    changed = weight.clone()
    changed[0, 0], changed[4, 1] = torch.nan, 99.0
    one, other = (
        save(tmp_path / "a", 1, {"model.a": in_two(weight)}),
        save(tmp_path / "b", 1, {"model.a": in_two(changed)}),
    )
    assert main([str(one), "--against", str(other)]) == ExitCode.DRIFT
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("model.a"))
    assert row.split() == ["model.a", "values", "nan", "nan"]


def test_a_damaged_tensor_is_not_shown(tmp_path: Path, capsys):
    path = saved_folder(tmp_path, 1) / "iter_0000001"
    flip_bit(next(path.glob("model*")), -1, 2)
    assert main([str(path)]) == ExitCode.CHECKPOINT
    assert "crc32 is" in capsys.readouterr().err


def test_an_invalid_regular_expression_is_rejected(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), "--only", "("])
    assert "is not a regular expression" in capsys.readouterr().err
