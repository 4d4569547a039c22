"""Stores the results of long test runs as tables in `benchmarks/`."""

import os
import platform
from datetime import date
from pathlib import Path

import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


def store(what: str, text: str, gpu: str = "") -> Path:
    """Writes `<date>-<machine>-<what>.md` with the text and the machine; returns the path. `gpu`: name of the GPU."""
    cores = os.cpu_count()
    path = FOLDER / f"{date.today()}-{gpu or f'{cores}-cores'}-{what}.md"
    machine = f"{platform.machine()}, {cores} cores, Python {platform.python_version()}, torch {torch.__version__}"
    path.write_text(f"{text}\n{machine}\n")
    return path
