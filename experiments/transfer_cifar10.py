"""Does the best learning rate move with width? U-ViT on CIFAR-10, muP and the standard parametrization.

    python experiments/transfer_cifar10.py rates      # widths 128 to 1024, ten rates; three seeds up to 512
    python experiments/transfer_cifar10.py kappas     # CS at widths 128 to 512 and three rates: does the best kappa transfer?
    python experiments/transfer_cifar10.py plot       # docs/assets/transfer-*.png and the tables, from the runs

For one GPU (an H200): depth 12, patch 4, batch 128, 4,000 steps. The same command again trains what is missing. --steps,
--widths and --seeds make it small, as the test does.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

from scalelong.runs.presets import get_preset
from scalelong.runs.settings import RunConfig
from scalelong.stability.transfer import RESULTS, Point, plot, run_transfer, summary, transfer_grid

RATES = tuple(2.0**power for power in range(-14, -4))
KAPPAS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SEEDED = 512  # widths up to this one have every seed, wider ones the first


def config(data: str, steps: int, batch_size: int, compile_mode: Literal["off", "default"]) -> RunConfig:
    preset = get_preset("cifar10-uvit-s2")
    return replace(
        preset,
        data=replace(preset.data, name=data),
        model=replace(preset.model, patch_size=4, dim=512, heads=8),  # heads of 64 at every width
        scaling=replace(preset.scaling, method="none"),
        optimizer=replace(preset.optimizer, betas=(0.9, 0.99), warmup_steps=max(1, steps // 10)),
        training=replace(
            preset.training,
            steps=steps,
            batch_size=batch_size,
            sample_every=0,
            checkpoint_every=steps,
            log_every=10,
            compile=compile_mode,
            keep=2,
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("what", choices=("rates", "kappas", "plot"))
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--compile", choices=("off", "default"), default="default")
    parser.add_argument("--runs", default="runs/transfer")
    parser.add_argument("--out", default="docs/assets")
    arguments = parser.parse_args()
    runs, preset = (
        Path(arguments.runs),
        config(arguments.data, arguments.steps, arguments.batch_size, arguments.compile),
    )
    if arguments.what == "plot":
        for name, over in (("rates", "lr"), ("kappas", "kappa")):
            if (runs / name / RESULTS).is_file():
                points = [Point(**each) for each in json.loads((runs / name / RESULTS).read_text())]
                print(summary(points, over))
                print(plot(points, Path(arguments.out) / f"transfer-{name}.png", over))
        return
    if arguments.what == "rates":
        grid = transfer_grid(preset, arguments.widths, arguments.rates, seeds=arguments.seeds)
        first = arguments.seeds[0]
        grid = {point: each for point, each in grid.items() if point.width <= SEEDED or point.seed == first}
    else:
        preset, widths = replace(preset, scaling=replace(preset.scaling, method="cs")), arguments.widths[:3]
        options = {"kappas": KAPPAS, "seeds": arguments.seeds}
        grid = transfer_grid(preset, widths, arguments.rates[3:6], parametrizations=("mup",), **options)
    print(summary(run_transfer(grid, runs / arguments.what), "lr" if arguments.what == "rates" else "kappa"))


if __name__ == "__main__":
    main()
