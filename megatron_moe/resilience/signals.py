"""Exit signals: the handler records the first one, and the training loop saves and exits.

Ctrl-C (SIGINT) is an exit signal from the first step on; the other signals are exit signals from the start of the
process, but only with `--exit-signal-handler`. A second signal exits immediately, without saving. If a launcher started
the rank, signals within two seconds of the first count as the same request, since launchers forward signals that the
terminal has already sent to every process.
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
_AGAIN = "a second signal exits immediately, without a checkpoint"


class Signals:
    """Context manager that installs the signal handlers; must be entered on the main thread.

    Args:
        names: signal names such as "SIGTERM". Signals that the process ignores (nohup, background jobs) stay ignored.
        has_launcher: True if signals may arrive twice.
        says: True on the rank that prints a line about the first signal.
        clock: monotonic clock, seconds.
    """

    def __init__(
        self,
        names: Sequence[str] = (),
        *,
        has_launcher: bool = True,
        says: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.received: int | None = None
        """Number of the first received signal; None if no signal was received."""
        self._numbers = tuple(dict.fromkeys(signal.Signals[name] for name in names))
        self._has_launcher = has_launcher
        self._says = says
        self._clock = clock
        self._since = 0.0
        self._process = os.getpid()
        self._before: dict[int, Any] = {}

    @property
    def needs_grace(self) -> bool:
        """True if signals must be handled after the current step, because SIGKILL may follow them."""
        return bool(self._numbers)

    def begin_training(self) -> None:
        """Makes Ctrl-C an exit signal. Before, Ctrl-C ends the process immediately, because there is nothing to
        save."""
        if signal.SIGINT not in self._before and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self.handle)

    def __enter__(self) -> "Signals":
        for number in self._numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self.handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @contextmanager
    def exit_at_once(self, status: RunStatus) -> Iterator[None]:
        """Context manager for imports. Ctrl-C writes the status and exits immediately, unless SIGINT is an exit signal.

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

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        """Signal handler: records the first signal and raises KeyboardInterrupt at the second. No-op in forks."""
        if os.getpid() != self._process:
            return
        if self.received is None:
            self.received, self._since = number, self._clock()
            if self._says:  # uses os.write, because the signal may have interrupted a print
                os.write(2, f"\n{signal.Signals(number).name}: exiting after this step; {_AGAIN}\n".encode())
        elif not self._has_launcher or self._clock() - self._since >= _SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt(f"{signal.Signals(number).name}, the second signal")


def signal_name(number: int) -> str:
    return signal.Signals(number).name
