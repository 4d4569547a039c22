"""Imports the files of `--import`, which register components and flags; versions of installed packages."""

import hashlib
import re
import sys
import traceback
from collections.abc import Iterable
from importlib import metadata
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from megatron_moe.config.exit_codes import ExitCode, RunError
from megatron_moe.config.registry import IMPORTED


class ImportProblem(RunError):
    """A file of `--import` cannot be read or executed."""

    code = ExitCode.CONFIG


def import_file(name: str) -> None:
    """Imports a Python file, once per process. Raises ImportProblem if it cannot be read, or raises an exception."""
    path = Path(name).resolve()
    if str(path) in IMPORTED:
        return
    if path.suffix != ".py" or not path.is_file():
        raise ImportProblem(f"--import {name}: the Python file does not exist; correct the path")
    module_name = f"imported_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None, name
    # registered in `sys.modules`, because dataclasses look up the module of their class
    module = sys.modules[module_name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        place = f"{name}:{lines[-1]}" if lines else name
        raise ImportProblem(f"--import {place} raised {type(error).__name__}: {error}; correct the file") from error
    IMPORTED.register(str(path), hashlib.sha256(path.read_bytes()).hexdigest())


def file_digests(names: Iterable[str]) -> dict[str, str]:
    """Maps each of `names`, as given, to the first 16 hex digits of the SHA-256 of the imported file."""
    return {name: IMPORTED.get(str(Path(name).resolve()))[:16] for name in names}


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution; None if it is not installed. Reads only the line with the version:
    `metadata.version` parses the description of the package too, which takes four times as long."""
    try:
        found = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return None
    text = found.read_text("METADATA") or found.read_text("PKG-INFO") or ""
    version = re.search(r"^Version: *(\S+)", text, re.MULTILINE)
    return version[1] if version else None
