"""Train a small autoencoder for latent diffusion, if you have no pretrained one.

Example: scalelong autoencoder train emoji32 --out runs/emoji-autoencoder --steps 200
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import torch
import tyro

from scalelong.cli.arguments import parse_subcommand
from scalelong.cli.data import DataFlags
from scalelong.training.autoencoder import GRID, AutoencoderSettings, train_autoencoder


@dataclass(frozen=True, kw_only=True)
class Train(DataFlags):
    """Train on a dataset and write a folder for `scalelong data encode --autoencoder`."""

    out: str  # output folder
    settings: Annotated[AutoencoderSettings, tyro.conf.arg(name="")] = field(default_factory=AutoencoderSettings)
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


def main(arguments: list[str]) -> None:
    """Train one."""
    flags = parse_subcommand({"train": Train}, arguments, "autoencoder", __doc__)
    trained = train_autoencoder(flags.load(), flags.out, flags.settings, flags.device)
    print(f"{trained.parameters:,} parameters, scaling factor {trained.scale:.4f}: {trained.folder}")
    print(f"PSNR {trained.psnr:.2f} dB over {trained.count} images, see {trained.folder / GRID}")
