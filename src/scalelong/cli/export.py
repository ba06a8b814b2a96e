"""`scalelong export`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import tyro

from scalelong.cli.arguments import RunFolder


@dataclass(frozen=True)
class Export:
    """Export a run with a model card: weights for scalelong, or a diffusers pipeline.

    Example: scalelong export runs/demo/cs-seed0 --out exported/digits-cs

    Example: scalelong export runs/demo/cs-seed0 --format diffusers --out exported/digits-pipeline

    Example: scalelong export runs/demo/cs-seed0 --out exported/digits-cs --push-to-hub me/digits-cs --private
    """

    run: RunFolder  # the run's folder
    format: Literal["scalelong", "diffusers"] = "scalelong"  # weights and gates, or a pipeline folder
    out: str = ""  # default: RUN/export, or RUN/pipeline
    weights: str = "ema"  # ema or model
    checkpoint: int | None = None  # the step of the checkpoint; default: the newest
    sampler: str = ""  # sampler of the pipeline; default: the run's
    plain: bool = False  # pure diffusers pipeline without code, for unconditional UNets; its scheduler rounds times
    push_to_hub: str = ""  # also upload the folder to this Hugging Face repository (USER/NAME)
    private: bool = False  # with --push-to-hub: create a private repository


def main(arguments: list[str]) -> None:
    """Export, and print how to load it."""
    command = tyro.cli(Export, args=arguments, prog="scalelong export")
    from scalelong.pipelines import export_pipeline, export_weights
    from scalelong.pipelines.hub import check_repository, push_to_hub
    from scalelong.training import load_run

    if (command.sampler or command.plain) and command.format != "diffusers":
        what = f"sampler: weights have none, got {command.sampler!r}" if command.sampler else "plain: is for pipelines"
        raise ValueError(f"{what}; omit it or use --format diffusers")
    if command.push_to_hub:
        check_repository(command.push_to_hub)
    run = load_run(command.run, weights=command.weights, step=command.checkpoint)
    if command.format == "scalelong":
        folder = export_weights(run, command.out or run.folder / "export")
        print(f"step {run.step} ({run.weights}): {folder}")
    else:
        exported = export_pipeline(run, command.out or run.folder / "pipeline", command.sampler, plain=command.plain)
        folder = exported.folder
        print(f"step {run.step} ({run.weights}), sampled by {exported.sampler}: {folder}; load it with")
        print(f"\n{exported.loading()}\n")
        if exported.needs_us:
            print(f"Loading requires scalelong, since the scaling could not be folded ({exported.needs_us})")
    if command.push_to_hub:
        print(f"uploaded to {push_to_hub(folder, command.push_to_hub, private=command.private)}")
