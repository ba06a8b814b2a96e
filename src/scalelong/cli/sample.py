"""Sample images from a run into a PNG grid and an npz file; uses the run's sampling settings by default.

Example: scalelong sample runs/demo/cs-seed0 --num-samples 64 --seed 1

Example: scalelong sample runs/cifar --classes cat,dog,3 --guidance 2

Example: scalelong sample runs/emoji --prompt "a red apple" "a green apple" --num-samples 16 --guidance 4
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro

from scalelong.cli.arguments import RunFolder, SamplingFlags, parse_over_run
from scalelong.data.images import save_grid
from scalelong.evaluation.evaluate import load_condition, load_training_data
from scalelong.files import atomic_write, check_writable, inside
from scalelong.runs import SAMPLES
from scalelong.training import load_run
from scalelong.training.condition import Condition, choose_classes, choose_prompts


@dataclass(frozen=True)
class Sample:
    run: RunFolder  # the run's folder
    seed: int = 0
    first: int = 0  # index of the first image
    classes: str = ""  # sample these in turn: numbers, names or null, separated by commas; default: every class
    prompt: tuple[str, ...] = ()  # sample these texts in turn; "" is the null condition; default: captions of the data
    encoder: str = ""  # path of the text encoder; default: the run's own
    weights: str = "ema"  # ema, or model for the raw weights
    checkpoint: int | None = None  # step of the checkpoint; default: the newest
    out: str = ""  # path of the output, without suffix; default: RUN/samples/seedN
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    sampling: Annotated[SamplingFlags, tyro.conf.arg(name="")] = field(default_factory=SamplingFlags)


def main(arguments: list[str]) -> None:
    command = parse_over_run(Sample, arguments, prog="scalelong sample", description=__doc__)
    out = Path(command.out or inside(Path(command.run), SAMPLES, f"seed{command.seed}"))
    if out.suffix in (".png", ".npz"):
        out = out.with_suffix("")
    check_writable(out.parent)
    run = load_run(command.run, weights=command.weights, step=command.checkpoint, device=command.device)
    config, known, device = run.config, run.conditioning, torch.device(command.device)
    condition = Condition(device)
    if command.prompt:
        condition = choose_prompts(config, known, command.prompt, device, command.encoder)
    elif command.classes or config.condition.kind == "class":
        condition = choose_classes(config, known, command.classes.split(",") if command.classes else [], device)
    elif config.condition.kind == "text":
        condition = load_condition(run, load_training_data(run))
    indices = range(command.first, command.first + command.sampling.count)
    images = run.sample(command.sampling, condition, indices=indices, seed=command.seed)
    save_grid(images[:256], out.with_name(f"{out.name}.png"))
    arrays: dict[str, Any] = {"images": images.permute(0, 2, 3, 1).numpy()}
    if condition.name == "class_labels":
        arrays["labels"] = condition.for_samples(torch.tensor(indices))["class_labels"].cpu().numpy()
    if command.prompt:
        arrays["prompts"] = np.array([command.prompt[i % len(command.prompt)] for i in indices])
    with atomic_write(out.with_name(f"{out.name}.npz")) as file:
        np.savez_compressed(file, **arrays)
    print(f"{len(images)} images of step {run.step} ({command.weights}): {out}.png, {out}.npz")
