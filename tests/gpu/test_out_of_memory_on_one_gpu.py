"""A real out-of-memory error on a GPU ends the run with a report."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_moe.config.exit_codes import ExitCode

pytestmark = pytest.mark.gpu1

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import os, sys, torch, pretrain_moe
torch.cuda.set_per_process_memory_fraction(0.55)
sys.exit(pretrain_moe.main(sys.argv[1:], dict(os.environ)))
"""


def test_out_of_memory_report_lists_the_largest_allocations(tmp_path):
    """In its own process, so that later tests have the memory."""
    words = ["--recipe", "q6", "--train-iters", "2", "--log-interval", "1", "--eval-iters", "0", "--no-plots"]
    command = [sys.executable, "-c", SCRIPT, *words, "--run-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    errors = done.stderr
    assert done.returncode == ExitCode.MEMORY, errors
    assert "out of memory in iteration 1" in errors and "expected on pipeline rank 0" in errors
    assert "largest blocks in use" in errors and "memory options that would save the most" in errors
    assert (tmp_path / "crash" / "out-of-memory-00000.txt").is_file()
