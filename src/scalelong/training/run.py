"""A run as a folder: what may be written where, and how a trained model is read back."""

from __future__ import annotations

import fcntl
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch
from torch import nn

from scalelong.data import Shape, to_uint8
from scalelong.diffusion import Objective
from scalelong.runs.events import CHECKPOINT_KIND, METRICS, read_events
from scalelong.runs.settings import MAY_CHANGE, Conditioning, RunConfig, differences
from scalelong.runs.yaml_file import from_yaml, to_yaml
from scalelong.skips.persistence import SCALING_NAME
from scalelong.training.build import ToPixels, build_model, build_objective, build_pixels
from scalelong.training.checkpoint import CheckpointError, list_checkpoints, load_checkpoint
from scalelong.training.exported import exported_autoencoder, is_exported, read_exported

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
SAMPLES = "samples"
LOCK = ".lock"


def claim_folder(folder: Path, config: RunConfig, checkpoint_bytes: int) -> IO[str]:
    """Make `folder` this run's, or refuse before any work: another configuration, another process, no permission, no space.

    What is returned keeps other processes out until it is closed or the process dies.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out: {folder} is a file; choose a folder")
    if (folder / CONFIG).is_file():
        _check_same(folder, config)
    elif folder.is_dir() and any(path.name != LOCK for path in folder.iterdir()):
        raise ValueError(f"out: {folder} is not empty and holds no {CONFIG}; choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PermissionError(
            f"out: cannot make {folder}: {error.strerror}; choose a folder you may write to"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"out: no permission to write to {folder}; choose another folder")
    needed = checkpoint_bytes * (config.training.keep + 1)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"out: {folder} has {free / 1e9:.1f} GB free; {config.training.keep} checkpoints and one being written need "
            f"{needed / 1e9:.1f} GB; free some space, or choose another disk"
        )
    lock = _lock_folder(folder)
    reached = [int(path.name.removeprefix("step-")) for path in list_checkpoints(folder / CHECKPOINTS)]
    if config.training.steps >= max(reached, default=0):  # else it is complete, and stays what it is
        staged = folder / f".{CONFIG}"
        staged.write_text(to_yaml(config))
        staged.replace(folder / CONFIG)
    return lock


def _lock_folder(folder: Path) -> IO[str]:
    handle = (folder / LOCK).open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise RuntimeError(f"out: another process is training into {folder}; wait for it or stop it") from None
    return handle


def check_never_saved(folder: Path) -> None:
    """A run without checkpoints may start at step 0 only if it never wrote one: a missing one must not go unnoticed."""
    if not (folder / METRICS).is_file():
        return
    saved = [record["step"] for record in read_events(folder)[0] if record.get("kind") == CHECKPOINT_KIND]
    if saved:
        raise CheckpointError(
            f"{folder / CHECKPOINTS}: the run wrote checkpoints up to step {max(saved)}, but none is there; put them back, "
            "or remove the run's folder to start afresh"
        )


def _check_same(folder: Path, config: RunConfig) -> None:
    if not (folder / METRICS).is_file() and not list_checkpoints(folder / CHECKPOINTS):
        return  # it never began
    changed = {k: v for k, v in differences(from_yaml(folder / CONFIG), config).items() if k not in MAY_CHANGE}
    if changed:
        lines = "\n".join(f"  {key}: {old!r} there, {new!r} asked for" for key, (old, new) in changed.items())
        raise ValueError(f"out: {folder} holds a run of another configuration:\n{lines}\nchoose another folder")


@dataclass(frozen=True)
class TrainedRun:
    """A trained model and what is needed to draw from it."""

    folder: Path
    config: RunConfig
    model: nn.Module
    objective: Objective
    shape: Shape
    step: int
    sizes: Conditioning = field(default_factory=Conditioning)  # of what the network is told
    data: str = ""  # fingerprint of what it was trained on
    weights: str = "ema"  # averaged, or "model": as trained


def load_run(
    folder: str | Path, *, weights: str = "ema", step: int | None = None, device: str | torch.device = "cpu"
) -> TrainedRun:
    """The model of a run, averaged ("ema") or as trained ("model"), at its newest or at a given checkpoint.

    A pipeline that `scalelong export --format diffusers` wrote is a run too, of the one model that it holds.
    """
    folder = Path(folder)
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: {device} is asked for, but torch sees no GPU here; use cpu")
    if is_exported(folder):
        return _load_exported(folder, weights, step, device)
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(
            f"{folder}: is no run (it holds no {CONFIG}); give the folder that scalelong train wrote"
        )
    if weights not in ("ema", "model"):
        raise ValueError(f"weights: must be ema or model, got {weights!r}")
    found = {int(path.name.removeprefix("step-")): path for path in list_checkpoints(folder / CHECKPOINTS)}
    if not found and (folder / SCALING_NAME).is_file():
        raise CheckpointError(
            f"{folder}: holds weights for scalelong.load, and no run; draw from the run itself, or from what "
            "scalelong export --format diffusers writes"
        )
    if not found:
        raise CheckpointError(f"{folder}: holds no checkpoint yet; the run has not reached its first")
    if step is not None and step not in found:
        raise ValueError(f"step: there is no checkpoint at {step}; there are {', '.join(map(str, found))}")
    chosen = max(found) if step is None else step
    checkpoint = load_checkpoint(found[chosen], only=(weights,))
    config = from_yaml(folder / CONFIG)
    channels, height, width = checkpoint.state["shape"]
    sizes = Conditioning.from_state(checkpoint.state.get("condition"))
    model = build_model(config, (channels, height, width), sizes)
    model.load_state_dict(checkpoint.tensors[weights])
    model.to(device).eval().requires_grad_(False)
    shape, data = (channels, height, width), checkpoint.state["data"]
    return TrainedRun(folder, config, model, build_objective(config), shape, chosen, sizes, data, weights)


def pixels_of(run: TrainedRun, device: torch.device) -> ToPixels:
    """How what the run draws becomes images; an export of a model of latents has its autoencoder in the folder."""
    autoencoder = exported_autoencoder(run.folder, device)
    if autoencoder is not None:
        return lambda latents: to_uint8(autoencoder.decode(latents))
    return build_pixels(run.config, device, run.data)


def _load_exported(folder: Path, weights: str, step: int | None, device: str | torch.device) -> TrainedRun:
    config, found, model = read_exported(folder)
    if weights == "model" and found.weights != "model":
        raise ValueError(f"weights: {folder} holds the averaged ones only; the run itself holds those as trained")
    if step not in (None, found.step):
        raise ValueError(f"step: {folder} is of step {found.step}, not {step}")
    model.to(device).eval().requires_grad_(False)
    about = (found.shape, found.step, found.condition, found.data, found.weights)
    return TrainedRun(folder, config, model, build_objective(config), *about)
