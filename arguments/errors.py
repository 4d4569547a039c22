"""Everything that is wrong with a command line, shown at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_moe.config.exit_codes import ExitCode, RunError

Waits = Literal["", "for an input", "for a feature"]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong."""

    what: str
    """What is wrong, with the numbers."""
    remedy: str = ""
    """What would mend it."""
    reason: str = ""
    """Why it is a rule."""
    given: tuple[tuple[str, str, str], ...] = ()
    """(option, value, origin) of the flags concerned."""
    waits: Waits = ""
    """Not empty: the problem prevents a start but not a plan. A dry run reports it and continues."""

    def lines(self) -> list[str]:
        """The problem as text, without its number."""
        lines = [self.what]
        widths = [max((len(row[column]) for row in self.given), default=0) for column in (0, 1)]
        lines += [
            f"    {option:<{widths[0]}}  {value:<{widths[1]}}  ({origin})" for option, value, origin in self.given
        ]
        if self.reason:
            lines.append(f"  Why: {self.reason}")
        if self.remedy:
            lines.append(f"  Try: {self.remedy}")
        return lines


class FlagErrors(RunError):
    """The command line cannot become a run. `str()` is the whole report."""

    code = ExitCode.CONFIG

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.report())

    def report(self) -> str:
        """All problems, numbered."""
        count = len(self.problems)
        lines = ["1 problem with the flags:" if count == 1 else f"{count} problems with the flags:"]
        for number, problem in enumerate(self.problems, 1):
            first, *others = problem.lines()
            lines += ["", f"{number}. {first}", *(f"   {line}" for line in others)]
        return "\n".join(lines)


class Finished(Exception):
    """The command line asked for a text, not for a run. The program prints it and exits with `code`."""

    def __init__(self, text: str, code: ExitCode = ExitCode.OK) -> None:
        self.text = text
        self.code = code
        super().__init__(text)
