"""What is read of a GPU's board, with a stand-in for nvidia-smi."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.harness.board import (
    Board,
    Reading,
    nvidia_smi,
)

PATIENCE = 120.0


def printing(*lines: str, then: str = "time.sleep(600)") -> list[str]:
    """A command that prints lines and goes on until it is ended."""
    return [sys.executable, "-c", f"import os, time; print({chr(10).join(lines)!r}, flush=True); {then}"]


def wait_for(found: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not found():
        assert time.monotonic() < end, "nothing was read"
        time.sleep(0.01)


def test_medians_are_over_what_was_read():
    lines = ["[N/A], [N/A], 345", "690.10, 700.00, 1500", "650.5, 700.00, 1980", "", "698.00, 700.00, 1455"]
    with Board(printing(*lines)) as board:
        wait_for(lambda: board.medians() == Reading(690.1, 700.0, 1500.0))
    assert str(board.medians()) == "690 of 700 W, multiprocessors at 1500 MHz"


def test_what_is_forgotten_does_not_count(tmp_path: Path):
    sign = tmp_path / "forgotten"
    wait = f"exec({f'while not os.path.exists({str(sign)!r}): time.sleep(0.01)'!r})"
    later = f"{wait}; print('500, 700, 1600', flush=True); time.sleep(600)"
    with Board(printing("100, 700, 300", then=later)) as board:
        wait_for(board.medians)
        board.forget()
        assert board.medians() is None
        sign.touch()
        wait_for(board.medians)
        assert board.medians() == Reading(500.0, 700.0, 1600.0)


@pytest.mark.parametrize("command", [["/no/such/command"], [sys.executable, "-c", "print('No devices were found')"]])
def test_where_nothing_tells_there_are_no_medians(command):
    with Board(command) as board:
        pass
    assert board.medians() is None


def test_the_command_ends_with_the_board():
    with Board(printing("1, 2, 3")) as board:
        process = board._process
        assert process is not None and process.poll() is None
    assert process.poll() is not None


def test_the_command_asks_for_one_gpu_in_the_order_that_is_read():
    command = nvidia_smi("GPU-1")
    assert command[:3] == ("nvidia-smi", "--id=GPU-1", "--query-gpu=power.draw,power.limit,clocks.sm")
    assert {"--format=csv,noheader,nounits", "--loop-ms=100"} <= set(command)
