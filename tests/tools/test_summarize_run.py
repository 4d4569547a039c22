"""tools/summarize_run.py: rows, formats and the program."""

from pathlib import Path

import pytest

from megatron_moe.config.exit_codes import DataProblem, ExitCode
from tests.helpers.run_dirs import make_run
from tools.summarize_run import as_csv, as_markdown, as_text, find_runs, main, names_of, summarize


def test_speeds_are_medians_after_the_first_report(tmp_path):
    row = summarize(make_run(tmp_path / "a", (9.0, 1.0, 3.0, 2.0)), "a")
    assert (row["seconds_per_step"], row["tflops_per_gpu"]) == (2.0, 5.0)
    assert (row["iterations"], row["ranks"], row["state"]) == (4, 2, "finished")
    assert (row["loss"], row["validation_loss"]) == (1.0, 2.5)
    assert summarize(tmp_path / "a", "a", skip=0)["seconds_per_step"] == 2.5
    assert summarize(tmp_path / "a", "a", skip=9)["seconds_per_step"] == 2.5, "a short run is still a run"


def test_memory_is_the_maximum_in_gib(tmp_path):
    row = summarize(make_run(tmp_path / "a", (1.0,), **{"mem-max-allocated-bytes": 3 * 2**30}), "a")
    assert row["peak_memory_gib"] == 3.0


def test_run_without_steps_or_report_has_a_row(tmp_path):
    row = summarize(make_run(tmp_path / "a", (), state=None), "a")
    assert (row["iterations"], row["seconds_per_step"], row["loss"], row["state"]) == (0, None, None, "unknown")
    full = summarize(make_run(tmp_path / "b", (1.0,)), "b")
    assert as_text([row, full]).splitlines()[1].split() == ["a", "unknown", "0", "-", "-", "-", "-", "2.5000"]


def test_nonfinite_loss_is_skipped(tmp_path):
    run = make_run(tmp_path / "a", (1.0, 1.0))
    with open(run / "metrics.jsonl", "a") as metrics:
        metrics.write('{"iteration": 3, "iteration-time": 1.0, "lm loss": null}\n')
    row = summarize(run, "a")
    assert (row["loss"], row["iterations"]) == (3.0, 3)


def test_validation_loss_is_the_last_finite_mean_over_the_sets(tmp_path):
    run = make_run(tmp_path / "a", (1.0, 1.0))
    losses = {(3, "a"): "1.0", (3, "b"): "2.0", (4, "a"): "1.0", (4, "b"): "null"}
    with open(run / "metrics.jsonl", "a") as metrics:
        for (iteration, name), loss in losses.items():
            metrics.write(f'{{"iteration": {iteration}, "lm loss validation-{name}": {loss}}}\n')
    assert summarize(run, "a")["validation_loss"] == 1.5


def test_find_runs(tmp_path):
    runs = [make_run(tmp_path / "sweep" / name, (1.0,)) for name in ("b", "a")]
    assert find_runs([tmp_path / "sweep", runs[0]]) == [runs[1], runs[0]]
    with pytest.raises(DataProblem, match="empty contains no run"):
        find_runs([tmp_path / "empty"])


@pytest.mark.parametrize(
    ("runs", "names"),
    [
        (["x/y/a"], ["a"]),
        (["x/y/a", "x/y/b"], ["a", "b"]),
        (["x/a/1", "x/b/1"], ["a/1", "b/1"]),
        (["x", "x/a"], ["x", "x/a"]),
    ],
)
def test_names_omit_the_common_prefix(runs, names):
    assert names_of([Path(run) for run in runs]) == names


def test_tables_omit_empty_columns(tmp_path):
    rows = [summarize(make_run(tmp_path / name, (2.0, 2.0)), name) for name in ("a", "bb")]
    assert as_text(rows).splitlines() == [
        "run  state     iterations  ranks  s/step  TFLOP/s/GPU    loss  validation",
        "a    finished           2      2   2.000          5.0  3.0000      2.5000",
        "bb   finished           2      2   2.000          5.0  3.0000      2.5000",
    ]
    assert as_markdown(rows[:1]).splitlines() == [
        "| run | state | iterations | ranks | s/step | TFLOP/s/GPU | loss | validation |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| a | finished | 2 | 2 | 2.000 | 5.0 | 3.0000 | 2.5000 |",
    ]
    head, first, _ = as_csv(rows).splitlines()
    assert head.split(",")[:5] == ["run", "state", "iterations", "ranks", "seconds_per_step"]
    assert first.split(",")[:5] == ["a", "finished", "2", "2", "2.0"] and len(first.split(",")) == len(head.split(","))


def test_a_table_is_printed_and_written(tmp_path, capsys):
    make_run(tmp_path / "runs" / "a", (1.0,))
    make_run(tmp_path / "runs" / "b", (2.0,))
    out = tmp_path / "table.md"
    assert main([str(tmp_path / "runs"), "--format", "markdown", "--output", str(out)]) == ExitCode.OK
    assert capsys.readouterr().out == out.read_text()
    assert [line.split(" | ")[0] for line in out.read_text().splitlines()[2:]] == ["| a", "| b"]


def test_a_folder_without_runs_is_a_data_problem(tmp_path, capsys):
    assert main([str(tmp_path)]) == ExitCode.DATA
    assert "contains no run" in capsys.readouterr().err
