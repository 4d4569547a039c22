"""Processes that share out the work of a tool. Imports no torch."""

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_order(
    executor: Executor | None, function: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Iterator[Result]:
    """Results in the order of the items, with at most `ahead` items under way; without an executor one by one."""
    if executor is None:
        yield from map(function, items)
        return
    pending: deque[Future[Result]] = deque()
    for item in items:
        pending.append(executor.submit(function, item))
        if len(pending) >= ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


class _Workers(ProcessPoolExecutor):
    """Any submission may start another worker, which inherits that Ctrl-C is blocked."""

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            return super().submit(fn, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_workers(count: int) -> ProcessPoolExecutor:
    """Spawned workers (no threads and locks go along) that Ctrl-C never reaches."""
    return _Workers(count, mp_context=multiprocessing.get_context("spawn"))
