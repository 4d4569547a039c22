"""How tools end: Ctrl-C is told, and what they started is waited for."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_moe.config.exit_codes import ExitCode

ROOT = Path(__file__).parents[2]
SAVES = (
    "import time\ntry:\n    print('ready', flush=True)\n    time.sleep(60)\nfinally:\n    print('saved', flush=True)"
)
"""A program that has something to do after Ctrl-C."""


@pytest.mark.parametrize(
    "text", [SAVES, f"from tools.output import wait_for\nwait_for([{sys.executable!r}, '-c', {SAVES!r}])"]
)
def test_ctrl_c_ends_a_tool_without_a_traceback_when_its_command_has_ended(text):
    tool = f"from tools.output import leave\ndef main(argv):\n    exec({text!r})\nleave(main)"
    process = subprocess.Popen(
        [sys.executable, "-c", tool], cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED
    assert out == b"saved\n" and err.endswith(b"interrupted\n")
    assert b"leave(main)" not in err, "a traceback of the tool"
