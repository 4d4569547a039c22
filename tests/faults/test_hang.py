"""Hanging ranks: peers exit in time and report the rank, the phase and the collective."""

import signal
from pathlib import Path

from megatron_moe.config.exit_codes import ExitCode
from tests.end_to_end.tiny_run import arguments
from tests.faults.processes import status
from tests.helpers.programs import start_ranks


def test_a_stopped_rank_is_named_by_its_peer(data: str, tmp_path: Path) -> None:
    """The run exits with code 10 in time and reports the last collective and the rank without stacks."""
    run = tmp_path / "run"
    argv = arguments(data, run, "--train-iters", "100000", "--eval-iters", "0", "--step-deadline", "12")
    ranks = start_ranks(2, argv)
    try:
        ranks[1].wait_until_printed(" iteration        3/")
        ranks[1].send(signal.SIGSTOP)
        done = ranks[0].wait()
    finally:
        ranks[1].send(signal.SIGKILL)
        ranks[1].wait()
    assert done.returncode == ExitCode.HANG, done
    found = status(run)
    assert (found["state"], found["code"], found["rank"]) == ("failed", 10, 0)
    sentence = found["sentence"]
    assert "phase step, iteration " in sentence and "rank 1 wrote no stacks" in sentence, sentence
    assert "waiting in " in sentence and "megatron_moe." in sentence, sentence
    assert "(most recent call first)" in (run / "crash" / "stacks_00000.txt").read_text()
