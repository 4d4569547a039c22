"""Helpers shared by the tools."""

import argparse
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_moe.config.exit_codes import ExitCode
from tools._common import map_in_order, positive, split_at_dashes, start_workers

ROOT = Path(__file__).parents[2]
SAVES = (
    "import time\ntry:\n    print('ready', flush=True)\n    time.sleep(60)\nfinally:\n    print('saved', flush=True)"
)
"""Program that cleans up after Ctrl-C."""


def test_arguments_are_split_at_the_first_dashes():
    assert split_at_dashes("none --steps 3 -- --recipe q6 -- more".split()) == (
        ["none", "--steps", "3"],
        ["--recipe", "q6", "--", "more"],
    )
    assert split_at_dashes(["--steps", "3"]) == (["--steps", "3"], [])


@pytest.mark.parametrize("text", ["0", "-1", "1.5", ""])
def test_a_count_is_at_least_1(text):
    assert positive("12") == 12
    with pytest.raises(argparse.ArgumentTypeError, match="not an integer of at least 1"):
        positive(text)


def wait_for(path: Path) -> int:
    while not path.exists():
        time.sleep(0.01)
    return 1


def blocked_signals(pid: int) -> int:
    """Bit mask of the blocked signals of a process."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigBlk:"))
    return int(line.split()[1], 16)


def test_workers_block_interrupts(tmp_path: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    others = set(multiprocessing.active_children())
    with start_workers(2) as pool:
        results = [pool.submit(wait_for, tmp_path / "end") for _ in range(2)]
        masks = [blocked_signals(worker.pid or 0) for worker in set(multiprocessing.active_children()) - others]
        (tmp_path / "end").touch()
        assert [result.result() for result in results] == [1, 1]
        assert list(map_in_order(pool, abs, range(-9, 0), 3)) == list(range(9, 0, -1))
    assert len(masks) == 2 and all(mask >> (signal.SIGINT - 1) & 1 for mask in masks), masks
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_ctrl_c_ends_a_tool_without_a_traceback_after_its_command():
    text = f"from tools._common import run_command\nrun_command([{sys.executable!r}, '-c', {SAVES!r}])"
    tool = f"from tools._common import run_main\ndef main(argv):\n    exec({text!r})\nrun_main(main)"
    process = subprocess.Popen(
        [sys.executable, "-c", tool], cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED
    assert out == b"saved\n" and err.endswith(b"interrupted\n") and b"run_main(main)" not in err


def test_a_closed_pipe_ends_a_tool_without_a_traceback():
    program = "from tools._common import run_main; run_main(lambda words: [print('x' * 99) for _ in range(9999)] and 0)"
    tool = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert tool.stdout.readline() == b"x" * 99 + b"\n"
    tool.stdout.close()
    assert tool.stderr.read() == b"" and tool.wait() == 128 + signal.SIGPIPE
    tool.stderr.close()
