"""Tests of the low-precision benchmarks: smoothed losses, gaps, limits, completed runs and cosines of gradients."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.harness import bench_fp8_loss
from benchmarks.harness.bench_fp8_gradients import cosines
from benchmarks.harness.bench_fp8_loss import MODELS, VARIANTS, gaps, main, read_curve, run_folder

BF16, FP8, OTHER = VARIANTS[0], VARIANTS[1], VARIANTS[3]
RUN = """
import json, sys
from pathlib import Path
folder, loss, code = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
with (folder / "started").open("a") as file:
    file.write("x")
rows = [{"iteration": i, "lm loss": loss, "iteration-time": 0.01} for i in (1, *range(10, 101, 10))]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows[: -1 if code else None]))
environment = ("time: 2026-11-23 03:00:00", "device: NVIDIA H200, 141 GiB", "package torch: 2.11")
(folder / "environment.txt").write_text("\\n".join(environment))
sys.exit("out of memory" if code else 0)
"""
"""Program that writes the metrics of a run. Arguments: run folder, loss of all iterations, 1 to fail at the end."""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Loss and exit code of every run by variant; runs write metrics without training."""
    results = {BF16.name: ["1.998", "0"], OTHER.name: ["2.002", "0"], FP8.name: ["2.004", "0"]}

    def command(model: str, variant, run: Path, save: Path, options) -> list[str]:
        return [sys.executable, "-S", "-c", RUN, str(run), *results[variant.name]]

    monkeypatch.setattr(bench_fp8_loss, "command", command)
    monkeypatch.setattr(bench_fp8_loss, "draw", lambda curves, path, iterations: None)
    return results


def words(tmp_path: Path) -> list[str]:
    folders = ["--runs", str(tmp_path / "runs"), "--output-dir", str(tmp_path)]
    return ["--iterations", "100", *folders, "--variants", BF16.name, OTHER.name, FP8.name]


def test_reports_gaps_and_does_not_repeat_complete_runs(tmp_path: Path, runs: dict[str, list[str]]) -> None:
    assert main(words(tmp_path)) == 0
    document = tmp_path / "2026-11-23-h200-fp8-loss.md"
    text = document.read_text()
    assert f"| Qwen3-like | {FP8.name} | 100 | 2.0040 | +0.200% | +0.200% | +0.200% | 0.25% | 10 |" in text
    assert f"| Moonlight-like | {OTHER.name} | 100 | 2.0020 | +0.100%" in text, "the reference is the mean"
    assert "No gap exceeds its limit." in text
    runs[FP8.name][0] = "9.0"
    run_folder(tmp_path / "runs", "Qwen3-like", BF16).joinpath("metrics.jsonl").unlink()
    assert main(words(tmp_path)) == 0, "complete runs keep their losses"
    started = {run.name: run.joinpath("started").read_text() for run in (tmp_path / "runs").iterdir()}
    assert started.pop("qwen3-like-bf16") == "xx" and set(started.values()) == {"x"}


def test_a_gap_above_its_limit_and_a_failed_run_are_reported(tmp_path: Path, runs: dict[str, list[str]], capsys):
    runs[FP8.name] = ["2.006", "0"]
    assert main(words(tmp_path)) == 1
    assert f"Moonlight-like, {FP8.name}: a gap of 0.30% exceeds 0.25%" in capsys.readouterr().err
    run_folder(tmp_path / "runs", "Qwen3-like", FP8).joinpath("metrics.jsonl").unlink()
    runs[FP8.name] = ["2.0", "1"]
    assert main(words(tmp_path)) == 1
    assert "qwen3-like-fp8-blockwise-weight-gradients-in-bf16: out of memory" in capsys.readouterr().err
    (document,) = tmp_path.glob("*.md")
    assert f"| Qwen3-like | {FP8.name} | 90 | 2.0000 | +0.000%" in document.read_text(), "until the failure"


def test_runs_stop_at_the_time_limit(tmp_path: Path, runs: dict[str, list[str]]) -> None:
    assert main([*words(tmp_path), "--time-limit", "0"]) == 0
    assert not (tmp_path / "runs").exists()


def test_losses_are_smoothed_over_iterations_not_reports(tmp_path: Path) -> None:
    """Logged losses are means over intervals of different lengths. With a time constant of 10 iterations, the previous
    smoothed value has the weight 0.9 per iteration."""

    def smoothed(rows: list[tuple[int, float]], variant=FP8) -> bench_fp8_loss.Curve:
        lines = [json.dumps({"iteration": i, "lm loss": loss, "iteration-time": 0.01}) + "\n" for i, loss in rows]
        (tmp_path / "metrics.jsonl").write_text("".join(lines))
        curve = read_curve(next(iter(MODELS)), variant, tmp_path, 100)
        assert curve is not None
        return curve

    long = smoothed([(1, 4.0), (10, 3.0), (40, 2.0)])
    each = smoothed([(1, 4.0), *((i, 3.0) for i in range(2, 11)), *((i, 2.0) for i in range(11, 41))])
    assert long.losses == {i: pytest.approx(each.losses[i], rel=1e-12) for i in (1, 10, 40)}
    first, second = 1 - 0.9, 1 - 0.9**9
    assert each.losses[10] == pytest.approx((4 * first * 0.9**9 + 3 * second) / (first * 0.9**9 + second), rel=1e-12)
    constant = smoothed([(i, 2.0) for i in range(1, 51)], BF16)
    assert gaps(long, [constant], 100) == {40: pytest.approx(long.losses[40] / 2 - 1, rel=1e-12)}, "from 20 on"


def test_cosines_of_layers_in_the_order_of_the_model() -> None:
    names = ("decoder.layers.0.a", "output_layer.weight", "decoder.final_norm.weight", "embedding.weight")
    reference = {name: torch.tensor([3.0, 4.0]) for name in names} | {"decoder.layers.0.b": torch.tensor([0.0, 5.0])}
    table = cosines(reference | {"decoder.layers.0.b": torch.tensor([5.0, 0.0])}, reference)
    assert list(table) == ["embedding", "layer 0", "decoder.final_norm", "output_layer"]
    assert table["embedding"].whole == pytest.approx(1) and table["layer 0"].whole == pytest.approx(0.5)
    assert (table["layer 0"].least, table["layer 0"].parameter) == (pytest.approx(0), "decoder.layers.0.b")
