"""progress.txt beside the checkpoints: a line for every start and every checkpoint, over restarts."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

PROGRESS = "progress.txt"


@dataclass(frozen=True)
class RunPosition:
    """Where a run stands at a checkpoint, over all ranks and starts."""

    iteration: int
    flops: float
    tokens: int


class ProgressLog:
    """Appends to `folder`/progress.txt from one rank; None writes nothing. A line that cannot be written is left out.

    Args:
        environ: names the job; None: that of this process.
    """

    def __init__(self, folder: Path | None, num_ranks: int, environ: Mapping[str, str] | None = None) -> None:
        self._path = None if folder is None else folder / PROGRESS
        self._prefix = (
            f"Job ID: {(os.environ if environ is None else environ).get('SLURM_JOB_ID', '')}\t# GPUs: {num_ranks}"
        )
        self._num_ranks = num_ranks
        self._begun = time.monotonic()
        self._first: RunPosition | None = None
        self._under_way: dict[int, RunPosition] = {}

    def begin(self, standing: RunPosition) -> None:
        """The run starts, or goes on, from here."""
        self._first = standing
        self._write(f"Starting job\tIteration: {standing.iteration}")

    def saving(self, standing: RunPosition) -> None:
        """A checkpoint of this moment is begun."""
        self._under_way[standing.iteration] = standing

    def saved(self, iteration: int) -> None:
        """It is complete."""
        standing = self._under_way.pop(iteration, None)
        if standing is None or self._first is None:
            return
        seconds = time.monotonic() - self._begun
        rate = (standing.flops - self._first.flops) / seconds / self._num_ranks / 1e12
        self._write(
            f"Saved checkpoint\tIteration: {iteration}\tJob throughput: {rate:.1f} TFLOP/s/GPU\t"
            f"Floating-point operations: {standing.flops:.2e}\tTokens (in billions): {standing.tokens / 1e9:.2f}"
        )

    def _write(self, text: str) -> None:
        if self._path is None:
            return
        try:
            with open(self._path, "a") as file:
                file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}\t{self._prefix}\t{text}\n")
        except OSError:
            return
