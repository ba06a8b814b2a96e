"""The pages of figures hold what the files of results hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_tables_and_pictures_are_those_of_the_results() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "figures_table.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
