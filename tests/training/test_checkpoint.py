"""The folder of a run: checkpoints that are complete or absent, and who may write to it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from scalelong.training import Trainer, from_yaml, train
from scalelong.training.checkpoint import (
    CheckpointError,
    Tensors,
    load_checkpoint,
    load_newest,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
)
from tests.training.tiny import tiny


def content(value: float) -> tuple[Tensors, dict[str, Any]]:
    return {"model": {"w": torch.full((3,), value)}, "ema": {"w": torch.zeros(3)}}, {"step": value}


def test_the_round_trip_and_the_newest_are_kept(tmp_path) -> None:
    for step in (1, 2, 3, 10):
        save_checkpoint(tmp_path, step, *content(step), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]
    path, tensors, state = load_newest(tmp_path)
    assert path.name == "step-00000010"
    assert torch.equal(tensors["model"]["w"], torch.full((3,), 10.0))
    assert state == {"step": 10}
    assert set(load_checkpoint(path, only="ema")[0]) == {"ema"}


@pytest.mark.parametrize("damage", ["flip a byte", "cut", "remove", "no manifest"])
def test_a_damaged_checkpoint_is_skipped_and_named(damage: str, tmp_path, caplog) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, *content(step), keep=2)
    file = tmp_path / "step-00000002" / "model.safetensors"
    data = file.read_bytes()
    if damage == "flip a byte":
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif damage == "remove":
        file.unlink()
    else:
        (file.parent / "manifest.json").unlink()
    path, _tensors, state = load_newest(tmp_path)
    assert (path.name, state["step"]) == ("step-00000001", 1)
    assert "step-00000002" in caplog.text


def test_it_is_an_error_if_all_are_damaged(tmp_path) -> None:
    save_checkpoint(tmp_path, 1, *content(1), keep=2)
    (tmp_path / "step-00000001" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"all checkpoints are damaged.*state\.json.*damaged"):
        load_newest(tmp_path)


def test_no_checkpoint_is_none(tmp_path) -> None:
    assert load_newest(tmp_path / "nothing") is None


def test_a_failed_write_leaves_the_older_checkpoints_alone(tmp_path, monkeypatch) -> None:
    save_checkpoint(tmp_path, 1, *content(1), keep=2)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("scalelong.files.fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(tmp_path, 2, *content(2), keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_stale_staging_folder_is_removed(tmp_path) -> None:
    """What kill -9 leaves in the middle of a write."""
    (tmp_path / ".step-00000001-staging-ab12" / "files").mkdir(parents=True)
    (tmp_path / ".step-00000001-staging-ab12" / "files" / "model.safetensors").write_bytes(b"half")
    save_checkpoint(tmp_path, 1, *content(1), keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_checkpoint_killed_during_removal_is_not_listed(tmp_path, monkeypatch) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, *content(0), keep=2)
    with monkeypatch.context() as patched:

        def killed_halfway(folder: Path, **_: object) -> None:
            if folder.name.startswith(".dropped"):
                (folder / "state.json").unlink()
                raise KeyboardInterrupt

        patched.setattr(shutil, "rmtree", killed_halfway)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, 3, *content(0), keep=2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002", "step-00000003"]
    for path in tmp_path.glob("step-*"):
        load_checkpoint(path)
    save_checkpoint(tmp_path, 4, *content(0), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_the_manifest_holds_a_hash_of_every_other_file(tmp_path) -> None:
    save_checkpoint(tmp_path, 1, *content(1), keep=2)
    path = tmp_path / "step-00000001"
    names = {file.name for file in path.iterdir()} - {"manifest.json"}
    assert set(json.loads((path / "manifest.json").read_text())) == names


def test_the_optimizer_makes_the_round_trip() -> None:
    def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.AdamW]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.full((2, 3), float(step))).square().sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = trained(3)
    other, fresh = trained(0)
    restore_optimizer(fresh, other, optimizer_tensors(optimizer, model))
    for old, new in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert old.keys() == new.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(old[key], new[key]) for key in old)


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


def test_too_little_space_is_reported_before_training(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 1000))
    with pytest.raises(OSError, match=r"0\.0 GB free, 3 checkpoints need"):
        train(tiny(), tmp_path / "run")


def test_missing_permission_is_reported_before_training(tmp_path, monkeypatch) -> None:
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


def test_the_lock_is_released_whatever_happened(tmp_path) -> None:
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


def test_a_complete_run_keeps_its_settings_when_fewer_steps_are_requested(tmp_path) -> None:
    train(tiny(training_steps=8), tmp_path / "run")
    train(tiny(training_steps=4), tmp_path / "run")
    assert from_yaml(tmp_path / "run" / "config.yaml").training.steps == 8
