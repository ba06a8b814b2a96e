"""Triton kernels on a CPU, in Triton's interpreter; `make test-slow` installs Triton with tests/packages.txt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages import FOLDER

ROOT = Path(__file__).parents[1]


def run_interpreted(program: str, *paths: Path) -> str:
    """The standard output of a Python program in a process of its own, with Triton and `paths` behind its own path."""
    if not (FOLDER / ".installed").exists():
        pytest.skip("make test-slow installs tests/packages.txt")
    start = f"import sys; sys.path += {[str(path) for path in (FOLDER, *paths)]!r}\n"
    command, environment = [sys.executable, "-c", start + program], os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout
