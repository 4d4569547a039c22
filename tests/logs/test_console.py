"""A bar on a terminal, plain lines elsewhere."""

import io
import sys

import pytest

from megatron_moe.logs.console import BarConsole, PlainConsole, make_console
from tests.logs.reports import Reading


class Terminal(io.StringIO):
    """A screen of 100 columns."""

    def isatty(self) -> bool:
        return True


def sit_at_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replaced inside the test, because pytest gives every phase of a test its own output."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return screen


def test_a_file_or_pipe_gets_plain_lines(capsys):
    console = make_console(wants_bar=True, seq_length=32)
    assert isinstance(console, PlainConsole)
    console.start(0, 10)
    console.write(" iteration 1 | [not markup] |")
    console.progress(Reading(1))
    console.close()
    assert capsys.readouterr().out == " iteration 1 | [not markup] |\n"


def test_a_terminal_gets_a_bar_unless_it_is_not_wanted(monkeypatch):
    sit_at_terminal(monkeypatch)
    assert isinstance(make_console(wants_bar=True, seq_length=32), BarConsole)
    assert isinstance(make_console(wants_bar=False, seq_length=32), PlainConsole)


def test_lines_stand_above_the_bar_uncut_and_the_bar_shows_progress(monkeypatch):
    terminal = sit_at_terminal(monkeypatch)
    console = make_console(wants_bar=True, seq_length=32)
    console.write("before the start")
    console.start(2, 10)
    line = " [2026] iteration 3 | [bold]not markup | " + "x" * 200
    console.write(line)
    console.progress(Reading(3, loss=2.5, num_samples=8, seconds=0.5))
    console.close()
    shown = terminal.getvalue()
    assert shown.startswith("before the start\n")
    assert line in shown
    assert "3/10" in shown and "loss 2.5000" in shown and "512 tok/s" in shown


def test_closing_twice_or_before_the_start_is_fine(monkeypatch):
    sit_at_terminal(monkeypatch)
    console = make_console(wants_bar=True, seq_length=32)
    console.close()
    console.start(0, 10)
    console.close()
    console.close()
