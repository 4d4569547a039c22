"""The memory that a dry run predicts is the allocator's peak in a real run on one GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from arguments.errors import Finished
from arguments.read import read_plan
from tests.helpers.tolerances import PREDICTED_PEAK

pytestmark = pytest.mark.gpu1

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["--train-iters", "3", "--eval-iters", "0", "--no-plots"]
SCRIPT = """
import os, sys, pretrain_moe, torch
assert pretrain_moe.main(sys.argv[1:], dict(os.environ)) == 0
print(torch.cuda.max_memory_allocated() / 2**30)
"""


def predicted(words: list[str]) -> float:
    with pytest.raises(Finished) as answer:
        read_plan([*words, "--dry-run=json"], {})
    return float(json.loads(answer.value.text)["memory"]["total_gib"])


@pytest.mark.parametrize(
    "words",
    [["--recipe", "q6"], ["--recipe", "m8"], ["--recipe", "q6", "--micro-batch-size", "4"]],
    ids=["q6", "m8", "q6 with micro batch 4"],
)
def test_peak_memory_matches_the_prediction(words):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words, *SHORT], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    PREDICTED_PEAK.check(predicted(words), float(done.stdout.splitlines()[-1]), " ".join(words))
