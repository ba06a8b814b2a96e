"""Progress as bars on a terminal and as lines elsewhere."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import struct
import subprocess
import sys
import termios
from types import SimpleNamespace

import pytest

from scalelong import progress
from scalelong.cli.main import main
from scalelong.progress import LogHandler, Progress

PROGRAM = """
import logging, time
from scalelong import progress
from scalelong.progress import LogHandler, Progress
progress.SECONDS = 0.05
logging.basicConfig(format="%(message)s", level=logging.INFO, handlers=[LogHandler()])
with Progress(total=3, desc="outer", unit="img") as outer:
    for step in Progress(range(3), desc="inner", unit="step"):
        time.sleep(0.12)
        logging.info("a message")
        outer.update()
"""


def test_off_a_terminal_there_is_a_line_every_few_seconds(capsys, monkeypatch) -> None:
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))  # two seconds pass at every look
    with Progress(total=40, desc="work", unit="img") as bar:
        for _ in range(40):
            bar.update()
            bar.set_postfix(loss="0.5")
    lines = capsys.readouterr().err.splitlines()
    assert 3 <= len(lines) <= 20
    assert lines[-1].startswith("work: 40 of 40 img, ") and lines[-1].endswith("loss=0.5")
    assert len(set(lines)) == len(lines)


def test_short_work_prints_nothing(capsys) -> None:
    assert list(Progress(range(3))) == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_a_worker_is_silent(capsys, monkeypatch) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    monkeypatch.setattr(progress, "_hidden", False)
    progress.hide()
    assert list(Progress(range(3))) == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_messages_are_written_once(capsys) -> None:
    logger = logging.Logger("test")
    logger.addHandler(LogHandler())
    logger.warning("%d apples", 3)
    assert capsys.readouterr().err == "3 apples\n"


def test_an_error_is_one_write(monkeypatch) -> None:
    """Two writes would mix the lines of several ranks, whose stderr torchrun does not buffer."""
    written: list[str] = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=written.append, flush=lambda: None))
    assert main(["train", "nosuch"]) == 1
    assert len(written) == 1
    assert written[0].startswith("error: preset: unknown 'nosuch'")
    assert written[0].endswith("\n")


@pytest.mark.slow
def test_on_a_terminal_bars_and_messages_have_lines_of_their_own() -> None:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    try:
        subprocess.run([sys.executable, "-c", PROGRAM], stderr=follower, check=True, timeout=120)
        shown = os.read(leader, 1_000_000).decode()
    finally:
        os.close(leader)
        os.close(follower)
    pieces = [piece for line in shown.split("\n") for piece in line.split("\r")]
    assert sum(piece.replace("\x1b[A", "").strip() == "a message" for piece in pieces) == 3
    assert any(piece.strip().startswith("outer: 100%") for piece in pieces)
    assert any("inner: " in piece for piece in pieces)
    assert not any("outer" in piece and "inner" in piece for piece in pieces), "bars share a line"


@pytest.mark.parametrize("how", ["a pipe nobody reads", "closed"])
def test_work_goes_on_where_nobody_reads_its_progress(how: str, tmp_path) -> None:
    ended = tmp_path / "ended"
    program = f"{PROGRAM}\nopen({str(ended)!r}, 'w')"
    if how == "closed":
        done = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, program], check=False)
    else:
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run([sys.executable, "-c", program], stderr=writer, check=False)
        os.close(writer)
    assert done.returncode == 0 and ended.exists()
