"""Exceptions for early exit and for invalid command lines. All problems of a command line are reported together."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_moe.config.exit_codes import ExitCode, RunError
from megatron_moe.config.text import aligned_columns

Waits = Literal["", "for an input", "for a feature"]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem with a command line, as reported to the user."""

    what: str
    """Description of the error, including the values involved."""
    remedy: str = ""
    """Suggested correction; empty if there is none."""
    rule: str = ""
    """Name of the violated rule; empty if the problem does not come from a rule."""
    reason: str = ""
    """Docstring of the violated rule."""
    given: tuple[tuple[str, str, str], ...] = ()
    """(option, value, origin) of each flag involved; the origin is the command line, a file or a default."""
    waits: Waits = ""
    """Missing input or feature without which the run cannot start although its flags are valid; a dry run reports it
    and continues."""

    def lines(self) -> list[str]:
        """Formats the problem as lines of text."""
        lines = [self.what]
        lines += [
            f"    {row}"
            for row in aligned_columns([(option, value, f"({origin})") for option, value, origin in self.given])
        ]
        if self.reason:
            lines.append(f"  Why: {self.reason}")
        if self.remedy:
            lines.append(f"  Try: {self.remedy}")
        return lines


class FlagErrors(RunError):
    """Raised for an invalid command line; `str()` returns the report of all problems."""

    code = ExitCode.CONFIG

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.report())

    @classmethod
    def of(cls, what: str, remedy: str = "") -> "FlagErrors":
        """Creates an error with a single problem."""
        return cls([Problem(what=what, remedy=remedy)])

    def report(self) -> str:
        count = len(self.problems)
        lines = ["1 problem with the flags:" if count == 1 else f"{count} problems with the flags:"]
        for number, problem in enumerate(self.problems, 1):
            first, *others = problem.lines()
            lines += ["", f"{number}. {first}", *(f"   {line}" for line in others)]
        return "\n".join(lines)


class Finished(Exception):
    """Raised when the command line requests a text such as `--help`. The program prints `text` and exits with
    `code`."""

    def __init__(self, text: str, code: ExitCode = ExitCode.OK) -> None:
        self.text = text
        self.code = code
        super().__init__(text)

    def show(self) -> int:
        """Prints `text` to stdout and returns `code`. Ignores the error of a closed pipe (`| head`)."""
        try:
            print(self.text, flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python fails to flush at exit
        return int(self.code)
