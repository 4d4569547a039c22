"""Tests of bench_startup: tables of commands that do not import torch, and of the startup phases of a training run."""

from pathlib import Path

import pytest

from benchmarks.harness import bench_startup


def test_row_of_a_command_has_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "table.md"
    words = ["--repeats", "1", "--output", str(output), "--question=--help", "--question=--num-layers 4"]
    bench_startup.main(words)
    head, _, helped, refused = capsys.readouterr().out.splitlines()
    assert head.startswith("| command |")
    assert helped.startswith("| `--help` | ") and helped.endswith("| 0 |")
    assert refused.startswith("| `--num-layers 4` | ") and refused.endswith("| 2 |")
    assert refused in output.read_text()


RUN = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --num-experts 4 --moe-router-topk 2 --seq-length 16 "
    "--max-position-embeddings 16 --tokenizer-type NullTokenizer --vocab-size 100 --micro-batch-size 1 "
    "--global-batch-size 2 --mock-data --train-iters 2 --eval-iters 0 --lr 1e-3"
).split()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_start_is_measured_to_the_end_of_its_first_step(
    ranks: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    seconds = bench_startup.measure_start(RUN, ranks, cache=tmp_path)
    assert {"launcher", "imports", "rendezvous", "build the model", "first step"} <= set(seconds), seconds
    assert seconds.pop("total") == pytest.approx(sum(seconds.values()))
    assert min(seconds.values()) >= 0.0 and seconds["imports"] > 0.1, seconds
    assert "exiting program at iteration 1\n" in capfd.readouterr().out


def test_table_of_a_start_has_a_row_per_phase():
    cold = {"launcher": 1.0, "compile kernels": 8.26, "first step": 2.0, "other": 0.5, "total": 11.76}
    rows = bench_startup.start_table(cold, {"launcher": 1.0, "total": 3.0}).splitlines()
    assert len(rows) == 2 + len(bench_startup.PHASES) + 4
    assert rows[4] == "| compile kernels | 8.3 | 0.0 |" and rows[-1] == "| total | 11.8 | 3.0 |"
