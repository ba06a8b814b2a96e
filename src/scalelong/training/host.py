"""Signals that stop a run, and the environment record."""

from __future__ import annotations

import logging
import platform
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

_SECOND_INTERRUPT = 2.0  # seconds after which another Ctrl-C counts


@contextmanager
def stop_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGTERM, SIGHUP and the first Ctrl-C; a second Ctrl-C seconds later interrupts."""
    first = 0.0

    def handle(number: int, _frame: object) -> None:
        nonlocal first
        if number == signal.SIGINT and first and time.monotonic() - first > _SECOND_INTERRUPT:
            raise KeyboardInterrupt  # launchers forward the signal that the terminal sent to all
        if not first:
            logger.warning("asked to stop (%s): saving after this step", signal.Signals(number).name)
        first = first or time.monotonic()
        stop()

    caught = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as it is under nohup
        caught.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def environment(device: torch.device, ranks: int, data: str) -> dict[str, Any]:
    """The start record: command, versions, device, and the fingerprint of the data."""
    program = Path(sys.argv[0])
    name = "scalelong" if program.parts[-3:] == ("scalelong", "cli", "main.py") else program.name
    return {
        "command": shlex.join([name, *sys.argv[1:]]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "ranks": ranks,
        "data": data,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
