"""Asking a run to stop."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)


class StopSignals:
    """SIGTERM and the first Ctrl-C ask the loop to save and stop; a second Ctrl-C interrupts at once."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self.ask = ask
        self.before: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self.before[number] = signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        logger.warning("asked to stop (%s): saving after this step", signal.Signals(number).name)
        self.ask()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
