"""tools/sweep.py: each run its folder, refused ones told, the same command goes on."""

import json
import sys
from pathlib import Path

import pytest

from megatron_moe.config.exit_codes import ExitCode
from tests.helpers.command_lines import SMALL, words
from tests.helpers.run_dirs import make_run
from tests.scripts.stubs import asked, write_stubs
from tools.sweep import main

FLAGS = [
    *words(SMALL, "--tokenizer-type --tokenizer-model --run-dir --micro-batch-size"),
    *("--tokenizer-type", "ByteTokenizer", "--micro-batch-size", "1", "--data-path", "x"),
]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder with data and stand-ins for SLURM and for the program."""
    monkeypatch.chdir(tmp_path)
    for name in ("x.idx", "x.bin"):
        Path(name).touch()
    for name, value in write_stubs(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STUB_PYTHON", sys.executable)
    return tmp_path


def sweep(capsys: pytest.CaptureFixture[str], here: Path, *more: str, code: int = ExitCode.OK) -> list[str]:
    argv = ["--output", "sweep", "--python", str(here / "stub_python"), *more, *FLAGS]
    assert main(argv) == code
    return capsys.readouterr().out.splitlines()


def starts(here: Path) -> list[str]:
    return [line for line in asked(here) if "torch.distributed.run" in line]


def test_each_combination_runs_in_its_own_folder(here, capsys):
    out = sweep(capsys, here, "--set", "lr", "1e-3", "2e-3")
    assert out == ["[1/2] lr=1e-3: finished", "[2/2] lr=2e-3: finished"]
    assert [line.split(" --lr ")[-1].split()[0] for line in starts(here)] == ["1e-3", "2e-3"]
    assert all(f"--run-dir sweep/lr={lr}" in line for lr, line in zip(("1e-3", "2e-3"), starts(here), strict=True))


def test_the_same_command_goes_on_and_tabulates(here, capsys):
    make_run(here / "sweep" / "lr=1e-3", (1.0, 1.0))
    make_run(here / "sweep" / "lr=2e-3", (1.0,), state="running")
    out = sweep(capsys, here, "--set", "lr", "1e-3", "2e-3")
    assert out[0] == "[1/2] lr=1e-3: skipped, finished" and out[1] == "[2/2] lr=2e-3: finished"
    assert [line.split()[0] for line in out[2:]] == ["run", "lr=1e-3", "lr=2e-3"]
    assert len(starts(here)) == 1


def test_an_illegal_combination_is_told_and_the_others_run(here, capsys):
    out = sweep(capsys, here, "--set", "expert-model-parallel-size", "1", "3")
    assert out[0].endswith(": finished") and "refused: " in out[1] and len(starts(here)) == 1


def test_a_sweep_of_illegal_combinations_alone_is_a_mistake(here, capsys):
    out = sweep(capsys, here, "--set", "lr", "x", "y", "--dry-run", code=ExitCode.CONFIG)
    assert [line.split(": ")[1] for line in out] == ["refused", "refused"]


def test_a_run_that_fails_does_not_end_the_sweep(here, capsys, monkeypatch):
    monkeypatch.setenv("STUB_CODE", "4")
    out = sweep(capsys, here, "--set", "lr", "1e-3", "2e-3", code=4)
    assert [line.split(": ")[1].split(",")[0] for line in out] == ["ended with exit code 4"] * 2
    assert len(starts(here)) == 2


def test_a_question_is_answered_instead_of_a_sweep(here, capsys):
    assert sweep(capsys, here, "--set", "lr", "1e-3", "--print-config")[0] == "model:"


def test_a_folder_that_cannot_be_made_is_told(here, capsys):
    (here / "sweep").write_text("in the way")
    argv = ["--output", "sweep", "--set", "lr", "1e-3", *FLAGS]
    assert main(argv) == ExitCode.ENVIRONMENT
    assert "lr=1e-3/job.sh cannot be written (Not a directory)" in capsys.readouterr().err


def test_slurm_gets_each_job_once(here, capsys):
    for _ in range(2):
        sweep(capsys, here, "--set", "lr", "1e-3", "2e-3", "--launcher", "slurm")
    assert asked(here) == [f"sbatch {here}/sweep/lr={lr}/job.sbatch" for lr in ("1e-3", "2e-3")]
    status = here / "sweep" / "lr=1e-3" / "status.json"
    status.write_text(json.dumps({"state": "failed", "code": 3}))
    sweep(capsys, here, "--set", "lr", "1e-3", "2e-3", "--launcher", "slurm")
    assert len(asked(here)) == 3, "one that failed is submitted again"


def test_a_job_that_slurm_did_not_take_is_submitted_again(here, capsys):
    taken = (here / "sbatch").read_text()
    (here / "sbatch").write_text(taken + "exit 1\n")
    slurm = ("--set", "lr", "1e-3", "--launcher", "slurm")
    assert sweep(capsys, here, *slurm, code=1) == ["[1/1] lr=1e-3: sbatch failed"]
    (here / "sbatch").write_text(taken)
    assert sweep(capsys, here, *slurm) == ["[1/1] lr=1e-3: submitted"]
    assert sweep(capsys, here, *slurm) == ["[1/1] lr=1e-3: skipped, submitted"]
    assert len(asked(here)) == 2


def test_a_dry_run_starts_nothing(here, capsys):
    assert sweep(capsys, here, "--dry-run", "--set", "lr", "1e-3") == ["[1/1] lr=1e-3: would be started: --lr 1e-3"]
    assert asked(here) == [] and not (here / "sweep").exists()


def test_an_unknown_flag_ends_it_at_once(here, capsys):
    assert main(["--output", "sweep", "--set", "no-such", "1", *FLAGS]) == ExitCode.CONFIG
    assert "there is no flag --no-such" in capsys.readouterr().err
