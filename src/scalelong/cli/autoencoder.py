"""Train a small autoencoder for latent diffusion, if you have no pretrained one.

Example: scalelong autoencoder train emoji32 --out runs/emoji-autoencoder --steps 200
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import torch
import tyro

from scalelong.cli import DataName
from scalelong.data import load_source
from scalelong.training.autoencoder import GRID, AutoencoderSettings, train_autoencoder


@dataclass(frozen=True)
class Train:
    """Train on a data set and write the folder that `scalelong data encode --autoencoder` takes."""

    name: DataName  # a data set, as `scalelong data list` names them
    out: str  # the folder to write
    settings: Annotated[AutoencoderSettings, tyro.conf.arg(name="")] = field(default_factory=AutoencoderSettings)
    image_size: int | None = None  # crop and resize to this
    split: str = "train"
    root: str | None = None  # cache folder; default: $SCALELONG_DATA or the user's cache
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


def main(arguments: list[str]) -> None:
    """Train one."""
    commands = tyro.extras.SubcommandApp()
    commands.command(name="train")(_train)
    commands.cli(prog="scalelong autoencoder", description=__doc__, args=arguments)


def _train(command: Annotated[Train, tyro.conf.arg(name="")]) -> None:
    """Train on a data set and write the folder that `scalelong data encode --autoencoder` takes."""
    source = load_source(command.name, image_size=command.image_size, split=command.split, root=command.root)
    trained = train_autoencoder(source, command.out, command.settings, command.device)
    print(f"{trained.parameters:,} parameters, scaling factor {trained.scale:.4f}: {trained.folder}")
    print(
        f"PSNR {trained.psnr:.2f} dB over {trained.count} images; originals and reconstructions: {trained.folder / GRID}"
    )
