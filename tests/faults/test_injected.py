"""What follows when a rank is broken from inside: exit codes, the rank that is blamed, and what the others say."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_moe.checkpoint.verify import verify
from tests.faults.scenarios import NIGHTLY, NUM_RANKS, SCENARIOS
from tests.helpers.ranks import REPOSITORY

VANISHED = "rank 1 vanished without a report: killed, or its node failed"


@pytest.fixture(scope="module")
def folder(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the scenarios have left their run folders."""
    return played(tmp_path_factory.mktemp("scenarios"), data, [name for name in SCENARIOS if name not in NIGHTLY])


@pytest.fixture(scope="module")
def nightly_folder(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return played(tmp_path_factory.mktemp("nightly"), data, NIGHTLY)


def played(folder: Path, data: str, names: Sequence[str]) -> Path:
    command = [sys.executable, "-m", "tests.faults.scenarios", str(folder), data, *names]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def outcomes(folder: Path, name: str) -> list[dict]:
    return json.loads((folder / "outcomes.json").read_text())[name]


def outcome(folder: Path, name: str) -> dict:
    """Of a scenario with one start."""
    (only,) = outcomes(folder, name)
    return only


@pytest.mark.parametrize(("name", "own"), [("kill", -9), ("segfault", -11)])
def test_peers_of_a_rank_that_vanishes_leave_with_code_11_and_name_it(folder: Path, name: str, own: int) -> None:
    """P8, faults 3 and 32."""
    found = vanished(folder, name, own)
    if name == "segfault":
        assert "Fatal Python error: Segmentation fault" in found["said"][1] and "fault_injection.py" in found["said"][1]


def vanished(folder: Path, name: str, own: int) -> dict:
    """The outcome of a scenario in which rank 1 ends with the code `own` and says nothing."""
    found = outcome(folder, name)
    assert found["codes"] == [11, own, 11], found["said"]
    assert (found["status"]["code"], found["status"]["rank"]) == (11, 1)
    assert found["status"]["sentence"].startswith(VANISHED)
    assert "Traceback" not in found["said"][0] + found["said"][2]
    return found


def test_the_rank_that_failed_first_is_blamed_and_its_reason_told(folder: Path) -> None:
    """P8, fault 31: the trace is printed once, by the rank it belongs to."""
    blamed(folder, "exception", 1, "InjectedFault")


@pytest.mark.slow
def test_a_rank_that_leaves_or_runs_out_of_memory_is_blamed(nightly_folder: Path) -> None:
    """P8, faults 32 and 33."""
    vanished(nightly_folder, "exit", 1)
    blamed(nightly_folder, "memory", 7, "out of memory")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("backward", 75), ("save", 75), ("end", 0)])
def test_a_signal_in_the_midst_of_something_leads_to_a_checkpoint(nightly_folder: Path, name: str, code: int) -> None:
    """P12, fault 27: in backward, in a save, and when all is done."""
    name = "signal at the end" if name == "end" else f"signal in {name}"
    found = outcome(nightly_folder, name)
    assert found["codes"] == [code] * NUM_RANKS, found["said"]
    checkpoints = sorted((nightly_folder / name.replace(" ", "-") / "checkpoints").glob("iter_*"))
    assert [path.name for path in checkpoints] == [f"iter_{n:07d}" for n in ((2,) if code else (2, 4))]
    assert not any(verify(path) for path in checkpoints)


@pytest.mark.slow
def test_a_save_that_stands_still_ends_with_code_10(nightly_folder: Path) -> None:
    """P7, faults 8 and 30: by its deadline; no checkpoint is left behind."""
    found = outcome(nightly_folder, "hang in save")
    assert found["codes"] == [10] * NUM_RANKS, found["said"]
    assert found["status"]["code"] == 10 and "phase save, iteration 2" in found["status"]["sentence"]
    assert list((nightly_folder / "hang-in-save" / "checkpoints").glob("iter_*")) == []


