"""Writes files so that readers never find an incomplete one."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def open_atomically(path: Path) -> Iterator[IO[bytes]]:
    """Context manager that opens a temporary file for writing and renames it to `path` if no exception occurs."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}-{threading.get_ident()}")
    try:
        with open(temporary, "wb") as file:
            yield file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
