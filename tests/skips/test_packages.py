"""Networks of packages that import torchvision, in a process of their own (see tests/packages.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages import FOLDER

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_networks_of_other_packages_are_found_or_refused_as_counted_by_hand(tmp_path) -> None:
    if not (FOLDER / ".installed").exists():
        pytest.skip("make test-slow installs tests/packages.txt")
    done = subprocess.run(
        [sys.executable, "-m", "tests.packages", tmp_path / "found.json"],
        env={**os.environ, "PYTHONPATH": f"{FOLDER}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "found.json").read_text())
    assert {row["package"] for row in rows} == {
        "denoising-diffusion-pytorch", "imagen-pytorch", "k-diffusion", "segmentation_models_pytorch"
    }  # fmt: skip
    for row in rows:
        assert row["found"] == row["expected"], row
        assert row["refusal"] in row.get("said", ""), row
        assert row.get("worst", 0.0) < 1e-6, row
        assert row.get("effect", 1.0) > 1e-4, row
