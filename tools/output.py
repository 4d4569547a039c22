"""How tools write the files that they are asked for, and how they end. Imports no torch."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from megatron_moe.config.exit_codes import EnvironmentProblem, ExitCode


def leave(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Runs a tool's `main` on the command line and ends with its exit code. Ctrl-C is an end too, and no traceback."""
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(ExitCode.INTERRUPTED)


def wait_for(command: Sequence[str]) -> int:
    """The exit code of a command that is run to its end.

    Ctrl-C reaches the command as well, which may have something to save: it is waited for before KeyboardInterrupt
    goes on.
    """
    interrupt: KeyboardInterrupt | None = None
    with subprocess.Popen(command) as process:
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt as pressed:
                interrupt = pressed
    if interrupt:
        raise interrupt
    return code


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around making a file and its folder. Raises EnvironmentProblem where that cannot be."""
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(
            f"{path} cannot be written ({error.strerror or error}); choose another place"
        ) from error
