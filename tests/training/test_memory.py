"""Training does not leak: the memory of a process stays as it is after the first steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys
import psutil
from scalelong.training import train
from tests.training.tiny import tiny

process, sizes = psutil.Process(), []
train(
    tiny(training_steps=2000, training_log_every=10, training_checkpoint_every=250, data_workers=0),
    sys.argv[1],
    [lambda step, model: sizes.append(process.memory_info().rss)],
)
print(json.dumps(sizes))
"""


@pytest.mark.slow
def test_resident_memory_over_2000_steps_is_flat(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "run"], capture_output=True, text=True, check=True, timeout=600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    sizes = json.loads(done.stdout.splitlines()[-1])
    assert len(sizes) == 2000
    assert median(sizes[-200:]) <= 1.02 * median(sizes[200:400])
