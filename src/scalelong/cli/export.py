"""Take a model out of a run, with a model card: for this package, or as a pipeline that diffusers loads.

Example: scalelong export runs/demo/cs --out exported/digits-cs

Example: scalelong export runs/demo/cs --format diffusers --out exported/digits-pipeline
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

import scalelong
from scalelong.cli.arguments import RunFolder
from scalelong.pipelines import export_pipeline
from scalelong.report import read_run
from scalelong.report.card import model_card, pipeline_card
from scalelong.runs import CONFIG
from scalelong.training import TrainedRun, load_run


@dataclass(frozen=True)
class Export:
    """What is on the command line."""

    run: RunFolder  # the run's folder
    format: Literal["scalelong", "diffusers"] = "scalelong"  # weights and gates, or a pipeline folder
    out: str = ""  # default: RUN/export, or RUN/pipeline
    weights: str = "ema"  # ema or model
    checkpoint: int | None = None  # the step of the checkpoint; default: the newest


def main(arguments: list[str]) -> None:
    """Load, save, describe."""
    command = tyro.cli(Export, args=arguments, prog="scalelong export", description=__doc__)
    run = load_run(command.run, weights=command.weights, step=command.checkpoint)
    if command.format == "diffusers":
        _export_pipeline(run, command)
        return
    card = model_card(read_run(run.folder), run.step, command.weights, run.shape, run.conditioning)
    out = scalelong.save(run.model, command.out or run.folder / "export")
    shutil.copy(run.folder / CONFIG, out / CONFIG)
    (out / "README.md").write_text(card)
    print(f"step {run.step} ({command.weights}): {out}")


def _export_pipeline(run: TrainedRun, command: Export) -> None:
    out = Path(command.out or run.folder / "pipeline")
    card = pipeline_card(read_run(run.folder), run.step, command.weights)
    exported = export_pipeline(run, out, command.weights, card)
    print(f"step {run.step} ({command.weights}): {out}; load it with\n\n{exported.loading()}\n")
    if exported.needs_us:
        print(f"Loading it needs scalelong, since the scaling is not in the weights ({exported.needs_us})")
