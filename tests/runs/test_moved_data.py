"""Data that moved between the start and the end of a run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from scalelong.cli.main import main
from scalelong.errors import CheckpointError
from scalelong.evaluation.evaluate import load_training_data
from scalelong.runs.folder import read_config
from scalelong.training import RunConfig, load_run, train
from tests.training.tiny import assert_same_run, tiny


def images(folder: Path, seed: int) -> Path:
    folder.mkdir()
    pixels = torch.randint(0, 256, (8, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    for number, array in enumerate(pixels.numpy()):
        Image.fromarray(array).save(folder / f"{number}.png")
    return folder


def config(data: object, steps: int = 4, **changes: Any) -> RunConfig:
    return tiny(data_name=str(data), training_steps=steps, training_checkpoint_every=2, **changes)


def test_a_run_continues_on_data_that_moved(tmp_path) -> None:
    old = images(tmp_path / "old", 0)
    train(config(f"folder:{old}"), tmp_path / "whole")
    train(config(f"folder:{old}", steps=2), tmp_path / "run")
    new = old.rename(tmp_path / "new")
    train(config(f"folder:{new}"), tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    run = load_run(tmp_path / "run")
    assert run.config.data.name == f"folder:{new}"
    assert len(load_training_data(run)) == 8  # as for an evaluation
    last = new.rename(tmp_path / "last")
    train(config(last), tmp_path / "run")  # complete; the path alone is updated
    assert read_config(tmp_path / "run") == config(last)


@pytest.mark.parametrize("form", ["folder:{}", "{}"])
def test_other_data_and_other_settings_are_refused_and_nothing_changes(form: str, tmp_path) -> None:
    train(config(images(tmp_path / "old", 0), steps=2), tmp_path / "run")
    other = form.format(images(tmp_path / "other", 1))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=r"was trained on other data than folder:.*other is now"):
        train(config(other), tmp_path / "run")
    with pytest.raises(
        ValueError, match=r"(?s)another configuration:\n  optimizer\.lr: 0\.001 there, 0\.5 asked for\n"
    ):
        train(config(other, optimizer_lr=0.5), tmp_path / "run")
    with pytest.raises(ValueError, match=r"data\.name: .* there, 'digits' asked for"):
        train(config("digits"), tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_path_relative_to_another_folder_is_the_same_data(tmp_path, monkeypatch) -> None:
    images(tmp_path / "photos", 0)
    command = ["train", "digits-demo", "--training.sample-every", "0", "--training.checkpoint-every", "2"]
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--data", "folder:photos", "--steps", "2", "--out", "run"]) == 0
    (tmp_path / "inside").mkdir()
    shutil.move("run", "inside/moved")
    monkeypatch.chdir(tmp_path / "inside")
    assert main([*command, "--data", "folder:../photos", "--steps", "4", "--out", "moved"]) == 0
    assert load_run("moved").step == 4
