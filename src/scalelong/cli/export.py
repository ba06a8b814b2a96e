"""Take a model out of a run: weights and gates as safetensors, the configuration, and a model card.

Example: scalelong export runs/demo/cs --out exported/digits-cs
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import tyro

import scalelong
from scalelong.report import read_run
from scalelong.report.card import model_card
from scalelong.training import load_run


@dataclass(frozen=True)
class Export:
    """What is on the command line."""

    run: tyro.conf.Positional[str]  # the run's folder
    out: str = ""  # default: RUN/export
    weights: str = "ema"  # ema or model
    checkpoint: int | None = None  # the step of the checkpoint; default: the newest


def main(arguments: list[str]) -> None:
    """Load, save, describe."""
    command = tyro.cli(Export, args=arguments, prog="scalelong export", description=__doc__)
    run = load_run(command.run, weights=command.weights, step=command.checkpoint)
    card = model_card(read_run(run.folder), run.step, command.weights, run.shape)
    out = scalelong.save(run.model, command.out or run.folder / "export")
    shutil.copy(run.folder / "config.yaml", out / "config.yaml")
    (out / "README.md").write_text(card)
    print(f"step {run.step} ({command.weights}): {out}")
