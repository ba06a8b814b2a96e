"""Class-conditional training with none, cs and ls: the distance to the data with guidance, and a grid by class.

python experiments/conditional_cifar10.py                           # 8x8 digits, minutes on one core; not FID
python experiments/conditional_cifar10.py --scale gpu --jobs 3      # U-ViT-S/2 on CIFAR-10, about 6 minutes on an H200
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from common import Options, base_config, compared, setting
from output import Claim, beats, print_claims, print_table, save, write_csv, write_summary
from torch import Tensor

from scalelong.evaluation import evaluate_run, get_extractor, reference_statistics
from scalelong.evaluation.evaluate import Evaluation, load_condition, load_training_data
from scalelong.runs.settings import ConditionSettings, SamplingSettings
from scalelong.training import RunConfig, TrainedRun
from scalelong.training.condition import choose_classes

NAME = "conditional"
PER_CLASS = 8


@dataclass(frozen=True)
class Conditional(Options):
    """All options."""

    seeds: tuple[int, ...] = (0,)
    methods: tuple[str, ...] = ("none", "cs:0.5", "ls")
    guidance: tuple[float, ...] = (1.5,)  # evaluated with each of these; the grid uses the last
    images: int = 0  # to measure; 0: 500 (cpu) or 10,000 (gpu)
    sampler_steps: int = 25
    weights: str | None = None  # the Inception's file (gpu); default: fetched and verified


def main() -> None:
    options = tyro.cli(Conditional, description=__doc__)
    out = options.folder(NAME)
    base = conditional_config(options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = compared(base, options.methods, options, device)
    rows = [
        row(name, series.final_loss(), evaluation)
        for name, (series, run) in found.items()
        for evaluation in evaluations(run, options, device)
    ]
    write_csv(rows, out / "quality.csv")
    sampled = {name: by_class(run, options, device) for name, (_, run) in found.items()}
    draw(sampled, next(iter(found.values()))[1].conditioning.class_names[:10], out / "grid.png")
    claims = [claim(rows, scale) for scale in options.guidance]
    setup = f"class-conditional, drop {base.condition.drop}; {setting(base)}; dpm++2m, {options.sampler_steps} steps"
    write_summary(out, claims, setup, table=rows)
    print_claims(claims)
    print()
    print_table(rows)


def conditional_config(options: Conditional) -> RunConfig:
    """The experiments' network with a class token, and its share of samples without one."""
    base = base_config(options.scale, options.steps or (3000 if options.scale == "gpu" else 400))
    sampling = SamplingSettings("dpm++2m", steps=options.sampler_steps)
    return dataclasses.replace(base, condition=ConditionSettings("class", drop=0.1), sampling=sampling)


def evaluations(run: TrainedRun, options: Conditional, device: torch.device) -> list[Evaluation]:
    """One for each guidance, against the training data."""
    gpu = options.scale == "gpu"
    extractor = get_extractor("inception" if gpu else "random-conv", device, options.weights)
    source = load_training_data(run)
    reference = reference_statistics(source, extractor, root=run.config.data.root)
    condition = load_condition(run, source)
    sampling = dataclasses.replace(
        run.config.sampling,
        count=options.images or (10_000 if gpu else 500),
        batch_size=1000 if gpu else 100,
        precision="bf16" if gpu else "fp32",
    )
    return [
        evaluate_run(run, extractor, reference, dataclasses.replace(sampling, guidance=scale), condition=condition)
        for scale in options.guidance
    ]


def row(name: str, loss: float, evaluation: Evaluation) -> dict[str, Any]:
    """One line of the table."""
    result = evaluation.result
    return {
        "run": name,
        "guidance": evaluation.sampling.guidance,
        "metric": result.metric,
        "value": result.value,
        "images": result.n,
        "extractor": result.extractor,
        "final_loss": loss,
        "seconds_drawing": evaluation.generate_seconds,
    }


def claim(rows: Sequence[dict[str, Any]], scale: float) -> Claim:
    """Whether both of the paper's methods beat the unscaled network here."""
    values = {each["run"]: each["value"] for each in rows if each["guidance"] == scale}
    listed = "; ".join(f"{name} {value:.2f}" for name, value in values.items())
    return Claim(
        "class-conditional generation with CS and with LS has a lower FID than without scaling (Table 1, ImageNet 64)",
        f"{rows[0]['metric']} of {rows[0]['images']:,} images with guidance {scale:g}: {listed}",
        beats(values, lower=True),
    )


def by_class(run: TrainedRun, options: Conditional, device: torch.device) -> Tensor:
    """PER_CLASS images of each of the first ten classes, (classes * PER_CLASS, C, H, W); the same noise for every run."""
    classes = min(10, run.conditioning.num_classes)
    condition = choose_classes(run.config, run.conditioning, [str(number) for number in range(classes)], device)
    sampling = dataclasses.replace(
        run.config.sampling, sampler="dpm++2m", steps=options.sampler_steps, guidance=options.guidance[-1]
    )
    return run.sample(sampling, condition, indices=range(classes * PER_CLASS))


def draw(images: dict[str, Tensor], names: Sequence[str], path: Path) -> None:
    """A block of rows for each run: one row for each class, its name on the left."""
    figure, axes = plt.subplots(1, len(images), figsize=(4.2 * len(images), 0.55 * len(names) + 0.5), squeeze=False)
    for position, (title, sampled) in enumerate(images.items()):
        framed = F.pad(sampled, [1, 1, 1, 1], value=255)
        grid = framed.view(PER_CLASS, len(names), *framed.shape[1:]).permute(1, 3, 0, 4, 2)  # class, H, turn, W, C
        rows, height, turns, width, channels = grid.shape
        picture = grid.reshape(rows * height, turns * width, channels).numpy()
        panel = axes[0, position]
        panel.imshow(picture if channels == 3 else picture[..., 0], cmap="gray", interpolation="nearest")
        panel.set_title(title, fontsize=10, loc="left")
        panel.set_xticks([])
        panel.set_yticks((np.arange(rows) + 0.5) * height, names if position == 0 else [], fontsize=8)
        panel.tick_params(length=0)
        for spine in panel.spines.values():
            spine.set_visible(False)
    figure.tight_layout()
    save(figure, path)


if __name__ == "__main__":
    main()
