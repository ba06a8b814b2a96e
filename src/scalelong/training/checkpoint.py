"""A run's folder on disk: claimed by one process, with checkpoints that are complete or absent.

A checkpoint is safetensors, JSON and a manifest of hashes, staged, synced and renamed. Nothing is ever unpickled.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scalelong.files import atomic_folder, file_digest, write_text
from scalelong.runs import CHECKPOINTS, CONFIG, LOCK, MANIFEST, METRICS, step_name
from scalelong.runs.events import CHECKPOINT_KIND, read_events
from scalelong.runs.reader import checkpoints, is_run
from scalelong.runs.settings import MAY_CHANGE, RunConfig, differences, from_yaml, to_yaml

logger = logging.getLogger(__name__)

STATE = "state.json"
Tensors = Mapping[str, Mapping[str, Tensor]]  # by group: model, ema, optimizer


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used."""


def save_checkpoint(folder: Path, step: int, groups: Tensors, state: dict[str, Any], keep: int) -> None:
    """Write folder/step-N and remove all but the newest `keep`."""
    for left in folder.glob(".*step-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    with atomic_folder(folder / step_name(step)) as files:
        for name, tensors in groups.items():
            stored = {key: value.detach().contiguous().cpu() for key, value in tensors.items()}
            save_file(stored, files / f"{name}.safetensors")
        (files / STATE).write_text(json.dumps(state) + "\n")
        hashes = {file.name: file_digest(file) for file in sorted(files.iterdir())}
        (files / MANIFEST).write_text(json.dumps(hashes, indent=1) + "\n")
    for old in sorted(folder.glob("step-*"))[:-keep]:
        shutil.rmtree(old.rename(old.with_name(f".dropped-{old.name}")))


def load_checkpoint(path: Path, only: str = "") -> tuple[Tensors, dict[str, Any]]:
    """Tensors and state of a checkpoint, or of one of its groups, after verifying its hashes."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise CheckpointError(f"{path}: has no {MANIFEST}, so it is not a complete checkpoint; remove that folder")
    hashes = json.loads(manifest.read_text())
    wanted = [name for name in hashes if not only or name == STATE or Path(name).stem == only]
    for name in wanted:
        if not (path / name).is_file() or file_digest(path / name) != hashes[name]:
            raise CheckpointError(f"{path / name}: missing or damaged (its sha256 differs from {MANIFEST})")
    tensors = {Path(name).stem: load_file(path / name) for name in wanted if name.endswith(".safetensors")}
    return tensors, json.loads((path / STATE).read_text())


def load_newest(folder: Path) -> tuple[Path, Tensors, dict[str, Any]] | None:
    """The newest intact checkpoint, with a warning for each damaged one; None if there is none at all."""
    damaged = []
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            return path, *load_checkpoint(path)
        except (CheckpointError, OSError, ValueError) as error:
            damaged.append(str(error))
            logger.warning("checkpoint skipped: %s", error)
    if damaged:
        raise CheckpointError(f"{folder}: all checkpoints are damaged: {'; '.join(damaged)}; remove the run to restart")
    return None


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state as `parameter/exp_avg` and so on."""
    names, state = _in_order(optimizer, model), optimizer.state_dict()["state"]
    return {f"{names[i]}/{key}": value for i, entries in state.items() for key, value in entries.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`; rate and betas stay the optimizer's own."""
    position = {name: i for i, name in enumerate(_in_order(optimizer, model))}
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        state.setdefault(position[name], {})[entry] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _in_order(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """The names of the optimizer's parameters, in the order of its groups."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def claim_folder(folder: Path, config: RunConfig, checkpoint_bytes: int) -> IO[str]:
    """Lock `folder` for this run until the returned file is closed, or raise before any work."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out: {folder} is a file; choose a folder")
    if is_run(folder) and ((folder / METRICS).is_file() or checkpoints(folder)):  # it started
        changed = {k: v for k, v in differences(from_yaml(folder / CONFIG), config).items() if k not in MAY_CHANGE}
        if changed:
            lines = "\n".join(f"  {key}: {old!r} there, {new!r} asked for" for key, (old, new) in changed.items())
            raise ValueError(f"out: {folder} holds a run of another configuration:\n{lines}\nchoose another folder")
    elif not is_run(folder) and folder.is_dir() and any(path.name != LOCK for path in folder.iterdir()):
        raise ValueError(f"out: {folder} is not empty and holds no {CONFIG}; choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PermissionError(f"out: cannot create {folder}: {error.strerror}; choose a writable folder") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"out: no permission to write to {folder}; choose another folder")
    count, free = config.training.keep + 1, shutil.disk_usage(folder).free / 1e9
    if free < (needed := count * checkpoint_bytes / 1e9):
        raise OSError(f"out: {folder} has {free:.1f} GB free, {count} checkpoints need {needed:.1f} GB; free some")
    lock = (folder / LOCK).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise RuntimeError(f"out: another process is training into {folder}; wait for it or stop it") from None
    if config.training.steps >= max(checkpoints(folder), default=0):  # a complete run keeps its config
        write_text(folder / CONFIG, to_yaml(config))
    return lock


def check_never_saved(folder: Path) -> None:
    """Raise if a run without checkpoints once wrote some: a lost checkpoint must not go unnoticed."""
    records = read_events(folder)[0] if (folder / METRICS).is_file() else []
    saved = [record["step"] for record in records if record.get("kind") == CHECKPOINT_KIND]
    if saved:
        lost = f"the run wrote checkpoints up to step {max(saved)}, but they are missing"
        raise CheckpointError(f"{folder / CHECKPOINTS}: {lost}; put them back, or remove the run to start afresh")
