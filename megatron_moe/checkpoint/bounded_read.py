"""Reads files that other programs may have written: regular files only, and no more bytes than a given limit."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path) -> BufferedReader:
    """Opens a regular file for reading, in binary mode.

    A fifo, device or directory raises OSError. `O_NONBLOCK` keeps `open` from waiting for the writer of a fifo.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(descriptor, "rb")


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file. Raises OSError if the file is larger than `max_bytes`."""
    with open_regular(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes > max_bytes:
            raise OSError(errno.EFBIG, f"{num_bytes} bytes, at most {max_bytes} are read", str(path))
        return file.read(num_bytes)
