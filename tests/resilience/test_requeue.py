"""Decision whether to restart a run that has ended."""

import json
import os
import time
from dataclasses import asdict

import pytest

from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.logs.run_lock import RunLock
from megatron_moe.resilience.requeue import (
    HISTORY,
    LaunchOutcome,
    decide_and_record,
    decide_restart,
    read_history,
    read_report,
)
from megatron_moe.resilience.run_status import STARTED, STATUS, RunStatus, StatusReport
from tools.requeue import main

RESTARTED = {
    ExitCode.HANG,
    ExitCode.OTHER_RANK,
    ExitCode.DRIFT,
    ExitCode.RENDEZVOUS,
    ExitCode.LAUNCHER,
    ExitCode.RERUN_DISAMBIGUATE,
    ExitCode.PREEMPTED_SAVED,
    ExitCode.PREEMPTED_UNSAVED,
}


def ending(checkpoint: int | None, restart: bool = True) -> LaunchOutcome:
    return LaunchOutcome(time=0.0, code=10, iteration=7, last_checkpoint=checkpoint, restart=restart, reason="")


@pytest.mark.parametrize("code", list(ExitCode))
def test_exit_codes_that_are_restarted(code):
    report = StatusReport(state="failed", code=int(code), sentence="the sentence")
    decision = decide_restart(report, 1)
    assert decision.restart == (code in RESTARTED)
    if code not in RESTARTED:
        assert f"exit code {int(code)}: the sentence" in decision.reason


@pytest.mark.parametrize("state", ["starting", "running", "saving"])
def test_run_without_an_exit_report_is_restarted(state):
    assert decide_restart(StatusReport(state=state, iteration=5), 1).restart


def test_finished_run_is_not_restarted():
    decision = decide_restart(StatusReport(state="finished", code=0, sentence="finished after 10 iterations"), 1)
    assert not decision.restart and "finished after 10 iterations" in decision.reason


@pytest.mark.parametrize(
    ("code", "restart"), [(0, False), (1, False), (2, False), (130, False), (137, True), (143, True)]
)
def test_signals_are_restarted_without_a_report(code, restart):
    assert decide_restart(None, code).restart == restart


def test_start_killed_before_its_first_report_is_restarted(tmp_path):
    """torchrun converts the signal to exit code 1, like the code of a rejected command line."""
    since = time.time() - 5
    RunStatus(tmp_path, rank=1)
    assert decide_and_record(tmp_path, 1, since=since, now=time.time()).reason.startswith("it ended without a report")
    os.utime(tmp_path / STARTED, (0.0, since - 60))
    reason = decide_and_record(tmp_path, 1, since=since, now=time.time()).reason
    assert "before it wrote status.json" in reason and "or a rank that was killed" in reason
    rejected = decide_and_record(tmp_path, int(ExitCode.CONFIG), since=since, now=time.time()).reason
    assert "error in the command line" in rejected and "killed" not in rejected


def test_host_of_drifted_weights_is_suspect():
    report = StatusReport(state="failed", code=int(ExitCode.DRIFT), host="node7")
    assert decide_restart(report, 1).suspect_host == "node7"
    assert decide_restart(StatusReport(state="failed", code=int(ExitCode.HANG), host="node7"), 1).suspect_host is None


def test_patience_without_a_new_checkpoint():
    report = StatusReport(state="running", iteration=37, last_checkpoint=30)
    assert decide_restart(report, 1, (ending(30),)).restart
    assert decide_restart(report, 1, (ending(30), ending(30))).restart, "the first launch wrote the checkpoint"
    assert decide_restart(report, 1, (ending(20), ending(30), ending(30))).restart, "the second launch wrote it"
    decision = decide_restart(report, 1, (ending(20), ending(30), ending(30), ending(30)))
    assert not decision.restart
    assert "launch number 3 in a row without a new checkpoint, and it ended at iteration 37" in decision.reason
    assert decide_restart(report, 1, (ending(30), ending(30), ending(30)), patience=4).restart
    unsaved = StatusReport(state="running", iteration=3)
    assert not decide_restart(unsaved, 1, (ending(None), ending(None))).restart


