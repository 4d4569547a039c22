"""Runs the tests of a session in forked processes, which share its imports and its collection.

    python -m pytest -p tests.helpers.forked_workers --workers 3 tests/parity tests/train

Every worker takes whole files, or all files of a folder of `TOGETHER`, until none is left; those of `FIRST` come before
all others. Reports are those of an ordinary session; warnings are not summarised. If a worker dies, its test fails, and
so do the remaining tests that it took.
"""

import atexit
import os
import signal
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest
from _pytest.junitxml import LogXML

FIRST = (
    *("faults", "end_to_end", "scripts", "parity", "train", "memory", "recipes", "optim", "kernels", "warmup"),
    *("memory_emulation", "examples", "tools", "model"),
)
"""Folders whose tests wait for processes or take long. Short files come last, so that all workers end together."""
TOGETHER = ("house_rules",)
"""Folders whose tests read the syntax trees of all files, which one process parses once."""
_FILE = struct.Struct("i")
"""Index of a file in the queue, a pipe from which all workers read."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="number of forked processes that run the tests")


@dataclass
class Worker:
    """A forked process and the test that it runs."""

    pid: int
    pipe: Connection
    running: pytest.Item | None = None


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Runs all tests in workers and logs their reports; None if pytest shall run them itself."""
    config = session.config
    if not config.option.workers or config.option.collectonly or session.testsfailed:
        return None
    files = [list(items) for _, items in groupby(session.items, _unit)]
    files.sort(key=lambda each: next((at for at, name in enumerate(FIRST) if name in each[0].path.parts), len(FIRST)))
    items = {item.nodeid: item for item in session.items}
    pending = dict(items)
    reading, writing = os.pipe()
    os.write(writing, b"".join(map(_FILE.pack, range(len(files)))))
    os.close(writing)
    workers = [_start(session, files, reading) for _ in range(min(config.option.workers, len(files)))]
    os.close(reading)
    alive = {worker.pipe: worker for worker in workers}
    try:
        while alive:
            for pipe in wait(list(alive)):
                worker = alive[pipe]
                try:
                    nodeid, data = pipe.recv()
                except EOFError:
                    del alive[pipe]
                    status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
                    if worker.running is not None:
                        text = f"the worker that ran this test ended with exit code {status}"
                        config.hook.pytest_runtest_logreport(report=_failed(worker.running, text))
                    continue
                if data is not None:
                    report = config.hook.pytest_report_from_serializable(config=config, data=data)
                    config.hook.pytest_runtest_logreport(report=report)
                worker.running = items.get(nodeid)
                pending.pop(nodeid, None)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
        for item in pending.values():
            report = _failed(item, "not run, because a worker ended early")
            config.hook.pytest_runtest_logreport(report=report)
    finally:
        for worker in alive.values():
            os.kill(worker.pid, signal.SIGKILL)
            os.waitpid(worker.pid, 0)
    return True


def _unit(item: pytest.Item) -> Path:
    """Path of the file, or of the folder, that one worker takes as a whole."""
    return item.path.parent if item.path.parent.name in TOGETHER else item.path


def _failed(item: pytest.Item, text: str) -> pytest.TestReport:
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")


def _start(session: pytest.Session, files: Sequence[list[pytest.Item]], queue: int) -> Worker:
    ours, theirs = Pipe(duplex=False)
    if pid := os.fork():
        theirs.close()
        return Worker(pid, ours)
    atexit._clear()  # what this process inherited belongs to its parent
    status = 1
    try:
        _run(session, files, queue, theirs)
        status = 0
    finally:
        atexit._run_exitfuncs()
        os._exit(status)


def _run(session: pytest.Session, files: Sequence[list[pytest.Item]], queue: int, pipe: Connection) -> None:
    """Runs files from the queue and sends (id of the running test or "", report or None) to the parent."""
    config = session.config
    manager = config.pluginmanager
    capture = manager.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are shared with the other processes
    capture.start_global_capturing()
    manager.unregister(name="terminalreporter")
    for plugin in filter(lambda each: isinstance(each, LogXML), manager.get_plugins()):
        manager.unregister(plugin)
    manager.register(_Sender(config, pipe))
    items = chain.from_iterable(map(files.__getitem__, _taken(queue)))
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        pipe.send((item.nodeid, None))
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        pipe.send(("", None))
        item = following


def _taken(queue: int) -> Iterator[int]:
    """Yields the indices of the files of this worker."""
    while data := os.read(queue, _FILE.size):
        yield _FILE.unpack(data)[0]


class _Sender:
    """Sends reports to the parent process."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config, self._pipe = config, pipe

    def pytest_runtest_logreport(self, report: Any) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.send((report.nodeid, data))
