"""Progress bars on a terminal; a line every few seconds in logs and CI."""

from __future__ import annotations

import io
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    Bar = tqdm[Any]
else:
    Bar = tqdm

SECONDS = 5.0  # between lines; shorter work prints none
_LINE = "{desc}: {n_fmt} of {total_fmt} {unit}, {elapsed} so far, {remaining} left{postfix}"
_hidden = False


def hide() -> None:
    """Disable progress in this process; used in workers whose parent shows it."""
    global _hidden
    _hidden = True


class Progress(Bar):
    """tqdm that prints lines when stderr is not a terminal.

    >>> [item for item in Progress([1, 2, 3], desc="count")]
    [1, 2, 3]
    """

    def __init__(self, iterable: Any = None, disable: bool = False, **options: Any) -> None:
        self.lines = not _on_terminal()
        self._last = time.monotonic()
        self._printed: float = -1  # n of the last line
        if self.lines:
            options |= {"bar_format": _LINE, "file": io.StringIO()}  # tqdm's own control characters go nowhere
        super().__init__(iterable, disable=disable or _hidden, leave=None, dynamic_ncols=not self.lines, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if not self.lines:
            super().display(msg, pos)
        elif msg is None and time.monotonic() - self._last >= SECONDS:
            self._print()

    def close(self) -> None:
        if self.lines and not self.disable and 0 <= self._printed < self.n:
            self._print()
        super().close()

    def _print(self) -> None:
        self._last, self._printed = time.monotonic(), self.n
        write_stderr(f"{self}\n")


def _on_terminal() -> bool:
    """True if stderr is a terminal wide enough for a bar; terminals of some containers have no width."""
    return sys.stderr is not None and sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 40


class LogHandler(logging.Handler):
    """Write log messages to stderr above progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=sys.stderr):
            write_stderr(f"{self.format(record)}\n")


def write_stderr(text: str) -> None:
    """Write at once, so that lines of several ranks stay apart; ignore a closed pipe."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
