from __future__ import annotations

from pathlib import Path

import pytest

from scalelong.cli.main import main
from scalelong.training import to_yaml
from tests.training.tiny import tiny


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A tiny trained run, made by the command."""
    (tmp_path / "tiny.yaml").write_text(to_yaml(tiny(training_steps=4)))
    assert main(["train", "digits-demo", "--config", str(tmp_path / "tiny.yaml"), "--out", str(tmp_path / "run")]) == 0
    return tmp_path / "run"
