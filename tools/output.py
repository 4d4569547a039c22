"""How tools write the files that they are asked for. Imports no torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_moe.specs.exitcodes import EnvironmentProblem


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around making a file and its folder. Raises EnvironmentProblem where that cannot be."""
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(
            f"{path} cannot be written ({error.strerror or error}); choose another place"
        ) from error
