"""Output of a run to a terminal and to a pipe."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from select import select

import pytest

from megatron_moe.config.exit_codes import ExitCode
from pretrain_moe import main
from tests.end_to_end.tiny_run import arguments
from tests.helpers.programs import PROGRAM, Program
from tests.helpers.ranks import REPOSITORY, child_environment
from tests.helpers.thinned import thinned

STEP_LINE = re.compile(r"^ \[[^\]]+\] iteration +(\d+)/ +4 \| consumed samples:", re.MULTILINE)
VALIDATION_LINE = " validation loss at iteration 4 on validation set | lm loss value: "
SHORT_VALIDATION_LINE = "4 on validation set: lm loss "
KERNEL_LINE = re.compile(r"^sort_rows +\w+ ", re.MULTILINE)


def test_the_first_line_comes_before_torch_is_loaded(data: str, tmp_path: Path) -> None:
    """The line appears within a second on an idle machine, because only torch takes long to import."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    command = [sys.executable, str(REPOSITORY / "pretrain_moe.py"), *arguments(data, tmp_path / "run")]
    environment = child_environment()
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == f"starting on 1 rank, run folder {tmp_path / 'run'}; loading torch\n"
    assert "torch was imported" in done.stderr


def test_the_first_start_reports_that_it_compiles(tmp_path: Path) -> None:
    """Without compiled files, the flags take two seconds to read; the line comes before, and only then."""
    command = [sys.executable, str(REPOSITORY / "pretrain_moe.py"), "--find", "aux"]
    environment = child_environment(PYTHONPYCACHEPREFIX=str(tmp_path))
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    first, second = (
        subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300) for _ in range(2)
    )
    assert first.stderr == "first start: Python compiles the program, which takes seconds\n"
    assert second.stderr == "" and first.stdout == second.stdout != ""


TOOLS = sorted(path for path in (REPOSITORY / "tools").glob("*.py") if "__main__" in path.read_text())


@pytest.mark.parametrize("tool", thinned(TOOLS, 3), ids=lambda path: path.stem)
def test_a_tool_writes_to_the_terminal_before_torch_is_loaded(tool: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    environment = child_environment(TERM="xterm")
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    reading, writing = pty.openpty()
    command = [sys.executable, str(tool), "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writing, env=environment, text=True) as process:
        os.close(writing)
        shown = process.communicate(timeout=300)[0]
    messages = os.read(reading, 4096).decode() if process.returncode else ""
    os.close(reading)
    assert shown.startswith("usage: ") or messages.startswith("loading torch\r\ntorch was imported")


def run(data: str, *more: str, terminal: bool) -> str:
    """Runs four iterations and returns standard output without escape sequences."""
    words = [*arguments(data, None, "--train-iters", "4", "--eval-iters", "1", "--no-plots", "--progress-bar"), *more]
    reading, writing = pty.openpty() if terminal else os.pipe()
    stdout = Path(os.ttyname(writing) if terminal else f"/proc/{os.getpid()}/fd/{writing}")
    process = Program(PROGRAM, *words, stdout=stdout, TERM="xterm", COLUMNS="120")
    shown = b""
    while select([reading], [], [], 0.1)[0] or process.is_running:
        if select([reading], [], [], 0)[0]:
            shown += os.read(reading, 4096)
    os.close(reading)
    os.close(writing)
    assert process.wait().returncode == 0
    return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", shown.decode()).replace("\r", "\n")


@pytest.mark.parametrize("terminal", thinned([True, False]))
def test_a_terminal_shows_one_live_line_and_a_pipe_megatrons_lines(terminal: bool, data: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shown = run(data, "--run-dir", str(folder), terminal=terminal)
    log = (folder / "log.txt").read_text()
    assert STEP_LINE.findall(log) == list("1234") and VALIDATION_LINE in log and KERNEL_LINE.search(log)
    assert re.search(r"^kernels: [\w, ]+; see log.txt$", shown, re.MULTILINE) and not KERNEL_LINE.search(shown)
    assert "finished after 4 iterations" in shown
    live = re.findall(r"iteration +(\d)/4 .* loss \d\.\d{4}  [\d,]+ tokens/s  \d:\d\d:\d\d left", shown)
    if terminal:
        assert live[-1] == "4" and SHORT_VALIDATION_LINE in shown
        assert not STEP_LINE.search(shown) and "memory (MB)" not in shown and VALIDATION_LINE not in shown
    else:
        assert not live and SHORT_VALIDATION_LINE not in shown
        assert STEP_LINE.findall(shown) == list("1234") and "memory (MB)" in shown and VALIDATION_LINE in shown


def test_a_terminal_shows_the_step_lines_of_a_run_without_a_folder(data: str) -> None:
    shown = run(data, terminal=True)
    assert STEP_LINE.findall(shown) == list("1234")
    assert "--run-dir D lists them in D/log.txt" in shown


WHOLE_STEP = ("forward-backward", "all-grads-sync", "optimizer")
NODES = ("attention", "router", "dispatch", "experts", "combine", "head")


@pytest.mark.parametrize("level", [0, 1, 2])
def test_the_log_has_the_timers_of_its_level(level: int, data: str, tmp_path: Path) -> None:
    more = ("--train-iters", "2", "--lr-warmup-iters", "0", "--eval-iters", "0", "--timing-log-level", str(level))
    assert main(arguments(data, tmp_path / "run", *more), {}) == ExitCode.OK
    log = (tmp_path / "run" / "log.txt").read_text()
    times = re.findall(r"^    ([\w-]+) \.+: \(([\d.]+), ([\d.]+)\)$", log, re.MULTILINE)
    names = {name for name, *_ in times}
    assert ("(min, max) time across ranks (ms):" in log) == (level > 0)
    if level < 2:
        assert names == (set(WHOLE_STEP) if level else set())
    else:
        assert names >= {*WHOLE_STEP, *(f"{node}-{way}" for node in NODES for way in ("forward", "backward"))}
    assert all(float(least) >= 0 and float(most) > 0 for name, least, most in times if name != "all-grads-sync")
