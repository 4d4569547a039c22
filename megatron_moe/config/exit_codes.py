"""How a run ends: the table of process exit codes.

Job scripts must read `status.json` as well, because torchrun turns every non-zero code into 1.
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
    """Of a dry run: the plan is legal but would not start, for lack of an input or of a feature."""
    RERUN_DISAMBIGUATE = 16
    RERUN_FAILED = 17
    PREEMPTED_SAVED = 75
    PREEMPTED_UNSAVED = 76
    INTERRUPTED = 130


class RunError(Exception):
    """A run that cannot go on, for a reason the user can act on.

    The message is one sentence: what is wrong, the numbers, where, and the remedy. `pretrain_moe.py` and the tools
    print it without a traceback and exit with `code`.
    """

    code: ExitCode = ExitCode.BUG


class EnvironmentProblem(RunError):
    """World size, package, port, directory or lock."""

    code = ExitCode.ENVIRONMENT


class DataProblem(RunError):
    """Data files or tokenizer."""

    code = ExitCode.DATA


class CheckpointProblem(RunError):
    """Nothing loadable, incompatible or corrupt."""

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
    """Another rank ended first, and this one can only follow."""

    code = ExitCode.OTHER_RANK

    def __init__(self, sentence: str, rank: int | None = None, code: ExitCode = ExitCode.OTHER_RANK) -> None:
        """`rank`: the one that ended first, if it is known."""
        super().__init__(sentence)
        self.rank = rank
        self.code = code


class DriftProblem(RunError):
    """Copies of the same weights differ."""

    code = ExitCode.DRIFT


class Preempted(RunError):
    """A run that leaves because it was told to, by a signal. Not a failure: another start goes on from here."""

    def __init__(self, sentence: str, *, saved: bool) -> None:
        super().__init__(sentence)
        self.code = ExitCode.PREEMPTED_SAVED if saved else ExitCode.PREEMPTED_UNSAVED


def listed(lines: Sequence[str]) -> str:
    """Lines for the end of a sentence, each on its own; of many the first, and how many more there are."""
    more = [f"and {len(lines) - _MAX_LISTED} more"] if len(lines) > _MAX_LISTED else []
    return "\n  ".join([*lines[:_MAX_LISTED], *more])


def counted(number: int, noun: str) -> str:
    """A number with its noun in messages: `1 rank`, `8 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
