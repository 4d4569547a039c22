"""Peak memory emulated without a GPU equals the allocator's peak in a real step of the same rank without peers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.tolerances import PREDICTED_PEAK

pytestmark = pytest.mark.gpu1

ROOT = Path(__file__).resolve().parents[2]
EP4 = (
    "--recipe q6 --world-size 4 --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall "
    "--moe-alltoall-backend nccl"
)
"""NCCL, because --device cpu predicts a run on CPUs, which has no symmetric memory of GPUs."""


def figures(words: list[str], path: Path) -> dict:
    """Peaks of the only rank."""
    command = [sys.executable, "pretrain_moe.py", *words, "--fake-init-process-group", "--emulate-json", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(path.read_text())["ranks"][0]


@pytest.mark.parametrize("words", ["--recipe q6", "--recipe m8", EP4], ids=["q6", "m8", "q6 over 4 ranks"])
def test_emulated_peak_equals_the_allocator_peak(words: str, tmp_path: Path) -> None:
    free = figures([*words.split(), "--device", "cpu"], tmp_path / "free.json")
    real = figures(words.split(), tmp_path / "real.json")
    PREDICTED_PEAK.check(float(free["peak_bytes"]), float(real["allocator_peak_bytes"]), words)
