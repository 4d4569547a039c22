"""Every shell script, written or generated, passes shellcheck."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.ranks import REPOSITORY

SHELLCHECK = Path(sys.executable).parent / "shellcheck"
GENERATED = sorted((REPOSITORY / "tests" / "goldens").glob("launch_*.txt"))
SCRIPTS = [*sorted((REPOSITORY / "scripts").rglob("*.sh")), REPOSITORY / ".ci" / "run", *GENERATED]


def findings(path: Path) -> str:
    assert SHELLCHECK.is_file(), f"{SHELLCHECK} is missing: pip install -c constraints.txt -e .[test]"
    done = subprocess.run([SHELLCHECK, "--shell=bash", str(path)], capture_output=True, text=True, timeout=300)
    return done.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_script_has_no_finding(path):
    assert findings(path) == ""


def test_shellcheck_finds_planted_errors(tmp_path):
    script = tmp_path / "bad.sh"
    script.write_text("#!/usr/bin/env bash\nfor word in $*; do rm $word/*; done\n")
    assert "SC2086" in findings(script)


def test_generated_scripts_are_among_them():
    assert [path.stem for path in GENERATED] == ["launch_slurm", "launch_torchrun"]
