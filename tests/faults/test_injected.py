"""Injected faults of one rank: exit codes, status.json, and messages of all ranks."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.scenarios import NIGHTLY, NUM_RANKS, SCENARIOS
from tests.helpers.checkpoint_files import verify
from tests.helpers.programs import run_script
from tests.helpers.ranks import REPOSITORY

VANISHED = "rank 1 ended without a report: it was killed, or its node failed"


@pytest.fixture(scope="module")
def folder(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folders of the scenarios, by name."""
    return run_all(tmp_path_factory.mktemp("scenarios"), data, [name for name in SCENARIOS if name not in NIGHTLY])


@pytest.fixture(scope="module")
def nightly_folder(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_all(tmp_path_factory.mktemp("nightly"), data, NIGHTLY)


def run_all(folder: Path, data: str, names: Sequence[str]) -> Path:
    done = run_script(REPOSITORY / "tests" / "faults" / "scenarios.py", folder, data, *names, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def outcomes(folder: Path, name: str) -> list[dict]:
    return json.loads((folder / "outcomes.json").read_text())[name]


def outcome(folder: Path, name: str) -> dict:
    """Outcome of a scenario with one launch."""
    (only,) = outcomes(folder, name)
    return only


def test_peers_of_a_lost_rank_exit_with_code_11_and_name_it(folder: Path) -> None:
    outcome_without_report(folder, "kill", -9)


@pytest.mark.slow
def test_a_segmentation_fault_prints_its_stack(nightly_folder: Path) -> None:
    found = outcome_without_report(nightly_folder, "segfault", -11)
    assert "Fatal Python error: Segmentation fault" in found["said"][1] and "fault_injection.py" in found["said"][1]


def outcome_without_report(folder: Path, name: str, own: int) -> dict:
    """Outcome of a scenario in which rank 1 ends with code `own` and without a report."""
    found = outcome(folder, name)
    assert found["codes"] == [11, own, 11], found["said"]
    assert (found["status"]["code"], found["status"]["rank"]) == (11, 1)
    assert found["status"]["sentence"].startswith(VANISHED)
    assert "Traceback" not in found["said"][0] + found["said"][2]
    return found


def test_the_first_failed_rank_is_reported_with_its_reason(folder: Path) -> None:
    """Only the failed rank prints its traceback."""
    check_reported(folder, "exception", 1, "InjectedFaultError")


@pytest.mark.slow
def test_a_rank_that_exits_or_runs_out_of_memory_is_reported(nightly_folder: Path) -> None:
    outcome_without_report(nightly_folder, "exit", 1)
    check_reported(nightly_folder, "memory", 7, "out of memory")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("backward", 75), ("save", 75), ("end", 0)])
def test_a_signal_in_any_phase_leads_to_a_checkpoint(nightly_folder: Path, name: str, code: int) -> None:
    """The signal arrives in backward, in a save, or after the last step."""
    name = "signal at the end" if name == "end" else f"signal in {name}"
    found = outcome(nightly_folder, name)
    assert found["codes"] == [code] * NUM_RANKS, found["said"]
    checkpoints = sorted((nightly_folder / name.replace(" ", "-") / "checkpoints").glob("iter_*"))
    assert [path.name for path in checkpoints] == [f"iter_{n:07d}" for n in ((2,) if code else (2, 4))]
    assert not any(verify(path) for path in checkpoints)


@pytest.mark.slow
def test_a_hanging_save_exits_with_code_10(nightly_folder: Path) -> None:
    """The save timeout expires and no checkpoint remains."""
    found = outcome(nightly_folder, "hang in save")
    assert found["codes"] == [10] * NUM_RANKS, found["said"]
    assert found["status"]["code"] == 10 and "phase save, iteration 2" in found["status"]["sentence"]
    assert list((nightly_folder / "hang-in-save" / "checkpoints").glob("iter_*")) == []


