"""Process exit codes and the exceptions that carry them.

Job scripts should read `status.json` too, because torchrun replaces every non-zero exit code by 1.
"""

from enum import IntEnum


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
    """A dry run found the configuration valid, but the run cannot start because an input or a feature is missing."""
    RERUN_DISAMBIGUATE = 16
    RERUN_FAILED = 17
    PREEMPTED_SAVED = 75
    PREEMPTED_UNSAVED = 76
    INTERRUPTED = 130


class RunError(Exception):
    """Error that ends the run and that the user can resolve.

    The message states the problem with its numbers, its origin and the remedy. `pretrain_moe.py` and the tools print
    the message without a traceback and exit with `code`.
    """

    code: ExitCode = ExitCode.BUG


class ConfigProblem(RunError):
    """A flag has a value that can be checked only after torch is loaded."""

    code = ExitCode.CONFIG


class EnvironmentProblem(RunError):
    """Problem of the machine or the launch, such as the world size, a missing package or a folder without space."""

    code = ExitCode.ENVIRONMENT


class DataProblem(RunError):
    """Problem with data files or the tokenizer."""

    code = ExitCode.DATA


class CheckpointProblem(RunError):
    """A checkpoint is missing, incompatible or corrupt."""

    code = ExitCode.CHECKPOINT


class NumericsProblem(RunError):
    """Loss, gradients, weights or moments are not finite, or too many consecutive updates were skipped."""

    code = ExitCode.NUMERICS


class MemoryProblem(RunError):
    """The host or the device has run out of memory."""

    code = ExitCode.MEMORY


class SaveProblem(RunError):
    """Too many consecutive checkpoint saves failed."""

    code = ExitCode.SAVE_FAILED


class OtherRankProblem(RunError):
    """Another rank failed, so this rank cannot continue."""

    code = ExitCode.OTHER_RANK

    def __init__(self, message: str, rank: int | None = None, code: ExitCode = ExitCode.OTHER_RANK) -> None:
        """`rank`: global rank that failed first; None if unknown."""
        super().__init__(message)
        self.rank = rank
        self.code = code


class DriftProblem(RunError):
    """Replicas of a weight on different ranks are not equal."""

    code = ExitCode.DRIFT


class Preempted(RunError):
    """The run exits because of a signal, which is not a failure. The next launch resumes from the last checkpoint."""

    def __init__(self, message: str, *, saved: bool) -> None:
        super().__init__(message)
        self.code = ExitCode.PREEMPTED_SAVED if saved else ExitCode.PREEMPTED_UNSAVED
