"""Training with the flex dispatcher over symmetric memory, with a rank that is first suspended and later killed."""

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
from tests.helpers.process_pool import free_port
from tests.helpers.ranks import REPOSITORY

pytestmark = pytest.mark.gpu2

TIMEOUT_S = 6
KILL_AT = 150
FLAGS = f"""
--micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --log-interval 1 --eval-iters 0 --bf16 --mock-data --no-plots
--moe-grouped-gemm --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --train-iters 100000
--distributed-timeout-seconds-after-init {TIMEOUT_S} --inject kill@1:{KILL_AT} --no-progress-bar --device cuda
""".split()
START_S, AFTER_KILL_S = 120.0, TIMEOUT_S + 30.0


class TwoRanks:
    """Two ranks started without a launcher, because a launcher would terminate the surviving rank when the other
    dies."""

    def __init__(self, run: Path) -> None:
        self.run, port = run, str(free_port())
        self.outputs = [run / f"rank{rank}.txt" for rank in range(2)]
        self.ranks = []
        for rank, output in enumerate(self.outputs):
            sizes = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
            command = [sys.executable, "pretrain_moe.py", *MODEL, *FLAGS, "--run-dir", str(run / "run")]
            with output.open("w") as file:
                environ = {**os.environ, **sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, ALLOWED: "1"}
                self.ranks.append(
                    subprocess.Popen(command, cwd=REPOSITORY, env=environ, stdout=file, stderr=subprocess.STDOUT)
                )

    def text(self) -> str:
        """The last output of both ranks."""
        return "\n".join(output.read_text(errors="replace")[-4000:] for output in self.outputs)

    def wait(self, rank: int, seconds: float) -> int:
        try:
            return self.ranks[rank].wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"rank {rank} still runs: {self.text()}") from None

    def steps(self) -> int:
        """Number of the newest step in the metrics; 0 if there is none."""
        metrics = self.run / "run" / "metrics.jsonl"
        return max(losses(self.run / "run"), default=0) if metrics.exists() else 0

    def wait_for_step(self, iteration: int) -> None:
        until = time.monotonic() + START_S
        while self.steps() < iteration:
            assert time.monotonic() < until and all(rank.poll() is None for rank in self.ranks), self.text()
            time.sleep(0.02)

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def test_slow_rank_raises_no_alarm_and_killed_rank_is_named_within_the_timeout(tmp_path: Path) -> None:
    both = TwoRanks(tmp_path)
    try:
        both.wait_for_step(3)
        both.ranks[1].send_signal(signal.SIGSTOP)
        time.sleep(TIMEOUT_S / 2)
        stopped_at = both.steps()
        assert both.ranks[0].poll() is None and stopped_at < KILL_AT - 10, both.text()
        both.ranks[1].send_signal(signal.SIGCONT)
        assert both.wait(1, START_S) == -signal.SIGKILL, both.text()
        begun = time.monotonic()
        assert both.wait(0, AFTER_KILL_S) == ExitCode.OTHER_RANK, both.text()
        seconds = time.monotonic() - begun
    finally:
        both.end()
    text = both.text()
    sentence = f"rank 1 did not take part in the exchange of expert tokens within {0.9 * TIMEOUT_S:g} s"
    assert text.count(sentence) == 1, text
    assert both.steps() >= KILL_AT - 5, f"no progress after the stop at step {stopped_at}: {text}"
    assert "exchange tokens through symmetric memory" in both.outputs[0].read_text(errors="replace")
    print(f"stopped at step {stopped_at}; rank 0 ended {seconds:.1f} s after rank 1 was killed")
