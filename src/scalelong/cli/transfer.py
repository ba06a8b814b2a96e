"""`scalelong transfer`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from scalelong.cli.arguments import PresetName
from scalelong.runs.presets import get_preset
from scalelong.stability.transfer import PARAMETRIZATIONS, RESULTS, plot, run_transfer, summary, transfer_grid


@dataclass(frozen=True)
class Transfer:
    """Train a preset at several widths and learning rates, in muP and standard parametrization, and compare the best rates.

    The first width is the muP base. Runs are kept below --out; run again to train missing ones.

    Example: scalelong transfer digits-demo --widths 32 64 128 --rates 1e-3 4e-3 1.6e-2 --steps 100
    """

    preset: PresetName  # as for train
    widths: tuple[int, ...] = (128, 256, 512, 1024)
    rates: tuple[float, ...] = tuple(2.0**power for power in range(-14, -4))
    kappas: tuple[float, ...] = ()  # also sweep these values of kappa; default: the preset's
    seeds: tuple[int, ...] = (0,)
    parametrizations: tuple[str, ...] = PARAMETRIZATIONS
    steps: int = 0  # 0: the preset's
    batch_size: int = 0  # 0: the preset's
    method: str = ""  # scaling method; default: the preset's
    out: str = ""  # output folder; default: runs/transfer-PRESET


def main(arguments: list[str]) -> None:
    """Train, summarize, plot."""
    command = tyro.cli(Transfer, args=arguments, prog="scalelong transfer")
    preset, out = get_preset(command.preset), Path(command.out or f"runs/transfer-{command.preset}")
    training = preset.training
    steps, size = command.steps or training.steps, command.batch_size or training.batch_size
    warmup = min(preset.optimizer.warmup_steps, max(1, steps // 10))
    preset = replace(
        preset,
        scaling=replace(preset.scaling, method=command.method or preset.scaling.method),
        optimizer=replace(preset.optimizer, warmup_steps=warmup),
        training=replace(training, steps=steps, batch_size=size, sample_every=0, checkpoint_every=steps, log_every=10),
    )
    grid = transfer_grid(
        preset, command.widths, command.rates, kappas=command.kappas, seeds=command.seeds,
        parametrizations=command.parametrizations,
    )  # fmt: skip
    points = run_transfer(grid, out)
    for over in ("lr", "kappa") if command.kappas else ("lr",):
        print(summary(points, over))
        print(f"picture  {plot(points, out / f'transfer-{over}.png', over)}")
    print(f"numbers  {out / RESULTS}")
