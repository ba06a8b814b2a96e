"""Failpoints: what the environment variable asks for happens at the named point, and nowhere else."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from scalelong import failpoints
from scalelong.failpoints import VARIABLE, failpoint


@pytest.fixture(autouse=True)
def _fresh(monkeypatch) -> None:
    failpoints._visits.clear()


def test_nothing_happens_without_the_variable(monkeypatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    failpoint("a")


def test_raise_at_the_visit_that_is_named(monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, "a=raise:MemoryError@2,b")
    failpoint("a")
    failpoint("other")
    with pytest.raises(MemoryError, match="injected at a"):
        failpoint("a")
    failpoint("a")


def test_kill_is_the_default() -> None:
    code = f"import os; os.environ['{VARIABLE}'] = 'a'; from scalelong.failpoints import failpoint; failpoint('a')"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
