"""Tests of bench_fsdp: plans of its cases, table rows, and a run of small models on two CPU processes."""

import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from arguments.read import read_plan
from benchmarks.harness import bench_fsdp
from benchmarks.harness.bench_fsdp import (
    BY_NAME,
    CASES,
    COLUMNS,
    Case,
    Measurement,
    first_free,
    in_new_processes,
    outcomes,
    with_baselines,
    write_result,
)
from megatron_moe.config.exit_codes import ExitCode, MemoryProblem
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.memory import RankMemory, rank_with_peak_memory

H200_MIB = 139 * 1024


def plan_of(case: Case, *, tiny: bool = False) -> RunPlan:
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    return read_plan(
        case.words(tiny=tiny),
        ranks | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
        vocab_size_of=lambda config: 1,
    )


def measurement(ms: float, *, peak: float = 0.0, closed: float = 0.0) -> Measurement:
    return Measurement(step_ms=(ms + 1, ms, ms - 1), tflops=400.0, peak_mib=peak, closed_mib=closed)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_are_plans_of_two_ranks_that_fit_an_h200(case: Case) -> None:
    assert plan_of(case, tiny=True).parallel.world_size == 2
    plan = plan_of(case)
    assert plan.parallel.world_size == 2 and plan.parallel.dp == 2 and plan.parallel.ep == 1
    assert (plan.data_parallel.fsdp is not None) == ("use-megatron-fsdp" in case.flags)
    if not case.torch_fsdp2:
        assert rank_with_peak_memory(RankMemory(plan).all_ranks()).total / 2**20 < 0.97 * H200_MIB


def test_cases_differ_from_their_baselines_only_in_what_is_compared() -> None:
    for case in CASES:
        base = BY_NAME[case.baseline] if case.baseline else case
        one, other = plan_of(base), plan_of(case)
        assert (one.model, one.batch, one.parallel.world_size) == (other.model, other.batch, other.parallel.world_size)
        assert CASES.index(base) <= CASES.index(case), "a baseline runs first"


def run(names: Sequence[str], results: Sequence[Measurement | str]) -> tuple[bool, list[list[str]]]:
    """Runs cases with the given results. Returns whether all were measured, and the cells of the last document."""
    given, documents = iter(results), list[tuple[list[str], list[str]]]()

    def write(rows: Sequence[str], cases: Sequence[Case]) -> None:
        documents.append((list(rows), [case.name for case in cases]))

    succeeded = outcomes([BY_NAME[name] for name in names], measure=lambda case: next(given), write=write)
    assert [document[1] for document in documents] == [list(names[:n]) for n in range(1, len(names) + 1)]
    cells = [[cell.strip() for cell in row.split(" |")[:-1]] for row in documents[-1][0]]
    assert all(len(row) == len(COLUMNS) for row in cells)
    return succeeded, cells


def test_rows_state_ratios_of_times_and_of_memory() -> None:
    results = measurement(1000.0), measurement(1050.0, peak=101_000.0, closed=100_000.0)
    succeeded, cells = run(["m27-zero1", "m27-zero3"], results)
    assert succeeded and cells[0][3:6] == ["", "", ""]
    assert cells[1][1:] == [
        "1050.0 (1049.0, 1051.0)", "400.0", "m27-zero1", "1.050", "1.06", "1.02", "101,000", "100,000", "1.0100",
    ]  # fmt: skip


def test_a_failure_is_a_row_and_later_cases_run() -> None:
    results = "failed: OutOfMemoryError", measurement(20.0), measurement(10.0), measurement(30.0)
    succeeded, cells = run(["m27-zero1", "m27-zero3", "q24-zero1", "q24-zero3"], results)
    assert not succeeded and cells[0][1] == "failed: OutOfMemoryError"
    assert [row[4] for row in cells] == ["", "not measured", "", "3.000"]


def test_selected_cases_bring_their_baselines() -> None:
    names = [case.name for case in with_baselines(["m27-qk-clip", "dense-zero3", "m27-1m"])]
    assert names == ["m27-zero1", "dense-torch", "dense-zero3", "m27-1m", "m27-qk-clip"]


def test_later_documents_of_a_day_have_numbers(tmp_path: Path) -> None:
    for name in ("a.md", "a-2.md", "a-3.md"):
        assert first_free(tmp_path / "a.md") == tmp_path / name
        (tmp_path / name).touch()


def started(program: str, folder: Path, timeout_s: float = 60.0) -> Measurement | str:
    """Runs a Python program that may write a result, as the processes of a case do."""
    return in_new_processes([sys.executable, "-c", program], folder / "result.json", timeout_s)


def test_results_of_processes(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert write_result(path, lambda: measurement(5.0, peak=2.0)) == ExitCode.OK
    assert started("pass", tmp_path) == measurement(5.0, peak=2.0)
    assert started("raise ValueError('lost | rank')", tmp_path) == "failed: exit code 1: ValueError: lost \\| rank"
    path.unlink()
    assert started("pass", tmp_path) == "failed: exit code 0: no message"
    assert started("import time; time.sleep(60)", tmp_path, 0.5) == "failed: no result after 0.5 s"


def test_first_failure_of_the_ranks_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    for error in (MemoryProblem("no | memory"), RuntimeError("connection closed")):
        with pytest.raises(type(error)):
            write_result(path, partial(fail, error))
    assert started("exit(1)", tmp_path) == "failed: MemoryProblem: no \\| memory"


def fail(error: Exception) -> Measurement:
    raise error


@pytest.mark.slow
def test_small_models_run_on_two_cpu_processes(tmp_path: Path) -> None:
    names = ["m27-zero3", "dense-zero3", "m27-1m-muon", "m27-qk-clip"]
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29719"]
    words += [bench_fsdp.__file__, "--tiny", "--cases", *names, "--output-dir", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == ExitCode.OK, done.stderr[-3000:]
    (document,) = tmp_path.glob("*-fsdp-muon.md")
    rows = [line for line in document.read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 7 and not any("failed" in row for row in rows)
