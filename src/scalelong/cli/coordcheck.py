"""`scalelong coordcheck`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro
from torch import nn

from scalelong.cli.arguments import PresetName
from scalelong.cli.open_model import from_config
from scalelong.files import check_writable
from scalelong.parametrization.coordinates import coordinate_check, plot
from scalelong.runs.presets import get_preset
from scalelong.runs.settings import ModelSettings, MupSettings, RunConfig
from scalelong.training.build import at_width


@dataclass(frozen=True)
class Coordcheck:
    """Check that activations keep their size as the network of a preset widens: in muP they do, else they do not.

    Trains it for a few steps at every width and fits the slope of log |activation| over log width for every module.

    Example: scalelong coordcheck digits-demo --out runs/coordinates
    """

    preset: PresetName  # as for train
    widths: tuple[int, ...] = ()  # default: five, up to 512 (uvit) or 160 (unet); the first is the base of muP
    depth: int = 2  # blocks of a U-ViT, levels of a UNet; widths compare alike at any depth. 0: the preset's
    steps: int = 3
    seeds: int | None = None  # default: 3 (uvit) or 6 (unet)
    lr: float | None = None  # default: 0.005 (uvit) or 0.001 (unet)
    verbose: bool = False  # print the slopes of every module
    out: str = "runs/coordinates"  # folder of the plot


def main(arguments: list[str]) -> None:
    """Check both parametrizations, print, plot."""
    command = tyro.cli(Coordcheck, args=arguments, prog="scalelong coordcheck")
    check_writable(Path(command.out))
    config = replace(get_preset(command.preset), mup=MupSettings())
    if command.depth:
        config = replace(config, model=shallow(config.model, command.depth))
    widths, unet = command.widths or default_widths(config), config.model.backbone == "unet"

    def make_model(width: int) -> nn.Module:
        seed = torch.initial_seed() % 2**31  # of the check: a run's weights are a function of its own
        training = replace(config.training, seed=seed)
        model = from_config(replace(config, model=at_width(config.model, width, "widths"), training=training))
        keep_group_sizes(model, width / config.model.channels[0] if unet else 1)
        return model

    usual_seeds, usual_lr = (6, 0.001) if unet else (3, 0.005)
    seeds = usual_seeds if command.seeds is None else command.seeds
    lr = usual_lr if command.lr is None else command.lr
    checks = [
        coordinate_check(make_model, widths, parametrization=kind, lr=lr, steps=command.steps, seeds=seeds)
        for kind in ("mup", "standard")
    ]
    for check in checks:
        lines = str(check).splitlines()
        print("\n".join([*lines, ""]) if command.verbose else f"{check.name:9} {lines[-1]}")
    folder = Path(command.out)
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{command.preset}: mean |activation| of every module"
    print(f"picture   {plot(checks, title, folder / f'coordinates-{command.preset}.png')}")
    if not checks[0].flat:
        raise ValueError("mup: not flat; widen --widths or raise --seeds, and look for the module with --verbose")


def shallow(settings: ModelSettings, depth: int) -> ModelSettings:
    """The network with fewer blocks, or with fewer levels of one layer each."""
    if settings.backbone == "uvit":
        return replace(settings, depth=depth)
    return replace(settings, channels=settings.channels[:depth], layers_per_block=1)


def keep_group_sizes(model: nn.Module, ratio: float) -> None:
    """Scale the number of groups with the width: of a few channels, a group norm cancels much of the mean."""
    for norm in (module for module in model.modules() if isinstance(module, nn.GroupNorm)):
        norm.num_groups = max(1, round(norm.num_groups * ratio))


def default_widths(config: RunConfig) -> tuple[int, ...]:
    if config.model.backbone == "unet":
        return (32, 64, 96, 128, 160)
    head = config.model.dim // config.model.heads
    return (32, 64, 128, 256, 512) if 32 % head == 0 else tuple(head * count for count in (1, 2, 4, 6, 8))
