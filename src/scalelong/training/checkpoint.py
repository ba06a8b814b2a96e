"""Atomic checkpoints: safetensors, JSON and a manifest of hashes; nothing is pickled."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scalelong.errors import CheckpointError as CheckpointError
from scalelong.failpoints import failpoint
from scalelong.files import atomic_folder, file_digest, inside, read_json, remove_leftovers, write_manifest
from scalelong.runs import CHECKPOINTS, CONFIG, MANIFEST, METRICS, step_name
from scalelong.runs.events import CHECKPOINT_KIND, read_events
from scalelong.runs.folder import by_step

logger = logging.getLogger(__name__)

STATE = "state.json"
Tensors = Mapping[str, Mapping[str, Tensor]]  # by group: model, ema, optimizer


def save_checkpoint(
    folder: Path, step: int, groups: Tensors, state: dict[str, Any], keep: int, config: str = ""
) -> None:
    """Write folder/step-N and remove all but the newest `keep`; on error existing checkpoints are unchanged.

    `config` is a backup of the run's config.yaml.
    """
    remove_leftovers(folder)
    try:
        _write(folder / step_name(step), groups, state, config)
    except (OSError, SafetensorError) as error:
        newest = next(reversed(steps_in(folder).values()), None)
        intact = f"{newest.name} is intact" if newest else "there is none before"
        again = f"{intact}, run the same command again once there is space"
        raise CheckpointError(f"step {step}: the checkpoint could not be written ({error}); {again}") from error
    for old in list(steps_in(folder).values())[:-keep]:
        dropped = old.rename(old.with_name(f".{old.name}-staging-dropped"))
        failpoint("save.while_dropping")
        shutil.rmtree(dropped)


def _write(home: Path, groups: Tensors, state: dict[str, Any], config: str) -> None:
    with atomic_folder(home) as files:
        for name, tensors in groups.items():
            stored = {key: value.detach().contiguous().cpu() for key, value in tensors.items()}
            save_file(stored, files / f"{name}.safetensors")
            failpoint("save.after_tensors")
        (files / STATE).write_text(json.dumps(state) + "\n")
        if config:
            (files / CONFIG).write_text(config)
        failpoint("save.before_manifest")
        write_manifest(files)
        failpoint("save.after_manifest")


def load_checkpoint(path: Path, only: str = "") -> tuple[Tensors, dict[str, Any]]:
    """Load the tensors and state of a checkpoint (or one group) after verifying its hashes."""
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"{path}: has no {MANIFEST}, so it is not a complete checkpoint; remove that folder")
    hashes = _read_object(path / MANIFEST)
    for name in (STATE, f"{only or 'model'}.safetensors"):
        if name not in hashes:
            raise CheckpointError(f"{path / MANIFEST}: is damaged (it does not list {name})")
    wanted = [name for name in hashes if not only or name == STATE or Path(name).stem == only]
    for name in wanted:
        if not inside(path, name).is_file() or file_digest(path / name) != hashes[name]:
            raise CheckpointError(f"{path / name}: missing or damaged (its sha256 differs from {path / MANIFEST})")
    tensors = {}
    for name in wanted:
        if name.endswith(".safetensors"):
            try:
                tensors[Path(name).stem] = load_file(path / name)
            except SafetensorError as error:
                raise CheckpointError(f"{path / name}: is not a safetensors file ({error})") from error
    return tensors, _read_object(path / STATE)


def load_newest(folder: Path, only: str = "") -> tuple[Path, Tensors, dict[str, Any]] | None:
    """Load the newest intact checkpoint (or one group), warning about damaged ones; None if there is none."""
    damaged = []
    for path in reversed(steps_in(folder).values()):
        try:
            return path, *load_checkpoint(path, only)
        except (CheckpointError, OSError, ValueError) as error:
            damaged.append(str(error))
            logger.warning("checkpoint skipped: %s", error)
    if damaged:
        raise CheckpointError(f"{folder}: all checkpoints are damaged: {'; '.join(damaged)}; remove the run to restart")
    return None


def steps_in(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder by step, oldest first; warns about other entries."""
    paths = list(folder.glob("step-*"))
    found = by_step(path for path in paths if path.is_dir())
    for stray in set(paths) - set(found.values()):
        logger.warning("%s: is not a checkpoint (step-NUMBER); ignored", stray)
    return found


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    found = read_json(path.parent, path.name)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: is damaged (it does not hold a JSON object)")
    return found


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state as `parameter/exp_avg` and so on."""
    names, state = _names(optimizer, model), optimizer.state_dict()["state"]
    return {f"{names[i]}/{key}": value for i, entries in state.items() for key, value in entries.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Inverse of `optimizer_tensors`; learning rate and betas are kept."""
    position = {name: i for i, name in enumerate(_names(optimizer, model))}
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        if name in position:
            state.setdefault(position[name], {})[entry] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """The names of the optimizer's parameters, in its order."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return [known[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def check_never_saved(folder: Path) -> None:
    """Raise if the records mention checkpoints that no longer exist."""
    records = read_events(folder)[0] if (folder / METRICS).is_file() else []
    saved = [record["step"] for record in records if record.get("kind") == CHECKPOINT_KIND]
    if saved:
        lost = f"the run wrote checkpoints up to step {max(saved)}, but they are missing"
        raise CheckpointError(f"{folder / CHECKPOINTS}: {lost}; put them back, or remove the run to start afresh")
