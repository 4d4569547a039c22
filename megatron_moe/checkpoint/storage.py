"""Every touch of the file system that saving makes, in one place, so that tests can make each of them fail."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path


class Storage:
    """A local or mounted file system. Every method raises OSError when it fails."""

    def make_dir(self, path: Path) -> None:
        path.mkdir()

    def write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        """Creates the file, writes the chunks and waits until they are on the device."""
        with open(path, "xb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    def rename(self, source: Path, target: Path) -> None:
        """Renames in one step. A target that is a file is replaced, a directory with content is an error."""
        os.rename(source, target)

    def sync_dir(self, path: Path) -> None:
        """Waits until the names in the directory are on the device."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        """Removes a file or a directory with all it holds."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

    def free_bytes(self, path: Path) -> int:
        return shutil.disk_usage(path).free
