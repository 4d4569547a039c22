"""Exit signals: the handler records the first one, and the training loop saves and exits.

A second signal exits at once, without saving. Signals within two seconds of the first count as the same request, since
launchers forward signals that the terminal has already sent to every process.
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

_SAME_REQUEST_SECONDS = 2.0


class Signals:
    """Context manager that installs the signal handlers; must be entered on the main thread.

    Args:
        names: signal names such as "SIGTERM". Signals that the process ignores (nohup, background jobs) stay ignored.
        clock: monotonic clock, seconds.
    """

    def __init__(self, names: Sequence[str] = (), *, clock: Callable[[], float] = time.monotonic) -> None:
        self.received: int | None = None
        """Number of the first received signal; None if no signal was received."""
        self._numbers = tuple(dict.fromkeys(signal.Signals[name] for name in names))
        self._clock = clock
        self._since = 0.0
        self._process = os.getpid()
        self._before: dict[int, Any] = {}

    @property
    def active(self) -> bool:
        """True if there are signals to handle."""
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
        """Context manager for imports. Ctrl-C writes the status and exits at once, unless SIGINT is an exit signal.

        The handler does not raise KeyboardInterrupt, because imported modules may replace it by another error.
        """

        def exit_now(number: int, frame: FrameType | None) -> None:
            status.fail(ExitCode.INTERRUPTED, "interrupted from the keyboard")
            os._exit(int(ExitCode.INTERRUPTED))

        if signal.SIGINT in self._before or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            yield
            return
        signal.signal(signal.SIGINT, exit_now)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def ignore(self) -> None:
        """Ignores further signals, so that they cannot change the exit code of a run that is ending."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def take(self, number: int, frame: FrameType | None = None) -> None:
        """Signal handler: records the first signal and raises KeyboardInterrupt at the second. No-op in forks."""
        if os.getpid() != self._process:
            return
        if self.received is None:
            self.received, self._since = number, self._clock()
        elif self._clock() - self._since >= _SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt(f"{signal.Signals(number).name}, the second signal")


def signal_name(number: int) -> str:
    return signal.Signals(number).name
