"""Ranks as processes of their own, to be sent signals."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.ranks import REPOSITORY

TIMEOUT = 600


def start(argv: list[str], rank: int = 0, world_size: int = 1, port: int = 0) -> subprocess.Popen:
    """One rank, as a launcher would start it."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    launched = {name: str(value) for name, value in place.items()} if world_size > 1 else {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **launched}
    command = [sys.executable, str(REPOSITORY / "pretrain_moe.py"), *argv]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def read_until(process: subprocess.Popen, words: str) -> str:
    """Reads what the process says up to the line with these words."""
    said = ""
    for line in process.stdout:
        said += line
        if words in line:
            return said
    raise AssertionError(f"ended without saying {words!r}: {said[-3000:]}")


def status(run: Path) -> dict:
    return json.loads((run / "status.json").read_text())
