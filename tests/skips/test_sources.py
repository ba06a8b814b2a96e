"""Networks of repositories that no package index has, each repository in a process of its own (see tests/sources.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import SOURCES, path

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_networks_of_other_repositories_are_scaled_copied_saved_and_loaded(name: str, tmp_path) -> None:
    if not path(name).exists():
        pytest.skip("python -m tests.sources clones it")
    done = subprocess.run(
        [sys.executable, "-m", "tests.sources", name, tmp_path / "found.json"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for row in json.loads((tmp_path / "found.json").read_text()):
        assert row["found"] == row["expected"], row
        assert row["worst"] < 1e-6, row
        assert row["effect"] > 1e-8, row  # EDM starts its last convolutions at 1e-5
