"""Processes that share out the work of a tool."""

import multiprocessing
import signal
import time
from pathlib import Path

from tools.workers import map_in_order, start_workers


def wait_for(path: Path) -> int:
    while not path.exists():
        time.sleep(0.01)
    return 1


def blocked_signals(pid: int) -> int:
    """As a set of bits."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigBlk:"))
    return int(line.split()[1], 16)


def test_an_interrupt_reaches_no_worker_however_late_it_is_started(tmp_path: Path) -> None:
    """A worker that dies of it prints its trace over the tool's sentence."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    others = set(multiprocessing.active_children())
    with start_workers(3) as pool:
        results = [pool.submit(wait_for, tmp_path / "end") for _ in range(3)]
        workers = set(multiprocessing.active_children()) - others
        masks = [blocked_signals(worker.pid or 0) for worker in workers]
        (tmp_path / "end").touch()
        assert [result.result() for result in results] == [1, 1, 1]
    assert len(masks) == 3 and all(mask >> (signal.SIGINT - 1) & 1 for mask in masks), masks
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_results_come_in_the_order_of_the_items() -> None:
    with start_workers(2) as pool:
        assert list(map_in_order(pool, abs, range(-9, 0), 3)) == list(range(9, 0, -1))
