"""Folder with compiled Triton kernels. Kernels run as code of this process, so other users must not write them."""

import json
import os
import shutil
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from megatron_moe.config.exit_codes import EnvironmentProblem

_VARIABLE = "TRITON_CACHE_DIR"
_REMEDY = "use --kernel-cache-dir with another folder"
_ELF = struct.Struct("<32xQQ6xHHHH")
"""Start of an ELF64 header: offsets of program and section headers, then size and number of each."""


def prepare_cache_folder(given: Path | None) -> Path:
    """Creates and returns this node's kernel cache folder (TRITON_CACHE_DIR). Sets the variable if it is unset.

    Raises EnvironmentProblem if the folder cannot be created, or if another user owns it or could write to it.

    Args:
        given: folder of `--kernel-cache-dir`, with one subfolder per node; None means the user's cache folder.
    """
    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = str((given or _of_user()) / socket.gethostname())
    folder = Path(os.environ[_VARIABLE])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise EnvironmentProblem(f"compiled kernels cannot be written to {folder}: {error}; {_REMEDY}") from error
    if found.st_uid != os.geteuid():
        problem = f"belongs to the user with id {found.st_uid}, not to this one ({os.geteuid()})"
    elif found.st_mode & stat.S_IWOTH:
        problem = f"may be written by every user (mode {stat.S_IMODE(found.st_mode):o})"
    else:
        return folder
    raise EnvironmentProblem(f"the folder of compiled kernels {folder} {problem}; {_REMEDY}")


def _of_user() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "megatron_moe" / "kernels"
    except RuntimeError as error:
        raise EnvironmentProblem(f"there is no folder for compiled kernels: {error}; {_REMEDY}") from error


def remove_damaged(folder: Path) -> int:
    """Removes cache entries with truncated files, which a full disk can cause and which Triton cannot load. Returns the
    number of removed entries."""
    damaged = list(dict.fromkeys(path.parent for path in _files(folder) if _is_truncated(path)))
    for entry in damaged:
        shutil.rmtree(entry, ignore_errors=True)
    return len(damaged)


def _files(folder: Path) -> Iterator[Path]:
    for pattern in ("*/*.json", "*/*.cubin", "*/*.so"):
        yield from folder.glob(pattern)


def _is_truncated(path: Path) -> bool:
    """True if a JSON file cannot be parsed, or an ELF file (.cubin, .so) is shorter than its header says."""
    try:
        if path.suffix == ".json":
            json.loads(path.read_bytes())
            return False
        with open(path, "rb") as file:
            head = file.read(_ELF.size)
        size = path.stat().st_size
    except ValueError:
        return True
    except OSError:  # another rank of the node has removed the file
        return False
    if len(head) < _ELF.size:
        return True
    programs, sections, program_size, num_programs, section_size, num_sections = _ELF.unpack(head)
    ends = programs + program_size * num_programs, sections + section_size * num_sections
    return head.startswith(b"\x7fELF") and max(ends) > size