def blamed(folder: Path, name: str, own: int, words: str) -> None:
    """Rank 1 ends with the code `own` and `words`, and the others name it."""
    found = outcome(folder, name)
    assert found["codes"] == [11, own, 11], found["said"]
    assert (found["status"]["code"], found["status"]["rank"]) == (own, 1) and words in found["status"]["sentence"]
    for rank in (0, 2):
        assert f"rank 1 failed first, code {own}: " in found["said"][rank]
        assert "Traceback" not in found["said"][rank]


def test_a_result_that_does_not_come_again_ends_with_code_16_and_names_the_rank(folder: Path) -> None:
    """P9, fault 43."""
    found = outcome(folder, "once")
    assert found["codes"] == [16] * NUM_RANKS == [found["status"]["code"]] * NUM_RANKS
    assert "repeating the step gave another result" in found["status"]["sentence"]
    assert "suspect rank 1 (" in found["status"]["sentence"]


def test_the_same_bad_numbers_in_two_starts_end_with_code_17(folder: Path) -> None:
    """P9: 6 at first, since one device alone cannot tell the model's fault from its own."""
    first, second = outcomes(folder, "again and again")
    assert (first["codes"], second["codes"]) == ([6] * NUM_RANKS, [17] * NUM_RANKS)
    assert "or a permanent fault of this hardware" in first["status"]["sentence"]
    assert "as in an earlier start" in second["status"]["sentence"]


def test_a_flipped_bit_of_a_weight_is_named_with_its_rank(folder: Path) -> None:
    """P13, fault 42."""
    found = outcome(folder, "bit")
    assert found["codes"] == [12] * NUM_RANKS
    assert "embedding.word_embeddings.weight: rank 1 of 3 differs" in found["status"]["sentence"]


def test_a_full_disk_costs_one_checkpoint_and_a_sentence(folder: Path) -> None:
    """P1, faults 6 and 7: the disk of one rank is full, for real."""
    found = outcome(folder, "disk")
    assert found["codes"] == [0] * NUM_RANKS, found["said"]
    checkpoints = folder / "disk" / "checkpoints"
    assert [path.name for path in checkpoints.glob("iter_*")] == ["iter_0000004"]
    assert verify(checkpoints / "iter_0000004") == [] and not list(checkpoints.glob(".tmp*"))
    assert "the checkpoint of iteration 2 could not be saved" in found["said"][0]


def test_a_run_that_ends_while_it_saves_completes_the_checkpoint(folder: Path) -> None:
    """Fault 13."""
    assert outcome(folder, "background")["codes"] == [0] * NUM_RANKS
    checkpoints = sorted((folder / "background" / "checkpoints").glob("iter_*"))
    assert [path.name for path in checkpoints] == ["iter_0000002", "iter_0000004"]
    assert [verify(path) for path in checkpoints] == [[], []]


def test_a_slow_rank_is_named_and_steps_are_computed_twice_alike(folder: Path) -> None:
    found = outcome(folder, "slow")
    assert found["codes"] == [0] * NUM_RANKS
    assert "slowest by forward: rank 1 (" in found["said"][0]
    assert "iterations were computed twice: the same bits on all ranks" in found["said"][0]
    lines = (folder / "slow" / "checkpoints" / "progress.txt").read_text().splitlines()
    assert [line.split("\t")[3] for line in lines] == ["Starting job", "Saved checkpoint", "Saved checkpoint"]


def test_ranks_with_other_flags_are_refused_with_the_flags(folder: Path) -> None:
    """Fault 35."""
    found = outcome(folder, "unlike")
    assert found["codes"] == [3] * NUM_RANKS
    assert "lr: 0.01 on rank 0, 0.5 on rank 2" in found["status"]["sentence"]


def test_faults_are_told_at_the_start(folder: Path) -> None:
    assert "--inject: rank 1, iteration 3, step: kill, SIGKILL to the process" in outcome(folder, "kill")["said"][0]