def check_reported(folder: Path, name: str, own: int, words: str) -> None:
    """Asserts that rank 1 exits with code `own` and `words` in its reason, and that the other ranks name it."""
    found = outcome(folder, name)
    assert found["codes"] == [11, own, 11], found["said"]
    assert (found["status"]["code"], found["status"]["rank"]) == (own, 1) and words in found["status"]["sentence"]
    for rank in (0, 2):
        assert f"rank 1 failed first, code {own}: " in found["said"][rank]
        assert "Traceback" not in found["said"][rank]


def test_a_result_that_is_not_reproduced_exits_with_code_16_and_names_the_rank(folder: Path) -> None:
    found = outcome(folder, "nan once")
    assert found["codes"] == [16] * NUM_RANKS == [found["status"]["code"]] * NUM_RANKS
    assert "repeating the step gave a different result" in found["status"]["sentence"]
    assert "suspect rank 1 (" in found["status"]["sentence"]


def test_the_same_nonfinite_step_in_two_starts_exits_with_code_17(folder: Path) -> None:
    """The first launch exits with code 6, because one launch cannot distinguish a model fault from a hardware fault."""
    first, second = outcomes(folder, "repeated")
    assert (first["codes"], second["codes"]) == ([6] * NUM_RANKS, [17] * NUM_RANKS)
    assert "or a permanent fault of this hardware" in first["status"]["sentence"]
    assert "as in an earlier launch" in second["status"]["sentence"]


def test_a_flipped_bit_of_a_weight_is_named_with_its_rank(folder: Path) -> None:
    found = outcome(folder, "flipped bit")
    assert found["codes"] == [12] * NUM_RANKS
    assert "embedding.word_embeddings.weight: rank 1 of 3 differs" in found["status"]["sentence"]


def test_a_full_disk_costs_one_checkpoint_and_is_logged(folder: Path) -> None:
    """The file size limit of one rank makes its writes fail like a full disk."""
    found = outcome(folder, "full disk")
    assert found["codes"] == [0] * NUM_RANKS, found["said"]
    checkpoints = folder / "full-disk" / "checkpoints"
    assert [path.name for path in checkpoints.glob("iter_*")] == ["iter_0000004"]
    assert verify(checkpoints / "iter_0000004") == [] and not list(checkpoints.glob(".tmp*"))
    assert "the checkpoint of iteration 2 could not be saved" in found["said"][0]


@pytest.mark.slow
def test_a_pending_save_is_completed_at_the_end_of_the_run(nightly_folder: Path) -> None:
    assert outcome(nightly_folder, "async save")["codes"] == [0] * NUM_RANKS
    checkpoints = sorted((nightly_folder / "async-save" / "checkpoints").glob("iter_*"))
    assert [path.name for path in checkpoints] == ["iter_0000002", "iter_0000004"]
    assert [verify(path) for path in checkpoints] == [[], []]


def test_a_slow_rank_is_named_and_recomputed_steps_are_equal(folder: Path) -> None:
    found = outcome(folder, "slow")
    assert found["codes"] == [0] * NUM_RANKS
    assert "slowest by forward: rank 1 (" in found["said"][0]
    assert "iterations were computed twice: bitwise equal on all ranks" in found["said"][0]
    lines = (folder / "slow" / "checkpoints" / "progress.txt").read_text().splitlines()
    assert [line.split("\t")[3] for line in lines] == ["Starting job", "Saved checkpoint", "Saved checkpoint"]


def test_ranks_with_different_flags_are_rejected_with_the_flags(folder: Path) -> None:
    found = outcome(folder, "different flags")
    assert found["codes"] == [3] * NUM_RANKS
    assert "lr: 0.01 on rank 0, 0.5 on rank 2" in found["status"]["sentence"]


def test_injected_faults_are_listed_at_start(folder: Path) -> None:
    assert "--inject: rank 1, iteration 3, step: kill, SIGKILL to the process" in outcome(folder, "kill")["said"][0]
