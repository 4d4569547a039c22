"""Signals that ask to leave: noted first, obeyed at once the second time, and given back afterwards."""

import os
import signal

import pytest

from megatron_moe.watch.signals import Signals


def test_a_signal_is_noted_and_its_handler_is_given_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with Signals(("SIGUSR1", "SIGUSR1")) as signals:
        assert signals.active and signals.received is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.received == signal.SIGUSR1
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_second_signal_leaves_at_once_but_an_echo_of_the_first_does_not() -> None:
    """Fault 29."""
    now = [10.0]
    signals = Signals(("SIGINT",), clock=lambda: now[0])
    signals.take(signal.SIGINT)
    now[0] += 1.9  # the launcher passes on what the terminal sent to everybody
    signals.take(signal.SIGINT)
    now[0] += 0.1
    with pytest.raises(KeyboardInterrupt, match="SIGTERM, the second signal"):
        signals.take(signal.SIGTERM)


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with Signals(("SIGUSR2",)) as signals:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert signals.received is None
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_forked_process_leaves_the_answer_to_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    signals = Signals(("SIGTERM",))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    signals.take(signal.SIGTERM)
    assert signals.received is None


def test_without_names_nothing_is_listened_to() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        assert not signals.active and signal.getsignal(signal.SIGTERM) is before
