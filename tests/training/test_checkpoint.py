"""Checkpoints are whole or not there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from scalelong.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    list_checkpoints,
    load_checkpoint,
    load_newest,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
)


def content(value: float) -> Checkpoint:
    return Checkpoint({"model": {"w": torch.full((3,), value)}, "ema": {"w": torch.zeros(3)}}, {"step": value})


def test_the_round_trip_and_the_newest_are_kept(tmp_path) -> None:
    for step in (1, 2, 3, 10):
        save_checkpoint(tmp_path, step, content(step), keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000003", "step-00000010"]
    path, checkpoint = load_newest(tmp_path)
    assert path.name == "step-00000010"
    assert torch.equal(checkpoint.tensors["model"]["w"], torch.full((3,), 10.0))
    assert checkpoint.state == {"step": 10}
    assert set(load_checkpoint(path, only=("ema",)).tensors) == {"ema"}


@pytest.mark.parametrize("damage", ["flip a byte", "cut", "remove", "no manifest"])
def test_a_damaged_checkpoint_is_passed_over_by_name(damage: str, tmp_path, caplog) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, content(step), keep=2)
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
    path, checkpoint = load_newest(tmp_path)
    assert (path.name, checkpoint.state["step"]) == ("step-00000001", 1)
    assert "step-00000002" in caplog.text


def test_if_all_are_damaged_nothing_starts_afresh(tmp_path) -> None:
    save_checkpoint(tmp_path, 1, content(1), keep=2)
    (tmp_path / "step-00000001" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no checkpoint is usable.*state\.json.*damaged"):
        load_newest(tmp_path)


def test_without_any_checkpoint_there_is_none(tmp_path) -> None:
    assert load_newest(tmp_path / "nothing") is None


def test_a_failed_write_leaves_the_older_ones_and_no_rest(tmp_path, monkeypatch) -> None:
    save_checkpoint(tmp_path, 1, content(1), keep=2)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("scalelong.files.fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(tmp_path, 2, content(2), keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_stale_staging_folder_is_removed(tmp_path) -> None:
    """What kill -9 leaves in the middle of a write."""
    (tmp_path / ".step-00000001-staging-ab12" / "files").mkdir(parents=True)
    (tmp_path / ".step-00000001-staging-ab12" / "files" / "model.safetensors").write_bytes(b"half")
    save_checkpoint(tmp_path, 1, content(1), keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_one_that_is_being_removed_is_none_any_more(tmp_path, monkeypatch) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, content(0), keep=2)
    with monkeypatch.context() as patched:

        def killed_halfway(folder: Path, **_: object) -> None:
            if folder.name.startswith(".dropped"):
                (folder / "state.json").unlink()
                raise KeyboardInterrupt

        patched.setattr(shutil, "rmtree", killed_halfway)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, 3, content(0), keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]
    for path in list_checkpoints(tmp_path):
        load_checkpoint(path)
    save_checkpoint(tmp_path, 4, content(0), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_the_manifest_holds_a_hash_of_every_other_file(tmp_path) -> None:
    path = save_checkpoint(tmp_path, 1, content(1), keep=2)
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
    _, fresh = trained(0)
    restore_optimizer(fresh, model, optimizer_tensors(optimizer, model))
    for old, new in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert old.keys() == new.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(old[key], new[key]) for key in old)
