"""A real out-of-memory error on a GPU ends the run with a report."""

import os

import pytest
import torch

import pretrain_moe
from megatron_moe.config.exit_codes import ExitCode

pytestmark = pytest.mark.gpu1


def test_out_of_memory_report_lists_the_largest_allocations(tmp_path, capsys):
    words = ["--recipe", "q6", "--train-iters", "2", "--log-interval", "1", "--eval-iters", "0", "--no-plots"]
    torch.cuda.set_per_process_memory_fraction(0.55)
    try:
        code = pretrain_moe.main([*words, "--run-dir", str(tmp_path)], dict(os.environ))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    errors = capsys.readouterr().err
    assert code == ExitCode.MEMORY, errors
    assert "out of memory in iteration 1" in errors and "expected on pipeline rank 0" in errors
    assert "largest blocks in use" in errors and "memory options that would save the most" in errors
    assert (tmp_path / "crash" / "out-of-memory-00000.txt").is_file()
