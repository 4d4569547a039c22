"""Table of sharded steps: plans of its cases, rows, and a run of small models on two CPU processes."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from arguments.read import read_plan
from benchmarks.harness import bench_fsdp
from benchmarks.harness.bench_fsdp import CASES, COLUMNS, Case, Measurement, outcomes
from megatron_moe.config.exit_codes import ExitCode, MemoryProblem
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.memory import RankMemory, heaviest

BY_NAME = {case.name: case for case in CASES}
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
        assert heaviest(RankMemory(plan).all_ranks()).total / 2**20 < 0.97 * H200_MIB


def test_cases_differ_from_their_baselines_only_in_what_is_compared() -> None:
    for case in CASES:
        base = BY_NAME[case.baseline] if case.baseline else case
        one, other = plan_of(base), plan_of(case)
        assert (one.model, one.batch, one.parallel.world_size) == (other.model, other.batch, other.parallel.world_size)
        assert CASES.index(base) <= CASES.index(case), "a baseline runs first"


def run(names: Sequence[str], results: Sequence[Measurement | Exception]) -> tuple[bool, list[str], list[str]]:
    """Runs cases with the given results. Returns whether they succeeded, and rows and names of the last document."""
    given, seen = iter(results), list[tuple[list[str], list[str]]]()

    def measure(case: Case, plan: RunPlan) -> Measurement:
        found = next(given)
        if isinstance(found, Exception):
            raise found
        return found

    def write(rows: Sequence[str], cases: Sequence[Case]) -> None:
        seen.append((list(rows), [case.name for case in cases]))

    succeeded = outcomes([BY_NAME[name] for name in names], tiny=True, measure=measure, write=write)
    return succeeded, *seen[-1]


def test_rows_state_ratios_of_times_and_of_memory() -> None:
    results = measurement(1000.0), measurement(1050.0, peak=101_000.0, closed=100_000.0)
    succeeded, rows, names = run(["m27-zero1", "m27-zero3"], results)
    assert succeeded and names == ["m27-zero1", "m27-zero3"]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    assert all(len(row) == len(COLUMNS) for row in cells)
    assert cells[0][3:6] == ["", "", ""]
    assert cells[1][1:] == [
        "1050.0 (1049.0, 1051.0)", "400.0", "m27-zero1", "1.050", "1.06", "1.02", "101,000", "100,000", "1.0100",
    ]  # fmt: skip


def test_a_failure_is_a_row_and_ends_the_run() -> None:
    succeeded, rows, names = run(["m27-zero1", "m27-zero3"], [MemoryProblem("no | memory"), measurement(1.0)])
    assert not succeeded and names == ["m27-zero1"]
    assert "failed: MemoryProblem: no \\| memory" in rows[0]


@pytest.mark.slow
def test_small_models_run_on_two_cpu_processes(tmp_path: Path) -> None:
    names = ["m27-zero1", "m27-zero3", "dense-torch", "dense-zero3", "m27-1m-muon", "m27-qk-clip"]
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29719"]
    words += [bench_fsdp.__file__, "--tiny", "--cases", *names, "--output-dir", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == ExitCode.OK, done.stderr[-3000:]
    (document,) = tmp_path.glob("*-fsdp-muon.md")
    rows = [line for line in document.read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(names) and not any("failed" in row for row in rows)
