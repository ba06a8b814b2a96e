"""The folder of a run: whose it may become, and who may write to it."""

from __future__ import annotations

import os
import shutil

import pytest

from scalelong.training import Trainer, from_yaml, train
from scalelong.training.checkpoint import CheckpointError
from tests.training.tiny import tiny


def test_another_configuration_in_the_folder_is_shown_and_refused(tmp_path) -> None:
    train(tiny(training_steps=4), tmp_path / "run")
    with pytest.raises(ValueError, match=r"(?s)another configuration:.*optimizer\.lr: 0\.001 there, 0\.5 asked for"):
        train(tiny(training_steps=4, optimizer_lr=0.5), tmp_path / "run")


def test_a_folder_with_other_things_in_it_is_refused(tmp_path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match=r"not empty and holds no config\.yaml"):
        train(tiny(), tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        train(tiny(), tmp_path / "thesis.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_too_little_space_is_said_before_training(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 1000))
    with pytest.raises(OSError, match=r"0\.0 GB free; 2 checkpoints and one being written need"):
        train(tiny(), tmp_path / "run")


def test_no_permission_is_said_before_training(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="no permission to write"):
        train(tiny(), tmp_path / "run")


def test_a_second_process_is_refused_and_changes_nothing(tmp_path) -> None:
    """The lock is taken once more here, which counts as another process."""
    first = Trainer(tiny(), tmp_path / "run")
    with pytest.raises(RuntimeError, match="another process is training into"):
        Trainer(tiny(training_steps=99), tmp_path / "run")
    assert from_yaml(tmp_path / "run" / "config.yaml") == tiny()
    first.run()


def test_a_folder_is_free_again_whatever_happened(tmp_path) -> None:
    done = Trainer(tiny(training_steps=4), tmp_path / "run")
    done.run()
    complete = Trainer(tiny(training_steps=4), tmp_path / "run")
    complete.run()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    failing = Trainer(tiny(training_steps=4), tmp_path / "run")
    with pytest.raises(CheckpointError):
        failing.run()
    Trainer(tiny(training_steps=4), tmp_path / "run")


def test_a_folder_that_was_only_locked_is_still_empty(tmp_path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    train(tiny(training_steps=1), tmp_path / "run")


def test_a_folder_whose_run_never_began_takes_other_settings(tmp_path) -> None:
    """As after data that is found to be bad when it is first read."""
    Trainer(tiny(optimizer_lr=0.5), tmp_path / "run")._lock.close()
    train(tiny(training_steps=1), tmp_path / "run")
    assert from_yaml(tmp_path / "run" / "config.yaml") == tiny(training_steps=1)


def test_a_finished_run_keeps_its_settings_when_fewer_steps_are_asked_for(tmp_path) -> None:
    train(tiny(training_steps=8), tmp_path / "run")
    train(tiny(training_steps=4), tmp_path / "run")
    assert from_yaml(tmp_path / "run" / "config.yaml").training.steps == 8
