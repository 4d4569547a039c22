"""Training over symmetric memory with a killed and with a slow rank."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.config.faults import ALLOWED
from tests.end_to_end.tiny_run import MODEL, losses
from tests.helpers.ranks import REPOSITORY, free_port

pytestmark = pytest.mark.gpu2

TIMEOUT_S = 15
ITERATIONS = 300
"""More than a rank runs in the moment in which the other one is stopped."""
FLAGS = f"""
--micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --log-interval 1 --eval-iters 0 --bf16 --mock-data --no-plots
--moe-grouped-gemm --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --train-iters {ITERATIONS}
--distributed-timeout-seconds-after-init {TIMEOUT_S} --no-progress-bar --device cuda
""".split()
UNTIL_STEP_S, AFTER_KILL_S = 120.0, TIMEOUT_S + 30.0


class TwoRanks:
    """A run of two processes without a launcher that would end one rank after the other."""

    def __init__(self, run: Path, *more: str) -> None:
        self.run, port = run, str(free_port())
        run.mkdir()
        self.outputs = [run / f"rank{rank}.txt" for rank in range(2)]
        self.ranks = []
        for rank, output in enumerate(self.outputs):
            sizes = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
            command = [sys.executable, "pretrain_moe.py", *MODEL, *FLAGS, "--run-dir", str(run / "run"), *more]
            with output.open("w") as file:
                environ = {**os.environ, **sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, ALLOWED: "1"}
                self.ranks.append(
                    subprocess.Popen(command, cwd=REPOSITORY, env=environ, stdout=file, stderr=subprocess.STDOUT)
                )

    def text(self, rank: int) -> str:
        return self.outputs[rank].read_text(errors="replace")

    def wait(self, rank: int, seconds: float) -> int:
        try:
            return self.ranks[rank].wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"rank {rank} still runs: {self.text(rank)[-3000:]}") from None

    def wait_for_step(self, iteration: int) -> None:
        until = time.monotonic() + UNTIL_STEP_S
        while not (self.run / "run" / "metrics.jsonl").exists() or iteration not in losses(self.run / "run"):
            assert time.monotonic() < until and all(rank.poll() is None for rank in self.ranks), self.text(0)[-3000:]
            time.sleep(0.05)

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def test_killed_rank_is_named_within_the_timeout(tmp_path: Path) -> None:
    both = TwoRanks(tmp_path / "killed", "--inject", "kill@1:4")
    try:
        assert both.wait(1, UNTIL_STEP_S) == -signal.SIGKILL
        begun = time.monotonic()
        assert both.wait(0, AFTER_KILL_S) == ExitCode.OTHER_RANK, both.text(0)[-3000:]
        seconds = time.monotonic() - begun
    finally:
        both.end()
    text = both.text(0)
    assert "exchange tokens through symmetric memory" in text
    assert f"rank 1 did not take part in the exchange of expert tokens within {0.9 * TIMEOUT_S:g} s" in text, text[
        -3000:
    ]
    assert sorted(losses(both.run / "run"))[:2] == [1, 2]
    print(f"rank 0 ended {seconds:.1f} s after rank 1 was killed")


def test_slow_rank_raises_no_alarm(tmp_path: Path) -> None:
    both = TwoRanks(tmp_path / "slow")
    try:
        both.wait_for_step(3)
        both.ranks[1].send_signal(signal.SIGSTOP)
        time.sleep(0.6 * TIMEOUT_S)
        assert both.ranks[0].poll() is None
        both.ranks[1].send_signal(signal.SIGCONT)
        assert [both.wait(rank, UNTIL_STEP_S) for rank in range(2)] == [ExitCode.OK] * 2, both.text(0)[-3000:]
    finally:
        both.end()
    assert sorted(losses(both.run / "run")) == list(range(1, ITERATIONS + 1))
    assert "did not take part" not in both.text(0) + both.text(1)
