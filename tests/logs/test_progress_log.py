"""progress.txt."""

from pathlib import Path

from megatron_moe.logs.progress_log import (
    PROGRESS,
    ProgressLog,
    RunPosition,
)


def test_starts_and_checkpoints_of_all_starts_have_a_line(tmp_path: Path) -> None:
    for start in (0, 10):
        log = ProgressLog(tmp_path, 2, {"SLURM_JOB_ID": "77"})
        log.begin(RunPosition(start, 0.0, 0))
        log.saving(RunPosition(start + 10, 4e12, 3_000_000_000))
        log.saved(start + 10)
    fields = [line.split("\t")[1:] for line in (tmp_path / PROGRESS).read_text().splitlines()]
    assert [each[2:4] for each in fields[:2]] == [
        ["Starting job", "Iteration: 0"],
        ["Saved checkpoint", "Iteration: 10"],
    ]
    assert fields[1][:2] == ["Job ID: 77", "# GPUs: 2"] and fields[1][-1] == "Tokens (in billions): 3.00"
    assert [each[3] for each in fields[2:]] == ["Iteration: 10", "Iteration: 20"]


def test_nothing_is_written_where_nobody_asked_or_nobody_can(tmp_path: Path) -> None:
    for folder in (None, tmp_path / "missing"):
        log = ProgressLog(folder, 1)
        log.begin(RunPosition(0, 0.0, 0))
        log.saved(10)
    assert list(tmp_path.iterdir()) == []
