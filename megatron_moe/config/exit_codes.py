"""Process exit codes and the exceptions that carry them.

Job scripts should read `status.json` too, because torchrun replaces every non-zero exit code by 1.
"""

from collections.abc import Sequence
from enum import IntEnum

_MAX_LISTED = 20


class ExitCode(IntEnum):
    """Exit codes of `pretrain_moe.py` and of the tools."""

    OK = 0
    BUG = 1
    CONFIG = 2
    ENVIRONMENT = 3
    DATA = 4
    CHECKPOINT = 5
    NUMERICS = 6
    MEMORY = 7
    SAVE_FAILED = 8
    HANG = 10
    OTHER_RANK = 11
    DRIFT = 12
    RENDEZVOUS = 13
    LAUNCHER = 14
    NOT_READY = 15
    """A dry run found a valid plan that cannot start: an input or a feature is missing."""
    RERUN_DISAMBIGUATE = 16
    RERUN_FAILED = 17
    PREEMPTED_SAVED = 75
    PREEMPTED_UNSAVED = 76
    INTERRUPTED = 130


class RunError(Exception):
    """An error that ends the run and that the user can resolve.

    The message is one sentence with the problem, its numbers, its origin and the remedy. `pretrain_moe.py` and the
    tools print it without a traceback and exit with `code`.
    """

    code: ExitCode = ExitCode.BUG


class EnvironmentProblem(RunError):
    """Problem with the world size, a package, a port, a directory or a lock."""

    code = ExitCode.ENVIRONMENT


class DataProblem(RunError):
    """Problem with data files or the tokenizer."""

    code = ExitCode.DATA


class CheckpointProblem(RunError):
    """A checkpoint is missing, incompatible or corrupt."""

    code = ExitCode.CHECKPOINT


class NumericsProblem(RunError):
    """A non-finite loss or gradient."""

    code = ExitCode.NUMERICS


class MemoryProblem(RunError):
    """Out of memory on the host or the device."""

    code = ExitCode.MEMORY


class SaveProblem(RunError):
    """Saving failed repeatedly."""

    code = ExitCode.SAVE_FAILED


class OtherRankProblem(RunError):
    """Another rank failed, so this rank cannot continue."""

    code = ExitCode.OTHER_RANK

    def __init__(self, message: str, rank: int | None = None, code: ExitCode = ExitCode.OTHER_RANK) -> None:
        """`rank`: the rank that failed first, if known."""
        super().__init__(message)
        self.rank = rank
        self.code = code


class DriftProblem(RunError):
    """Data-parallel replicas of the same weights differ."""

    code = ExitCode.DRIFT


class Preempted(RunError):
    """The run exits because of a signal. This is not a failure; the next start resumes from the last checkpoint."""

    def __init__(self, message: str, *, saved: bool) -> None:
        super().__init__(message)
        self.code = ExitCode.PREEMPTED_SAVED if saved else ExitCode.PREEMPTED_UNSAVED


def listed(lines: Sequence[str]) -> str:
    """Joins lines into an indented list for the end of a message: the first 20, then the number of further lines."""
    more = [f"and {len(lines) - _MAX_LISTED} more"] if len(lines) > _MAX_LISTED else []
    return "\n  ".join([*lines[:_MAX_LISTED], *more])


def counted(number: int, noun: str) -> str:
    """Formats a number with its noun, in the plural unless the number is 1: `1 rank`, `8 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