@pytest.mark.parametrize("report", [None, StatusReport()], ids=["no report", "no status.json"])
def test_a_launch_that_was_killed_at_its_start_is_one_without_a_new_checkpoint(report):
    """The launches before it saved checkpoints."""
    preempted = (ending(10), ending(20), ending(30))
    assert decide_restart(report, 137, preempted).restart
    assert decide_restart(report, 137, (*preempted, ending(None))).restart
    assert not decide_restart(report, 137, (*preempted, ending(None), ending(30))).restart


def test_new_checkpoint_or_manual_start_resets_patience():
    report = StatusReport(state="running", iteration=37, last_checkpoint=30)
    assert decide_restart(report, 1, (ending(20), ending(20), ending(30))).restart
    assert decide_restart(report, 1, (ending(30), ending(30), ending(30, restart=False))).restart
    assert decide_restart(report, 1, (ending(90, restart=False), ending(10), ending(20))).restart, "a fresh start"


def test_old_report_is_ignored(tmp_path):
    (tmp_path / STATUS).write_text(json.dumps(asdict(StatusReport(state="running"))))
    os.utime(tmp_path / STATUS, (0.0, 100.0))
    assert read_report(tmp_path, since=99.0) is not None
    assert read_report(tmp_path, since=101.0) is None
    assert not decide_and_record(tmp_path, 2, since=time.time() - 5, now=time.time()).restart


@pytest.mark.parametrize("behind", [-7200.0, 0.0, 7200.0])
def test_report_of_this_start_counts_with_any_host_clock(tmp_path, behind):
    report = StatusReport(state="failed", code=int(ExitCode.HANG), time=time.time() - behind)
    (tmp_path / STATUS).write_text(json.dumps(asdict(report)))
    assert decide_and_record(tmp_path, 1, since=time.time() - 60, now=time.time()).reason == "the run hung"
    os.utime(tmp_path / STATUS, (0.0, time.time() - 90))
    assert not decide_and_record(tmp_path, 1, since=time.time() - 60, now=time.time()).restart


@pytest.mark.parametrize("text", ["", "{", "[]", '{"state": "running", "unknown": 1}'])
def test_invalid_report_is_ignored(tmp_path, text):
    (tmp_path / STATUS).write_text(text)
    assert read_report(tmp_path) is None


def test_history_of_ends(tmp_path):
    (tmp_path / STATUS).write_text(json.dumps(asdict(StatusReport(state="running", iteration=4, time=5.0))))
    answers = [decide_and_record(tmp_path, 1, since=-600.0, now=float(now)).restart for now in (6, 7, 8)]
    assert answers == [True, True, False]
    assert [(entry.time, entry.restart) for entry in read_history(tmp_path)] == [(6, True), (7, True), (8, False)]
    with open(tmp_path / HISTORY, "a") as history:
        history.write('{"half of a li')
    assert len(read_history(tmp_path)) == 3


def test_rejected_start_of_a_second_job_is_not_restarted(tmp_path):
    """status.json belongs to the other job and has no exit code yet."""
    lock = RunLock(tmp_path, does="writes into", option="--run-dir")
    (tmp_path / STATUS).write_text(json.dumps(asdict(StatusReport(state="running", iteration=4, time=5.0))))
    waited = []
    decision = decide_and_record(tmp_path, 1, since=-600.0, now=6.0, sleep=waited.append)
    assert waited == [10.0] and not decision.restart
    assert f"another job writes into the run folder {tmp_path}: process " in decision.reason
    assert not (tmp_path / HISTORY).exists()
    ends = {"sleep": lambda seconds: lock.release()}  # a rank of this job, whose launcher was killed
    assert decide_and_record(tmp_path, 1, since=-600.0, now=7.0, **ends).restart


def test_unwritable_history_prevents_restart(tmp_path, capsys):
    """Restarts would be unlimited without a history."""
    (tmp_path / "run").write_text("a file where the folder should be")
    assert main(["--run-dir", str(tmp_path / "run"), "--exit-code", "137"]) == 1
    assert "leave it: the history of" in capsys.readouterr().out
