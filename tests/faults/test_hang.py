"""Hanging ranks: peers exit in time and report the rank, the phase and the collective."""

import os
import signal
from pathlib import Path

from megatron_moe.config.exit_codes import ExitCode
from tests.end_to_end.tiny_run import arguments
from tests.faults.processes import TIMEOUT, read_until, start, status
from tests.helpers.ranks import free_port


def test_a_stopped_rank_is_named_by_its_peer(data: str, tmp_path: Path) -> None:
    """The run exits with code 10 in time and reports the last collective and the rank without stacks."""
    run, port = tmp_path / "run", free_port()
    argv = arguments(data, run, "--train-iters", "100000", "--eval-iters", "0", "--step-deadline", "12")
    ranks = [start(argv, rank, 2, port) for rank in range(2)]
    try:
        read_until(ranks[1], " iteration        3/")
        ranks[1].send_signal(signal.SIGSTOP)
        said = ranks[0].communicate(timeout=TIMEOUT)[0]
    finally:
        os.kill(ranks[1].pid, signal.SIGKILL)
        ranks[1].communicate()
    assert ranks[0].returncode == ExitCode.HANG, said
    found = status(run)
    assert (found["state"], found["code"], found["rank"]) == ("failed", 10, 0)
    sentence = found["sentence"]
    assert "phase step, iteration " in sentence and "rank 1 wrote no stacks" in sentence, sentence
    assert "waiting in " in sentence and "megatron_moe." in sentence, sentence
    assert "(most recent call first)" in (run / "crash" / "stacks_00000.txt").read_text()
