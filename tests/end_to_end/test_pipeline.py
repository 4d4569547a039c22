"""A pipeline from the outside: one command line on two ranks, gone on from by one, sampled by the generator."""

import json
import os
import subprocess
import sys

import pytest

from tests.end_to_end.tiny_run import arguments, records
from tests.helpers.ranks import REPOSITORY, run_program, run_torchrun
from tests.helpers.tolerances import FP64_LAYOUT

EXACT_NUMBERS = ("--fp64", "--kernel-backend", "reference", "--lr-decay-iters", "6", "--eval-interval", "3")
CHUNKS = ("--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", "Et|t|t|L")


def succeed(process):
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    return process


def by_iteration(run, key):
    """The first of each: a run that ends evaluates itself on the next stretch too."""
    return {row["iteration"]: row[key] for row in reversed(records(run)) if key in row}


@pytest.mark.slow
def test_two_stages_train_as_one_rank_does_and_one_rank_goes_on(data, tmp_path):
    common = (*EXACT_NUMBERS, "--save-interval", "3", "--train-iters", "6")
    succeed(run_program(arguments(data, tmp_path / "one", *common), cwd=tmp_path))
    two = tmp_path / "two"
    succeed(run_torchrun(2, arguments(data, two, *common, *CHUNKS, "--exit-interval", "3"), cwd=tmp_path))
    assert json.loads((two / "status.json").read_text())["state"] == "finished"
    assert len(list((two / "checkpoints" / "iter_0000003").glob("*.safetensors"))) == 4

    script = [sys.executable, str(REPOSITORY / "tools" / "generate.py"), "--load", str(two / "checkpoints")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    script += ["--max-new-tokens", "3", "--device", "cpu"]
    succeed(subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600))

    succeed(run_program(arguments(data, two, *common), cwd=tmp_path))
    for key in ("lm loss", "load_balancing_loss", "grad-norm", "lm loss validation"):
        one, both = by_iteration(tmp_path / "one", key), by_iteration(two, key)
        assert one.keys() == both.keys() and len(one) > 1, key
        FP64_LAYOUT.check([both[iteration] for iteration in one], list(one.values()), key)
