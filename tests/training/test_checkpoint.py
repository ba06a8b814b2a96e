"""Checkpoints: complete or absent, and never lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from scalelong.files import file_digest, remove_leftovers
from scalelong.training.checkpoint import (
    CheckpointError,
    Tensors,
    load_checkpoint,
    load_newest,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
)


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
    with pytest.raises(CheckpointError, match=r"step 2: .*No space left.*step-00000001 is intact"):
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
            if folder.name.endswith("-dropped"):
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


def test_a_checkpoint_that_was_being_replaced_comes_back(tmp_path, monkeypatch) -> None:
    """kill -9 between the two renames: the old one is put back before the next one is written."""
    save_checkpoint(tmp_path, 1, *content(1), keep=2)
    stage = tmp_path / ".step-00000001-staging-ab12"
    (stage / "files").mkdir(parents=True)
    (tmp_path / "step-00000001").rename(stage / "old")
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert load_newest(tmp_path)[2] == {"step": 1}


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors"])
@pytest.mark.parametrize("content_", [b"", b"{}", b"[]", b"null", b"[" * 100_000])
def test_a_file_of_other_content_is_named(name: str, content_: bytes, tmp_path, caplog) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, *content(step), keep=2)
    (tmp_path / "step-00000002" / name).write_bytes(content_)
    assert load_newest(tmp_path)[0].name == "step-00000001"
    assert str(tmp_path / "step-00000002" / name) in caplog.text


def test_a_stray_folder_is_named_and_never_counted(tmp_path, caplog) -> None:
    (tmp_path / "step-abc").mkdir()
    (tmp_path / "step-00000009").touch()
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, *content(step), keep=2)
    assert load_newest(tmp_path)[0].name == "step-00000003"
    assert (tmp_path / "step-00000002").is_dir()
    assert "step-abc: is not a checkpoint" in caplog.text


def test_hashes_that_fit_do_not_make_a_safetensors_file(tmp_path) -> None:
    save_checkpoint(tmp_path, 1, *content(1), keep=2)
    path = tmp_path / "step-00000001"
    (path / "ema.safetensors").write_bytes(b"no tensors")
    hashes = json.loads((path / "manifest.json").read_text())
    hashes["ema.safetensors"] = file_digest(path / "ema.safetensors")
    (path / "manifest.json").write_text(json.dumps(hashes))
    with pytest.raises(CheckpointError, match=r"ema\.safetensors: is not a safetensors file"):
        load_checkpoint(path)
