"""Signals that ask a run to stop."""

from __future__ import annotations

import os
import signal
import time

import pytest

from scalelong.training import host


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_asks_to_stop_and_the_handlers_come_back(number: int) -> None:
    asked: list[int] = []
    original = signal.signal(number, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        with host.stop_signals(lambda: asked.append(1)):
            os.kill(os.getpid(), number)
        assert asked == [1]
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, original)


def test_a_second_interrupt_is_meant_only_after_some_time(monkeypatch) -> None:
    asked: list[int] = []
    with pytest.raises(KeyboardInterrupt), host.stop_signals(lambda: asked.append(1)):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # by a launcher that forwards it
        assert len(asked) == 2
        monkeypatch.setattr(host, "_SECOND_INTERRUPT", 0.0)
        time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)


def test_under_nohup_a_hangup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with host.stop_signals(lambda: pytest.fail("it was to be ignored")):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
