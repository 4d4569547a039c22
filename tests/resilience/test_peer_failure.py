"""Attribution of broken connections."""

import json
import os
import time
from pathlib import Path

import pytest

from megatron_moe.config.exit_codes import DataProblem, ExitCode, OtherRankProblem
from megatron_moe.resilience.peer_failure import PeerFailures, is_broken_connection
from megatron_moe.resilience.run_status import RunStatus
from megatron_moe.resilience.watchdog import Watchdog

BROKEN = RuntimeError(
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:19044"
)


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allows several seconds between the failure of a peer and the launch of this rank."""
    monkeypatch.setattr("megatron_moe.resilience.run_status._START_SKEW_SECONDS", 50.0)


def blamed(
    run_dir: Path | None,
    error: BaseException,
    *,
    rank: int = 0,
    world_size: int = 3,
    seconds: float = 0.1,
    watchdog: Watchdog | None = None,
) -> BaseException:
    """Exception raised by a rank whose connection broke."""
    status = RunStatus(run_dir, rank=rank)
    watchdog = watchdog or Watchdog({}, run_dir)
    with pytest.raises(BaseException) as raised, status:
        with PeerFailures(run_dir, status, watchdog, rank=rank, world_size=world_size, seconds=seconds):
            raise error
    return raised.value


def test_broken_connection_messages() -> None:
    assert is_broken_connection(BROKEN) and is_broken_connection(RuntimeError("NCCL error: remote process exited"))
    assert not is_broken_connection(RuntimeError("shape mismatch")) and not is_broken_connection(DataProblem("gloo"))


def test_rank_without_report_is_named(tmp_path: Path) -> None:
    RunStatus(tmp_path, rank=1).fail(ExitCode.OTHER_RANK, "the connection broke")
    problem = blamed(tmp_path, BROKEN)
    assert (
        isinstance(problem, OtherRankProblem) and problem.rank == 2 and "rank 2 ended without a report" in str(problem)
    )
    found = json.loads((tmp_path / "status.json").read_text())
    assert (found["code"], found["rank"], found["host"]) == (11, 2, None)


def test_time_limit_of_the_step_does_not_end_the_attribution(tmp_path: Path) -> None:
    codes: list[int] = []
    with Watchdog({"step": 0.5, "exit": 60}, tmp_path, exit_process=codes.append) as watchdog:
        watchdog.enter("step", 1)
        time.sleep(0.2)
        assert isinstance(blamed(tmp_path, BROKEN, seconds=1.0, watchdog=watchdog), OtherRankProblem)
    assert not codes


def test_reported_cause_of_a_peer_is_quoted(tmp_path: Path) -> None:
    RunStatus(tmp_path, rank=1).fail(ExitCode.DATA, "no data")
    problem = blamed(tmp_path, BROKEN)
    assert str(problem) == "rank 1 failed first, code 4: no data"
    assert json.loads((tmp_path / "status.json").read_text())["rank"] == 1


def report(run_dir: Path, rank: int, code: ExitCode, *, seconds: float) -> None:
    """Writes the report of a rank with a modification time `seconds` from now; the clock of the rank's host is years
    behind."""
    folder = run_dir / "crash"
    folder.mkdir(exist_ok=True)
    path = folder / f"rank_{rank:05d}.json"
    path.write_text(json.dumps({"code": int(code), "sentence": f"of rank {rank}", "time": 1e9 - rank}))
    os.utime(path, (0.0, time.time() + seconds))


def test_earliest_failure_is_named(tmp_path: Path) -> None:
    report(tmp_path, 1, ExitCode.MEMORY, seconds=900.0)
    report(tmp_path, 2, ExitCode.DATA, seconds=600.0)
    assert str(blamed(tmp_path, BROKEN)) == "rank 2 failed first, code 4: of rank 2"


def test_reports_of_an_earlier_start_are_ignored(tmp_path: Path) -> None:
    report(tmp_path, 1, ExitCode.DATA, seconds=-60.0)
    report(tmp_path, 2, ExitCode.MEMORY, seconds=600.0)
    assert str(blamed(tmp_path, BROKEN)).startswith("rank 2 failed first, code 7")


def test_collective_timeout_exits_with_the_hang_code(tmp_path: Path) -> None:
    RunStatus(tmp_path, rank=1).fail(ExitCode.OTHER_RANK, "the connection broke")
    late = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 3000ms for recv operation")
    problem = blamed(tmp_path, late)
    assert isinstance(problem, OtherRankProblem) and (problem.code, problem.rank) == (ExitCode.HANG, 2)
    assert "rank 2 did not take part" in json.loads((tmp_path / "status.json").read_text())["sentence"]


def test_no_rank_is_named_without_a_run_folder() -> None:
    problem = blamed(None, BROKEN)
    assert isinstance(problem, OtherRankProblem) and problem.rank is None and "--run-dir" in str(problem)


@pytest.mark.parametrize(("error", "world_size"), [(DataProblem("x"), 3), (RuntimeError("x"), 3), (BROKEN, 1)])
def test_other_errors_propagate(tmp_path: Path, error: Exception, world_size: int) -> None:
    assert blamed(tmp_path, error, world_size=world_size) is error
