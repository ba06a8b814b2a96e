"""`scalelong export`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import tyro

from scalelong.cli.arguments import RunFolder


@dataclass(frozen=True)
class Export:
    """Export a model from a run, with a model card: its weights for this package, or a pipeline that diffusers loads.

    Example: scalelong export runs/demo/cs --out exported/digits-cs

    Example: scalelong export runs/demo/cs --format diffusers --out exported/digits-pipeline
    """

    run: RunFolder  # the run's folder
    format: Literal["scalelong", "diffusers"] = "scalelong"  # weights and gates, or a pipeline folder
    out: str = ""  # default: RUN/export, or RUN/pipeline
    weights: str = "ema"  # ema or model
    checkpoint: int | None = None  # the step of the checkpoint; default: the newest
    sampler: str = ""  # the pipeline's: ddim, ddpm, dpm++2m, dpm++3m or heun; default: the run's, or dpm++2m


def main(arguments: list[str]) -> None:
    """Export and print where to and how to load it."""
    command = tyro.cli(Export, args=arguments, prog="scalelong export")
    from scalelong.pipelines import export_pipeline, export_weights
    from scalelong.training import load_run

    if command.sampler and command.format != "diffusers":
        raise ValueError(f"sampler: weights have none, got {command.sampler!r}; omit it or use --format diffusers")
    run = load_run(command.run, weights=command.weights, step=command.checkpoint)
    if command.format == "scalelong":
        print(f"step {run.step} ({run.weights}): {export_weights(run, command.out or run.folder / 'export')}")
        return
    exported = export_pipeline(run, command.out or run.folder / "pipeline", command.sampler)
    print(f"step {run.step} ({run.weights}): {exported.folder}; load it with\n\n{exported.loading()}\n")
    if exported.needs_us:
        print(f"Loading requires scalelong, since the scaling is not in the weights ({exported.needs_us})")
