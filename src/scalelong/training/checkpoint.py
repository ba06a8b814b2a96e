"""Checkpoints that are whole or not there: tensors in safetensors, the rest in JSON, a manifest of hashes written last.

A checkpoint is staged beside its place, synced to disk and renamed; whatever is killed, a folder called step-* is complete.
Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scalelong.files import file_digest

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "state.json"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used."""


@dataclass(frozen=True)
class Checkpoint:
    """What is stored: named groups of tensors (model, ema, optimizer) and plain values."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]


def save_checkpoint(folder: Path, step: int, checkpoint: Checkpoint, keep: int) -> Path:
    """Write checkpoints/step-N and drop all but the newest `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{step:08d}"
    staged = folder / f".staged-{final.name}"
    for left in folder.glob(".*-step-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    staged.mkdir()
    try:
        for name, tensors in checkpoint.tensors.items():
            save_file({key: value.detach().contiguous().cpu() for key, value in tensors.items()}, _file(staged, name))
        (staged / STATE).write_text(json.dumps(dict(checkpoint.state)) + "\n")
        hashes = {file.name: file_digest(file, "sha256") for file in sorted(staged.iterdir())}
        (staged / MANIFEST).write_text(json.dumps(hashes, indent=1) + "\n")
        for file in staged.iterdir():
            _sync(file)
        _sync(staged)
        if final.exists():
            _drop(final)
        staged.replace(final)
        _sync(folder)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    for old in list_checkpoints(folder)[:-keep]:
        _drop(old)
    return final


def _drop(path: Path) -> None:
    """Remove a checkpoint; killed on the way, it is none any more."""
    dropped = path.rename(path.with_name(f".dropped-{path.name}"))
    shutil.rmtree(dropped)


def list_checkpoints(folder: Path) -> list[Path]:
    """All checkpoints, oldest first."""
    return sorted(folder.glob("step-*")) if folder.is_dir() else []


def load_checkpoint(path: Path, only: tuple[str, ...] | None = None) -> Checkpoint:
    """Read a checkpoint (some of its groups) back, its hashes verified first."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise CheckpointError(f"{path}: has no {MANIFEST}, so it is not a complete checkpoint; remove that folder")
    hashes = json.loads(manifest.read_text())
    wanted = [name for name in hashes if only is None or name == STATE or Path(name).stem in only]
    for name in wanted:
        if not (path / name).is_file() or file_digest(path / name, "sha256") != hashes[name]:
            raise CheckpointError(f"{path / name}: missing or damaged (its sha256 differs from {MANIFEST})")
    tensors = {Path(name).stem: load_file(path / name) for name in wanted if name.endswith(".safetensors")}
    return Checkpoint(tensors, json.loads((path / STATE).read_text()))


def load_newest(folder: Path) -> tuple[Path, Checkpoint] | None:
    """The newest checkpoint that is whole, with a warning for each damaged one passed over; None if there never was one.

    If there are checkpoints and all are damaged this is an error: a run must not start afresh unasked.
    """
    found = list_checkpoints(folder)
    damaged = []
    for path in reversed(found):
        try:
            return path, load_checkpoint(path)
        except (CheckpointError, OSError, ValueError) as error:
            damaged.append(str(error))
            logger.warning("checkpoint passed over: %s", error)
    if damaged:
        raise CheckpointError(
            f"{folder}: no checkpoint is usable: {'; '.join(damaged)}; remove the run's folder to start afresh"
        )
    return None


# ---------------------------------------------------------------------------------------- the optimizer as named tensors


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Tensor]:
    """AdamW's state as `name/exp_avg` and so on; the parameters are named in the optimizer's order."""
    state = optimizer.state_dict()["state"]
    return {f"{names[i]}/{key}": value for i, entries in state.items() for key, value in entries.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, names: list[str], tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`; the settings (rate, betas) stay the optimizer's own."""
    position = {name: i for i, name in enumerate(names)}
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        state.setdefault(position[name], {})[entry] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"


def _sync(path: Path) -> None:
    """Make sure that a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
