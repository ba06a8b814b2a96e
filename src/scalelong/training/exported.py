"""A run that was exported as a diffusers pipeline, read back: the same folder serves diffusers and us."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from scalelong import skips
from scalelong.data.base import Shape
from scalelong.runs.settings import Conditioning, RunConfig, ScalingSettings
from scalelong.runs.yaml_file import from_yaml, to_yaml
from scalelong.training.build import build_model
from scalelong.training.checkpoint import CheckpointError

DESCRIPTION = "scalelong_run.json"
CONFIG = "config.yaml"
DENOISER = "unet"
AUTOENCODER = "vae"
UVIT_PREFIX = "uvit."
_WEIGHTS = "diffusion_pytorch_model*.safetensors"


@dataclass(frozen=True)
class Description:
    """What a pipeline's own files do not say of the run it came from."""

    step: int
    weights: str  # ema or model
    shape: Shape  # of what is diffused
    folded: bool  # the coefficients are in the weights, no scaling is left
    data: str  # fingerprint of what it was trained on
    condition: Conditioning

    def write(self, folder: Path, config: RunConfig) -> None:
        """Beside the pipeline's files."""
        (folder / DESCRIPTION).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        (folder / CONFIG).write_text(to_yaml(config))


def is_exported(folder: Path) -> bool:
    """Whether a folder is a pipeline that we wrote."""
    return (folder / DESCRIPTION).is_file()


def read_exported(folder: Path) -> tuple[RunConfig, Description, nn.Module]:
    """The configuration, the description and the model with the weights in the folder."""
    try:
        stored: dict[str, Any] = json.loads((folder / DESCRIPTION).read_text())
        channels, height, width = stored.pop("shape")
        condition = Conditioning.from_state(stored.pop("condition"))
        description = Description(**stored, shape=(channels, height, width), condition=condition)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / DESCRIPTION}: is damaged ({error}); export the run again") from error
    config = from_yaml(folder / CONFIG)
    if description.folded:
        config = dataclasses.replace(config, scaling=ScalingSettings("none"))
    model = build_model(config, description.shape, description.condition)
    if description.folded:
        skips.remove(model)  # the weights in the folder know of no scaling
    try:
        model.load_state_dict(_weights(folder / DENOISER))
    except RuntimeError as error:
        raise CheckpointError(f"{folder / DENOISER}: holds weights of another model ({error})") from error
    if description.folded:
        skips.apply(model, config.scaling.method)
    return config, description, model


def _weights(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob(_WEIGHTS))
    if not files:
        raise CheckpointError(f"{folder}: holds no {_WEIGHTS}; export the run again")
    found: dict[str, Tensor] = {}
    for file in files:
        found |= load_file(file)
    return {name.removeprefix(UVIT_PREFIX): value for name, value in found.items()}
