"""Fit linear probes on the features of a run at every block and noise level; recorded in metrics.jsonl.

Block and level are selected on held-out training images; test accuracy is measured once.

Example: scalelong probe runs/cifar10-uvit-s2-cs-seed0

Example: scalelong probe runs/demo/cs-seed0 --levels 5 --no-floors
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import tyro

from scalelong.cli.arguments import RunFolder
from scalelong.evaluation.linear_probe import probe_run
from scalelong.runs.events import append_event
from scalelong.training import load_run


@dataclass(frozen=True)
class Probe:
    run: RunFolder  # the run's folder
    protocol: Literal["held-out", "ddae"] = "held-out"  # ddae: as published, with selection on the test images
    levels: int = 9  # number of noise levels
    blocks: tuple[str, ...] = ()  # module names; default: every block
    images: int = 10_000  # training images for selecting block and level; the final layer uses all
    floors: bool = True  # also probe an untrained network and the pixels
    cache: bool = True  # cache the features in the run folder
    weights: str = "ema"  # ema, or model for the raw weights
    checkpoint: int | None = None  # step of the checkpoint; default: the newest
    seed: int = 0  # of the noise and the split
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


def main(arguments: list[str]) -> None:
    command = tyro.cli(Probe, args=arguments, prog="scalelong probe", description=__doc__)
    run = load_run(command.run, weights=command.weights, step=command.checkpoint, device=command.device)
    options = {"blocks": command.blocks or None, "levels": command.levels, "images": command.images}
    found = probe_run(
        run, floors=command.floors, cache=command.cache, protocol=command.protocol, seed=command.seed, **options
    )
    append_event(run.folder, run.step, "linear_probe", found.record() | {"weights": run.weights})
    where = "test images, on which it was also selected" if command.protocol == "ddae" else "held-out training images"
    print(f"accuracy in % on {where}, by block and noise level (sigma / alpha):\n{found}\n")
    floors = {"an untrained network": found.random_network, "the pixels": found.pixels}
    below = "".join(f"; {name}: {100 * value:.2f}%" for name, value in floors.items() if value is not None)
    print(
        f"test accuracy {100 * found.accuracy:.2f}% ({found.block}, noise {found.level:.3g}, protocol {found.protocol}, "
        f"{found.n_train:,} training and {found.n_test:,} test images, step {run.step}, {found.seconds:.1f} s){below}"
    )
