"""status.json: content during a run, attribution of the first failure, and write errors."""

import json
import os
import time
from pathlib import Path

import pytest

from megatron_moe.config.exit_codes import DataProblem, ExitCode
from megatron_moe.resilience.run_status import STARTED, RunStatus
from tests.logs.reports import Clock


def read(run_dir: Path) -> dict:
    return json.loads((run_dir / "status.json").read_text())


def test_written_on_state_changes_and_every_five_seconds(tmp_path: Path) -> None:
    """The host's clock is set back between writes."""
    clock, timer = Clock(), Clock()
    status = RunStatus(tmp_path, clock=clock, timer=timer)
    status.update(state="running", iteration=1)
    for seconds, iteration, seen in ((1.0, 2, 1), (3.0, 3, 1), (1.0, 4, 4), (4.9, 5, 4), (0.1, 6, 6)):
        timer.now += seconds
        clock.now -= 3600
        status.update(state="running", iteration=iteration)
        assert read(tmp_path)["iteration"] == seen, f"iteration {iteration}, {seconds} s after the last one"
    status.update(state="saving", iteration=7)
    assert read(tmp_path) | {"state": "saving", "iteration": 7, "time": clock.now} == read(tmp_path)


def test_end_is_written_immediately(tmp_path: Path) -> None:
    status = RunStatus(tmp_path, clock=Clock())
    status.update(iteration=500, last_checkpoint=400)
    status.finish("finished", ExitCode.OK, "finished after 500 iterations")
    found = read(tmp_path)
    assert (found["state"], found["iteration"], found["last_checkpoint"], found["code"]) == ("finished", 500, 400, 0)
    assert found["sentence"] == "finished after 500 iterations"


def test_error_writes_code_and_sentence(tmp_path: Path) -> None:
    cases: tuple[tuple[BaseException, int, str], ...] = (
        (DataProblem("no data"), 4, "no data"),
        (ZeroDivisionError("x"), 1, "ZeroDivisionError: x"),
        (KeyboardInterrupt(), 130, "interrupted from the keyboard"),
        (KeyboardInterrupt("SIGTERM, the second signal"), 130, "SIGTERM, the second signal"),
    )
    for number, (error, code, sentence) in enumerate(cases):
        with pytest.raises(type(error)), RunStatus(tmp_path / str(number)):
            raise error
        found = read(tmp_path / str(number))
        assert (found["state"], found["code"], found["sentence"]) == ("failed", code, sentence)


