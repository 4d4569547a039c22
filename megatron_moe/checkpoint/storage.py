"""File-system operations for checkpoints: `Storage`, which tests replace to inject faults into saves, and functions
that safely open and read files that other programs may have written."""

import errno
import os
import shutil
import stat
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path


class Storage:
    """File-system operations for saving checkpoints. Every method raises OSError on failure."""

    def make_dir(self, path: Path) -> None:
        path.mkdir()

    def write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        """Creates the file, writes the chunks and calls fsync."""
        with open(path, "xb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    def rename(self, source: Path, target: Path) -> None:
        """Renames a file or directory atomically. An existing target file is replaced; a non-empty target directory
        raises OSError."""
        os.rename(source, target)

    def sync_dir(self, path: Path) -> None:
        """Calls fsync on a directory, which makes renames in it durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        """Removes a file or a directory tree."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

    def free_bytes(self, path: Path) -> int:
        return shutil.disk_usage(path).free


def open_regular(path: Path) -> BufferedReader:
    """Opens a regular file for reading, in binary mode.

    Raises OSError if the path is a FIFO, a device or a directory.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, "rb")


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Reads a regular file. Raises OSError if it is larger than `max_bytes`."""
    with open_regular(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes > max_bytes:
            raise OSError(errno.EFBIG, f"the file has {num_bytes} bytes, more than the limit of {max_bytes}", str(path))
        return file.read(num_bytes)
