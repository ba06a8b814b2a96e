"""`scalelong doctor` reports what is there, not what should be."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from scalelong.cli.main import main


def test_it_names_versions_devices_and_the_cached_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cifar10").mkdir()
    assert main(["doctor", "--root", str(tmp_path)]) == 0
    lines = {line[2:].split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert torch.__version__ in lines["torch"]
    assert f"{tmp_path}: cifar10" in lines["cache"]
    assert ("cuda:0" in lines) == torch.cuda.is_available()


def test_a_missing_extra_and_an_empty_cache_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else found(name))
    assert main(["doctor", "--root", str(tmp_path / "not" / "yet")]) == 0
    printed = capsys.readouterr().out
    assert "! wandb" in printed and "pip install wandb" in printed
    assert "yet: empty" in printed
    assert not (tmp_path / "not").exists()
