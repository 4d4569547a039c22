"""Signal handlers."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.resilience.signals import Signals
from tests.helpers.ranks import REPOSITORY


def test_signal_is_recorded_and_its_handler_restored() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with Signals(("SIGUSR1", "SIGUSR1")) as signals:
        assert signals.needs_grace and signals.received is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.received == signal.SIGUSR1
    assert signal.getsignal(signal.SIGUSR1) is before
    with Signals() as signals:
        assert not signals.needs_grace and signal.getsignal(signal.SIGUSR1) is before


def test_second_signal_interrupts_but_a_forwarded_first_one_does_not() -> None:
    now = [10.0]
    signals = Signals(("SIGINT",), clock=lambda: now[0])
    signals.handle(signal.SIGINT)
    now[0] += 1.9  # the launcher forwards the signal that the terminal sent to all processes
    signals.handle(signal.SIGINT)
    now[0] += 0.1
    with pytest.raises(KeyboardInterrupt, match="SIGTERM, the second signal"):
        signals.handle(signal.SIGTERM)


def test_ctrl_c_is_an_exit_signal_from_the_first_step_on(capfd: pytest.CaptureFixture) -> None:
    """Before the first step there is nothing to save."""
    before = signal.getsignal(signal.SIGINT)
    with Signals(has_launcher=False, says=True) as signals:
        assert signal.getsignal(signal.SIGINT) is before
        signals.begin_training()
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGINT
        assert "SIGINT: exiting after this step; a second signal exits immediately" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt, match="SIGINT, the second signal"):
            os.kill(os.getpid(), signal.SIGINT)  # counts immediately, as no launcher repeats signals
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_during_imports_writes_the_status(tmp_path: Path) -> None:
    """Imports may replace or swallow a KeyboardInterrupt."""
    (tmp_path / "slow.py").write_text(
        "import os, signal\n"
        "class Sends:\n"
        "    def __set_name__(self, owner, name): os.kill(os.getpid(), signal.SIGINT)\n"
        "class Owner: field = Sends()\n"
    )
    program = (
        "from pathlib import Path; from megatron_moe.resilience.signals import Signals; "
        "from megatron_moe.resilience.run_status import RunStatus\n"
        "with Signals().exit_at_once(RunStatus(Path('run'))): import slow\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (ExitCode.INTERRUPTED, "", "")
    assert json.loads((tmp_path / "run" / "status.json").read_text())["code"] == ExitCode.INTERRUPTED


def test_ctrl_c_while_parsing_prints_nothing(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, pretrain_moe\n"
        "def interrupted(*words): os.kill(os.getpid(), signal.SIGINT)\n"
        "pretrain_moe.main = interrupted\n"
        "pretrain_moe.command()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (ExitCode.INTERRUPTED, "", "")


def test_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with Signals(("SIGUSR2",)) as signals:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert signals.received is None
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_forked_process_ignores_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    signals = Signals(("SIGTERM",))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    signals.handle(signal.SIGTERM)
    assert signals.received is None
