"""Plots from metrics.jsonl."""

import math
import struct

import pytest

from megatron_moe.logs.metrics_file import encode, read_metrics
from megatron_moe.logs.plots import draw_plots, latest_loads

PNG = b"\x89PNG\r\n\x1a\n"


def write(folder, *records) -> None:
    (folder / "metrics.jsonl").write_bytes(b"".join(map(encode, records)))


def step(iteration: int, **more):
    return {
        "iteration": iteration,
        "samples": 8 * iteration,
        "tokens": 256 * iteration,
        "lm loss": 9.0 / iteration,
        **more,
    }


def test_loss_and_expert_load_plots(tmp_path):
    load = {"moe/tokens_per_expert_layer_1": [4.0, 4.0], "moe/tokens_per_expert_layer_10": [8.0, 0.0]}
    write(tmp_path, step(1), step(2, **load), {"iteration": 2, "samples": 16, "lm loss validation": 5.0})
    assert draw_plots(tmp_path) == [tmp_path / "plots" / "loss.png", tmp_path / "plots" / "expert_load.png"]
    assert all(path.read_bytes().startswith(PNG) for path in (tmp_path / "plots").iterdir())
    write(tmp_path, step(1), step(2))
    assert [path.name for path in draw_plots(tmp_path)] == ["loss.png"], "a dense model"


@pytest.mark.parametrize("records", [[], [{"iteration": 1, "samples": 8, "lm loss validation": 2.0}]])
def test_no_plots_without_steps(tmp_path, records):
    write(tmp_path, *records)
    assert draw_plots(tmp_path) == []
    assert not (tmp_path / "plots").exists()


def test_plots_with_nan_losses_and_unused_experts(tmp_path):
    write(tmp_path, step(1), step(2, **{"lm loss": math.nan, "moe/tokens_per_expert_layer_1": [0.0, 0.0]}))
    assert len(draw_plots(tmp_path)) == 2


def test_latest_loads_are_sorted_by_layer(tmp_path):
    write(
        tmp_path,
        step(1, **{"moe/tokens_per_expert_layer_2": [1.0, 1.0]}),
        step(2, **{"moe/tokens_per_expert_layer_10": [3.0, 1.0], "moe/tokens_per_expert_layer_2": [2.0, 2.0]}),
        step(3),
    )
    assert latest_loads(read_metrics(tmp_path / "metrics.jsonl")) == {2: [2, 2], 10: [3, 1]}


def test_plot_of_a_large_model_has_limited_size(tmp_path):
    write(
        tmp_path, step(1, **{f"moe/tokens_per_expert_layer_{i}": [float(e) for e in range(256)] for i in range(3, 61)})
    )
    draw_plots(tmp_path)
    width, height = struct.unpack(">II", (tmp_path / "plots" / "expert_load.png").read_bytes()[16:24])
    assert width < 2400 and height < 2400
