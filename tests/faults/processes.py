"""Ranks as separate processes that tests can signal."""

import json
import subprocess
import sys
from pathlib import Path

from tests.helpers.ranks import REPOSITORY, child_environment

TIMEOUT = 600


def start(argv: list[str], rank: int = 0, world_size: int = 1, port: int = 0) -> subprocess.Popen:
    """Starts one rank as a launcher would."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    launched = {name: str(value) for name, value in place.items()} if world_size > 1 else {}
    command = [sys.executable, str(REPOSITORY / "pretrain_moe.py"), *argv]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=child_environment(**launched), text=True, **streams)


def read_until(process: subprocess.Popen, words: str) -> str:
    """Reads the output up to the line that contains `words`."""
    said = ""
    for line in process.stdout:
        said += line
        if words in line:
            return said
    raise AssertionError(f"ended without printing {words!r}: {said[-3000:]}")


def status(run: Path) -> dict:
    return json.loads((run / "status.json").read_text())
