"""Draw images from a trained run, as a PNG grid and an npz; image i depends only on the seed and i.

Example: scalelong sample runs/demo/cs --num 64 --seed 1

Example: scalelong sample runs/cifar --classes cat,dog,3 --guidance 2

Example: scalelong sample runs/emoji --prompt "a red apple" "a green apple" --num 16 --guidance 4
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from scalelong.backbones import as_network
from scalelong.cli.arguments import RunFolder
from scalelong.data.images import save_grid
from scalelong.evaluation import generate
from scalelong.evaluation.run import condition_of, source_of
from scalelong.training import TrainedRun, load_run
from scalelong.training.condition import Condition, choose_classes, choose_prompts
from scalelong.training.run import pixels_of


@dataclass(frozen=True)
class Sample:
    """What is on the command line."""

    run: RunFolder  # the run's folder
    num: int = 64  # how many images
    seed: int = 0
    first: int = 0  # number of the first image
    classes: str = ""  # draw these in turn, numbers or names with commas between; default: every class
    prompt: tuple[str, ...] = ()  # draw these texts in turn; "" is the null condition; default: captions of the data
    encoder: str = ""  # where the text encoder is; default: the run's own
    guidance: float | None = None  # classifier-free guidance; default: the run's own
    guidance_interval: tuple[float, float] | None = None  # guide only at these noise levels; default: the run's own
    sampler: str = ""  # default: the run's own
    steps: int = 0  # 0: the run's own
    batch_size: int = 256
    weights: str = "ema"  # ema or model
    checkpoint: int | None = None  # the step of the checkpoint; default: the newest
    out: str = ""  # where to write; default: RUN/samples/seedN
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    precision: str = "fp32"  # of the network: fp32, bf16, fp16


def main(arguments: list[str]) -> None:
    """Load, draw, write."""
    command = tyro.cli(Sample, args=arguments, prog="scalelong sample", description=__doc__)
    if command.num < 1:
        raise ValueError(f"num: must be at least 1, got {command.num}")
    run = load_run(command.run, weights=command.weights, step=command.checkpoint, device=command.device)
    settings = run.config.sampling
    condition = _condition(run, command)
    guidance = settings.guidance if command.guidance is None else command.guidance
    interval = command.guidance_interval or settings.guidance_interval
    images = generate(
        run.objective,
        as_network(run.model),
        shape=run.shape,
        indices=range(command.first, command.first + command.num),
        seed=command.seed,
        batch_size=command.batch_size,
        sampler=command.sampler or settings.sampler,
        steps=command.steps or (0 if command.sampler else settings.steps),
        clip=settings.clip,
        device=command.device,
        precision=command.precision,
        condition=condition.of_drawn,
        guidance=condition.guidance(guidance, interval),
        to_pixels=pixels_of(run, torch.device(command.device)),
    )
    out = Path(command.out or run.folder / "samples" / f"seed{command.seed}")
    out.parent.mkdir(parents=True, exist_ok=True)
    save_grid(images[:256], out.with_name(f"{out.name}.png"))
    np.savez_compressed(
        out.with_name(f"{out.name}.npz"), images=images.permute(0, 2, 3, 1).numpy(), **_told(condition, command)
    )
    print(f"{len(images)} images of step {run.step} ({command.weights}): {out}.png, {out}.npz")


def _condition(run: TrainedRun, command: Sample) -> Condition:
    """What is chosen on the command line, else the classes in turn, else captions of the data."""
    device = torch.device(command.device)
    if command.prompt:
        return choose_prompts(run.config, run.sizes, command.prompt, device, command.encoder)
    if command.classes or run.config.condition.kind == "class":
        chosen = command.classes.split(",") if command.classes else []
        return choose_classes(run.config, run.sizes, chosen, device)
    return condition_of(run, source_of(run)) if run.config.condition.kind == "text" else Condition(device)


def _told(condition: Condition, command: Sample) -> dict[str, Any]:
    """What each image was drawn for, to lie beside the images."""
    index = torch.arange(command.first, command.first + command.num)
    if condition.name == "class_labels":
        return {"labels": condition.of_drawn(index)["class_labels"].cpu().numpy()}
    return {"prompts": np.array([command.prompt[i % len(command.prompt)] for i in index])} if command.prompt else {}
