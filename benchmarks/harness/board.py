"""What a GPU draws, and the clock of its multiprocessors, while something runs on it: as nvidia-smi tells."""

import subprocess
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from statistics import median
from threading import Thread
from types import TracebackType
from typing import Self

EVERY_MS = 100


@dataclass(frozen=True)
class Reading:
    """Of one moment, or medians of several."""

    watts: float
    limit_watts: float
    """At which the board slows down."""
    sm_mhz: float

    def __str__(self) -> str:
        return f"{self.watts:.0f} of {self.limit_watts:.0f} W, multiprocessors at {self.sm_mhz:.0f} MHz"


def nvidia_smi(gpu: str) -> tuple[str, ...]:
    """A command that prints readings, one a line, until it is ended. `gpu`: its UUID or its number."""
    fields = "--query-gpu=power.draw,power.limit,clocks.sm"
    return ("nvidia-smi", f"--id={gpu}", fields, "--format=csv,noheader,nounits", f"--loop-ms={EVERY_MS}")


class Board:
    """Reads the board from entering to leaving. Nothing is read where there is no such command."""

    def __init__(self, command: Sequence[str]) -> None:
        """`command`: see `nvidia_smi`."""
        self._command = tuple(command)
        self._process: subprocess.Popen[str] | None = None
        self._reader: Thread | None = None
        self._readings: list[Reading] = []

    def __enter__(self) -> Self:
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            return self
        self._reader = Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None or self._reader is None:
            return
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def forget(self) -> None:
        """What was read so far does not count."""
        self._readings = []

    def medians(self) -> Reading | None:
        """Of what was read since it was last forgotten; None: nothing was."""
        readings = list(self._readings)
        if not readings:
            return None
        return Reading(*map(median, zip(*map(astuple, readings), strict=True)))

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None, "a command without its output"
        with process.stdout as lines:
            for line in lines:
                reading = _reading(line)
                if reading is not None:
                    self._readings.append(reading)


def _reading(line: str) -> Reading | None:
    """None: the line tells something else, such as [N/A]."""
    try:
        watts, limit, clock = map(float, line.split(","))
    except ValueError:
        return None
    return Reading(watts, limit, clock)
