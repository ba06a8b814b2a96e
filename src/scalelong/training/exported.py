"""Read and describe runs exported as diffusers pipelines: the folder loads in diffusers and as a run."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from scalelong import skips
from scalelong.backbones.autoencoder import Autoencoder, load_autoencoder
from scalelong.data import Shape
from scalelong.runs import CONFIG
from scalelong.runs.settings import Conditioning, RunConfig, ScalingSettings, from_yaml
from scalelong.training.build import build_model
from scalelong.training.checkpoint import CheckpointError

INDEX = "model_index.json"  # diffusers' names, except the next one
DESCRIPTION = "scalelong_run.json"
DENOISER = "unet"
AUTOENCODER = "vae"
_WEIGHTS = "diffusion_pytorch_model*.safetensors"


@dataclass(frozen=True)
class ExportedRun:
    """What the files of a pipeline do not say about its run; stored beside them."""

    step: int
    weights: str  # ema or model
    shape: Shape  # of what is diffused
    folded: bool  # the coefficients are in the weights
    data: str  # fingerprint of the training data
    condition: Conditioning


def is_exported(folder: Path) -> bool:
    return (folder / DESCRIPTION).is_file()


def read_exported(folder: Path) -> tuple[RunConfig, ExportedRun, nn.Module]:
    """The configuration, the description and the model of an exported pipeline."""
    try:
        stored: dict[str, Any] = json.loads((folder / DESCRIPTION).read_text())
        channels, height, width = stored["shape"]
        condition = Conditioning.from_state(stored["condition"])
        exported = ExportedRun(**{**stored, "shape": (channels, height, width), "condition": condition})
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / DESCRIPTION}: is damaged ({error}); export the run again") from error
    config = from_yaml(folder / CONFIG)
    if exported.folded:
        config = replace(config, scaling=ScalingSettings("none"))
    model = build_model(config, exported.shape, exported.condition)
    if exported.folded:
        skips.remove(model)  # folded weights have no state of a scaling
    files = sorted((folder / DENOISER).glob(_WEIGHTS))
    if not files:
        raise CheckpointError(f"{folder / DENOISER}: holds no {_WEIGHTS}; export the run again")
    weights = {name.removeprefix("uvit."): value for file in files for name, value in load_file(file).items()}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"{folder / DENOISER}: holds weights of another model ({error})") from error
    if exported.folded:
        skips.apply(model, config.scaling.method)
    return config, exported, model


def exported_autoencoder(folder: Path, device: torch.device) -> Autoencoder | None:
    """The autoencoder in an exported pipeline of latents; None for any other folder."""
    if not is_exported(folder) or not (folder / AUTOENCODER).is_dir():
        return None
    scale = float(json.loads((folder / INDEX).read_text())["latent_scale"])
    return load_autoencoder(folder / AUTOENCODER, device, scale)