@pytest.mark.parametrize(
    ("saved", "hint"),
    [(400, "continues from the checkpoint of 400"), (None, "no checkpoint was saved, so the same command")],
)
def test_an_interrupted_run_states_what_is_lost(saved: int | None, hint: str, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as caught, RunStatus(tmp_path) as status:
        status.update(iteration=500, last_checkpoint=saved)
        raise KeyboardInterrupt("SIGINT, the second signal")
    assert caught.value.__notes__ == [read(tmp_path)["hint"]]
    assert "the last iteration was 500" in read(tmp_path)["hint"] and hint in read(tmp_path)["hint"]


def test_failed_state_is_final(tmp_path: Path) -> None:
    status = RunStatus(tmp_path, clock=Clock())
    status.fail(ExitCode.NUMERICS, "loss is nan")
    status.update(state="running", iteration=9)
    assert read(tmp_path)["state"] == "failed"


def test_first_independent_failure_is_named(tmp_path: Path) -> None:
    """The clocks of the hosts differ by an hour each."""
    clocks = [Clock() for _ in range(4)]
    for rank, clock in enumerate(clocks):
        clock.now -= 3600 * rank
    ranks = [RunStatus(tmp_path, rank=rank, clock=clock) for rank, clock in enumerate(clocks)]
    failures = (
        (2, ExitCode.OTHER_RANK, "another rank left"),
        (3, ExitCode.NUMERICS, "loss is nan on rank 3"),
        (1, ExitCode.DATA, "rank 1 failed later"),
        (0, ExitCode.OTHER_RANK, "another rank left"),
    )
    named = []
    for rank, code, sentence in failures:
        time.sleep(0.02)  # resolution of file times
        ranks[rank].fail(code, sentence, hint="look there")
        named.append(read(tmp_path)["rank"])
    assert named == [2, 3, 3, 3]
    assert read(tmp_path)["sentence"] == "loss is nan on rank 3" and read(tmp_path)["hint"] == "look there"
    assert sorted(path.name for path in (tmp_path / "crash").iterdir()) == [
        f"rank_0000{rank}.json" for rank in range(4)
    ]


def test_lost_connection_without_a_named_rank_is_replaced_by_an_attributed_one(tmp_path: Path) -> None:
    """The report without a named rank is replaced even if its file is newer."""
    first, other = (RunStatus(tmp_path, rank=rank) for rank in (0, 2))
    first.fail(ExitCode.OTHER_RANK, "the connection broke")
    later = time.time() + 1.0
    os.utime(tmp_path / "crash" / "rank_00000.json", (later, later))
    other.fail(ExitCode.OTHER_RANK, "rank 1 vanished", first=1)
    assert read(tmp_path)["rank"] == 1


def test_report_that_arrives_while_another_rank_writes_is_included(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 reads the reports before rank 0 has failed, and writes status.json afterwards."""
    first, other = (RunStatus(tmp_path, rank=rank) for rank in (0, 2))
    replace = os.replace

    def after_rank_0(aside: Path, path: Path) -> None:
        if path.name == "status.json":
            monkeypatch.undo()
            first.fail(ExitCode.NUMERICS, "loss is nan")
        replace(aside, path)

    monkeypatch.setattr(os, "replace", after_rank_0)
    other.fail(ExitCode.OTHER_RANK, "the connection broke")
    assert (read(tmp_path)["rank"], read(tmp_path)["sentence"]) == (0, "loss is nan")


def test_newest_checkpoint_known_to_any_rank_is_written(tmp_path: Path) -> None:
    """The first rank may complete a checkpoint after another rank has failed."""
    first, other = RunStatus(tmp_path, rank=0), RunStatus(tmp_path, rank=1)
    other.update(last_checkpoint=2)
    other.fail(ExitCode.NUMERICS, "loss is nan")
    first.update(last_checkpoint=4)
    first.fail(ExitCode.OTHER_RANK, "another rank left")
    assert (read(tmp_path)["rank"], read(tmp_path)["last_checkpoint"]) == (1, 4)


def test_failures_of_an_earlier_start_and_invalid_files_are_ignored(tmp_path: Path) -> None:
    """The failure is overwritten even if the clock of the host that wrote it is hours ahead."""
    ahead = Clock()
    ahead.now = time.time() + 7200
    RunStatus(tmp_path, rank=5, clock=ahead).fail(ExitCode.DATA, "long ago")
    os.utime(tmp_path / "crash" / "rank_00005.json", (0.0, time.time() - 100))
    (tmp_path / "crash" / "rank_00006.json").write_text('{"state": "fai')
    RunStatus(tmp_path).fail(ExitCode.NUMERICS, "now")
    assert read(tmp_path)["sentence"] == "now"


def test_folder_removed_during_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = RunStatus(tmp_path)
    replace = os.replace

    def and_removed(aside: Path, path: Path) -> None:
        replace(aside, path)
        if path.parent.name == "crash":
            path.unlink()

    monkeypatch.setattr(os, "replace", and_removed)
    status.fail(ExitCode.NUMERICS, "now")
    assert read(tmp_path)["sentence"] == "now"


def test_other_ranks_write_failures_only(tmp_path: Path) -> None:
    status = RunStatus(tmp_path, rank=1)
    status.update(state="running", iteration=3)
    status.finish("finished", ExitCode.OK)
    assert [path.name for path in tmp_path.iterdir()] == [STARTED]


def test_failure_before_the_rendezvous_is_kept_by_the_first_rank(tmp_path: Path) -> None:
    """The first rank may start after another one has failed."""
    RunStatus(tmp_path, rank=1).fail(ExitCode.ENVIRONMENT, "no GPU")
    first = RunStatus(tmp_path)
    assert (read(tmp_path)["state"], read(tmp_path)["sentence"]) == ("failed", "no GPU")
    first.starting(say=print)
    assert read(tmp_path)["state"] == "starting"


def test_failure_of_an_earlier_start_is_overwritten(tmp_path: Path) -> None:
    RunStatus(tmp_path, rank=1).fail(ExitCode.ENVIRONMENT, "no GPU")
    os.utime(tmp_path / "status.json", (0.0, time.time() - 60))
    RunStatus(tmp_path)
    assert read(tmp_path)["state"] == "starting"


def test_a_start_that_is_rejected_keeps_the_newest_checkpoint(tmp_path: Path) -> None:
    RunStatus(tmp_path).update(state="saving", last_checkpoint=400)
    with pytest.raises(DataProblem), RunStatus(tmp_path):
        raise DataProblem("no data")
    assert (read(tmp_path)["state"], read(tmp_path)["last_checkpoint"]) == ("failed", 400)
    status = RunStatus(tmp_path)
    status.update(state="running", last_checkpoint=None)  # a start from scratch
    assert read(tmp_path)["last_checkpoint"] is None


def test_writes_are_atomic(tmp_path: Path) -> None:
    status = RunStatus(tmp_path, timer=(clock := Clock()))
    for iteration in range(20):
        clock.now += 10
        status.update(state="running", iteration=iteration)
        assert read(tmp_path)["iteration"] == iteration
    assert [path.name for path in tmp_path.iterdir() if path.name != STARTED] == ["status.json"]


def test_unwritable_folder_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    reported: list[str] = []
    status = RunStatus(tmp_path / "file", say=reported.append, clock=Clock())
    status.update(state="running")
    status.fail(ExitCode.BUG, "x")
    assert len(reported) == 1 and reported[0].startswith("cannot write ") and "training continues" in reported[0]


def test_nothing_is_written_without_a_run_folder() -> None:
    status = RunStatus(None)
    status.update(state="running")
    status.fail(ExitCode.BUG, "x")
