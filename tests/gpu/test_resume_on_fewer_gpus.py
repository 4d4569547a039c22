"""A run on four GPUs that is killed at a random step and resumed on two has the losses of an undisturbed run."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_moe.config.faults import ALLOWED
from tests.end_to_end.tiny_run import MODEL, losses
from tests.helpers.process_pool import free_port
from tests.helpers.ranks import REPOSITORY
from tests.helpers.tolerances import EXACT, FP32_LAYOUT

pytestmark = pytest.mark.gpu4

STEPS, SAVE_INTERVAL = 24, 4
FLAGS = f"""
--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --log-interval 1 --eval-iters 0 --mock-data --no-plots
--moe-grouped-gemm --moe-token-dispatcher-type flex --use-distributed-optimizer --train-iters {STEPS}
--save-interval {SAVE_INTERVAL} --no-progress-bar --deterministic-mode --device cuda
""".split()
LIMIT_S = 180.0


def train(folder: Path, num_ranks: int, *more: str) -> tuple[int, str]:
    """Trains over all experts of `num_ranks` GPUs. Returns the exit code and the end of the output."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    launch += ["--master-port", str(free_port()), "pretrain_moe.py"]
    flags = [*MODEL, *FLAGS, "--expert-model-parallel-size", str(num_ranks), "--run-dir", str(folder), *more]
    environ = {**os.environ, ALLOWED: "1"}
    done = subprocess.run(
        [*launch, *flags], cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=LIMIT_S
    )
    return done.returncode, (done.stdout + done.stderr)[-4000:]


def test_killed_run_of_four_gpus_resumes_on_two(tmp_path: Path) -> None:
    draw = random.SystemRandom()
    rank, step = draw.randrange(4), draw.randint(SAVE_INTERVAL + 2, STEPS - 2)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    code, output = train(whole, 4)
    assert code == 0, output
    code, output = train(killed, 4, "--inject", f"kill@{rank}:{step}")
    assert code != 0, f"rank {rank} was to be killed at step {step}: {output}"
    before = losses(killed)
    assert SAVE_INTERVAL < max(before) <= step, f"killed at step {step}, last logged step {max(before)}"
    code, output = train(killed, 2)
    assert code == 0, f"killed at step {step}: {output}"
    expected, resumed = losses(whole), losses(killed)
    assert sorted(resumed) == sorted(expected) == list(range(1, STEPS + 1))
    for iteration, loss in expected.items():
        saved = iteration <= (step - 1) // SAVE_INTERVAL * SAVE_INTERVAL
        tolerance = EXACT if saved else FP32_LAYOUT
        tolerance.check(resumed[iteration], loss, f"loss of step {iteration}, killed at step {step}")
    print(f"rank {rank} killed at step {step}; last loss {resumed[STEPS]:.6f}, undisturbed {expected[STEPS]:.6f}")
