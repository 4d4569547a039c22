"""Signals that ask a run to leave: a handler only takes note, the loop saves and goes.

The first signal is kept until the loop looks. A second one leaves at once, without a save. Launchers pass on a signal
that the terminal has sent to every process already, so what comes within two seconds of the first is the same wish.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.resilience.run_status import RunStatus

_ONE_WISH_SECONDS = 2.0


class Signals:
    """Listens while it is entered; only the main thread of a process may enter it.

    Args:
        names: such as "SIGTERM"; none: nothing is listened to. A signal that this process was told to ignore (nohup,
            a shell's background job) stays ignored.
        clock: seconds.
    """

    def __init__(self, names: Sequence[str] = (), *, clock: Callable[[], float] = time.monotonic) -> None:
        self.received: int | None = None
        """Number of the first signal."""
        self._numbers = tuple(dict.fromkeys(signal.Signals[name] for name in names))
        self._clock = clock
        self._since = 0.0
        self._process = os.getpid()
        self._before: dict[int, Any] = {}

    @property
    def active(self) -> bool:
        """There are signals to listen to."""
        return bool(self._numbers)

    def __enter__(self) -> "Signals":
        for number in self._numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self.take)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @contextmanager
    def exit_at_once(self, status: RunStatus) -> Iterator[None]:
        """Around imports: Ctrl-C, unless it is one of the signals, writes the status and ends the process.

        KeyboardInterrupt, which Ctrl-C raises afterwards, may come out of an import as another error.
        """

        def leave(number: int, frame: FrameType | None) -> None:
            status.fail(ExitCode.INTERRUPTED, "interrupted from the keyboard")
            os._exit(int(ExitCode.INTERRUPTED))

        if signal.SIGINT in self._before or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            yield
            return
        signal.signal(signal.SIGINT, leave)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def ignore(self) -> None:
        """Ignores further signals: the run is ending, and its exit code is decided."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def take(self, number: int, frame: FrameType | None = None) -> None:
        """Takes note of a signal. Raises KeyboardInterrupt when it is the second one.

        Processes that were forked from this one hear the same signals and leave the answer to it.
        """
        if os.getpid() != self._process:
            return
        if self.received is None:
            self.received, self._since = number, self._clock()
        elif self._clock() - self._since >= _ONE_WISH_SECONDS:
            raise KeyboardInterrupt(f"{signal.Signals(number).name}, the second signal")


def signal_name(number: int) -> str:
    return signal.Signals(number).name
