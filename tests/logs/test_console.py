"""A live line on a terminal, plain lines elsewhere."""

import io
import sys

import pytest

from megatron_moe.logs.console import LiveConsole, PlainConsole, has_live_line
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
    assert not has_live_line()
    console = PlainConsole()
    console.start(0, 10)
    console.write(" iteration 1 | [not markup] |")
    console.progress(Reading(1))
    console.close()
    assert capsys.readouterr().out == " iteration 1 | [not markup] |\n"


@pytest.mark.parametrize(("kind", "redrawn"), [("xterm", True), ("dumb", False), ("unknown", False)])
def test_only_terminals_that_can_redraw_a_line_have_a_live_one(kind, redrawn, monkeypatch):
    sit_at_terminal(monkeypatch)
    monkeypatch.setenv("TERM", kind)
    assert has_live_line() is redrawn


def test_lines_stand_uncut_above_the_live_line_with_loss_speed_and_time_left(monkeypatch):
    terminal = sit_at_terminal(monkeypatch)
    console = LiveConsole(seq_length=32)
    console.write("before the start")
    console.start(2, 10)
    line = " [2026] iteration 3 | [bold]not markup | " + "x" * 200
    console.write(line)
    for iteration, seconds in ((3, 60.0), (4, 0.5), (5, 0.5)):  # the first step compiles
        console.progress(Reading(iteration, loss=2.5, num_samples=8, seconds=seconds))
    console.close()
    shown = terminal.getvalue()
    assert shown.startswith("before the start\n")
    assert line in shown
    last = shown[shown.rindex("iteration") :]
    assert all(part in last for part in ("5/10", "loss 2.5000", "512 tokens/s", "0:00:02 left")), last


def test_closing_twice_or_before_the_start_is_fine(monkeypatch):
    sit_at_terminal(monkeypatch)
    console = LiveConsole(seq_length=32)
    console.close()
    console.start(0, 10)
    console.close()
    console.close()
