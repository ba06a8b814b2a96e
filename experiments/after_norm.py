"""Does it matter on which side of the GroupNorm kappa acts? A UNet unscaled, with CS before its norms (as the paper scales,
where most blocks cancel kappa but for their shortcut) and with CS after them (kappa acts in full), over seeds.

python experiments/after_norm.py                           # a small one on Fashion-MNIST, minutes on one core
python experiments/after_norm.py --scale gpu --jobs 3      # DDPM's UNet on CIFAR-10
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

import matplotlib.pyplot as plt
import torch
import tyro
from common import Options, measures, trained
from output import dress, print_table, save, write_csv, write_summary
from probe_loss import fixed_loss

import scalelong
from scalelong.data import load_source
from scalelong.report.colours import PALETTE
from scalelong.report.numbers import running_mean
from scalelong.runs.reader import Run
from scalelong.training import RunConfig, get_preset
from scalelong.training.build import build_model

NAME = "after-norm"
VARIANTS: dict[str, tuple[str, Literal["before", "after_norm"]]] = {
    "none": ("none", "before"),
    "cs before the norm": ("cs", "before"),
    "cs after the norm": ("cs", "after_norm"),
}
COLOURS = {variant: light for variant, (light, _) in zip(VARIANTS, PALETTE[1:], strict=False)}
MEASURES = ("final_loss", "test_loss", "oscillation_all_blocks", "gradient_oscillation", "gradient_norm_spread")


@dataclass(frozen=True)
class AfterNorm(Options):
    """All options."""

    steps: int = 0  # of each run; 0: 300 (cpu) or 800 (gpu)
    kappa: float = 0.5


def main() -> None:
    options = tyro.cli(AfterNorm, description=__doc__)
    out = options.folder(NAME)
    asked = [(variant, seed) for seed in options.seeds for variant in VARIANTS]
    configs = [unet_config(options, *each) for each in asked]
    shape = load_source(configs[0].data.name, split="test").shape  # missing data is refused before any work
    runs: dict[str, list[Run]] = {variant: [] for variant in VARIANTS}
    rows = []
    for (variant, _), run in zip(asked, trained(configs, options), strict=True):
        runs[variant].append(run)
        test_loss = fixed_loss(run.folder, split="test")
        rows.append({"variant": variant, "reach": reach(run.config, shape), **measures(run), "test_loss": test_loss})
    write_csv(rows, out / "runs.csv")
    table = averages(rows)
    training, model = configs[0].training, configs[0].model
    setup = (
        f"UNet {model.channels} on {configs[0].data.name}, kappa = {options.kappa:g}, {training.steps} steps, "
        f"batch {training.batch_size}"
    )
    write_summary(out, [], setup, table=table)
    draw(runs, rows, setup, out / "after_norm.png")
    print_table(table)


def unet_config(options: AfterNorm, variant: str, seed: int) -> RunConfig:
    """The CIFAR-10 UNet of DDPM, or one a CPU can train."""
    gpu = options.scale == "gpu"
    base, steps = get_preset("cifar10-unet"), options.steps or (800 if gpu else 300)
    method, placement = VARIANTS[variant]
    training = dataclasses.replace(
        base.training,
        steps=steps,
        batch_size=64 if gpu else 16,
        seed=seed,
        compile="default" if gpu else "off",
        log_every=10,
        checkpoint_every=steps,
        sample_every=0,
    )
    return dataclasses.replace(
        base,
        data=base.data if gpu else dataclasses.replace(base.data, name="fashion_mnist"),
        model=base.model if gpu else dataclasses.replace(base.model, channels=(32, 32, 64)),
        scaling=dataclasses.replace(base.scaling, method=method, kappa=options.kappa, placement=placement),
        optimizer=dataclasses.replace(base.optimizer, warmup_steps=steps // 10),
        training=training,
    )


def reach(config: RunConfig, shape: tuple[int, int, int]) -> str:
    """How far kappa reaches on the skips of this configuration's network, measured on it."""
    model = build_model(config, shape)
    if config.scaling.placement == "after_norm":
        counts = Counter(
            "full" if skip.after_norm else skip.reach for skip in scalelong.skips.hooks.attached_skips(model)
        )
    else:
        x, t = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)), torch.tensor([37])
        counts = Counter(skip.reach for skip in scalelong.find_skips(model, x, t))
    return " ".join(f"{kind}:{count}" for kind, count in sorted(counts.items()))


def averages(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean ± sd over seeds, and of the differences from the unscaled run of the same seed, which saw the same images."""
    plain = {row["seed"]: row for row in rows if row["variant"] == "none"}
    table = []
    for variant in VARIANTS:
        mine = [row for row in rows if row["variant"] == variant]
        for key in MEASURES:
            differences = [row[key] - plain[row["seed"]][key] for row in mine]
            cells = {"mean": mean_and_sd([row[key] for row in mine]), "minus none": mean_and_sd(differences)}
            table.append({"variant": variant, "reach": mine[0]["reach"], "measure": key, **cells})
    return table


def mean_and_sd(values: Sequence[float]) -> str:
    """One seed has no spread."""
    return f"{fmean(values):.5f}" + (f" ± {stdev(values):.5f}" if len(values) > 1 else "")


def draw(runs: dict[str, list[Run]], rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Loss against the unscaled run's, gradient norms, and oscillation; a band spans the seeds."""
    figure, (loss, gradient, bars) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    plain = [run.column("train", "loss")[1] for run in runs["none"]]
    width = 0.8 / len(VARIANTS)
    groups = {
        "oscillation_all_blocks": "features move",
        "gradient_oscillation": "gradients move",
        "gradient_norm_spread": "gradient norm\nspreads",
    }
    for at, (variant, colour) in enumerate(COLOURS.items()):
        losses = [run.column("train", "loss")[1] for run in runs[variant]]
        steps = runs[variant][0].column("train", "loss")[0]
        apart = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(losses, plain, strict=True)]
        band(loss, steps, [running_mean(steps, each, window=200) for each in apart], colour, variant)
        band(gradient, steps, [run.column("train", "gradient_norm")[1] for run in runs[variant]], colour, variant)
        for group, key in enumerate(groups):
            found = [row[key] for row in rows if row["variant"] == variant]
            place = group + (at - 1) * width
            bars.bar(place, fmean(found), width * 0.92, color=colour)
            bars.plot([place] * len(found), found, "o", color="black", markersize=3)
    bars.set_xticks(range(len(groups)), list(groups.values()))
    dress(loss, "Training loss minus the unscaled run's (same seed)", "step")
    dress(gradient, "Gradient norm", "step")
    dress(bars, "Restlessness after the warm-up, dots: seeds", "")
    gradient.set_yscale("log")
    loss.legend(frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=9)
    save(figure, path)


def band(axes: plt.Axes, steps: list[int], values: list[list[float]], colour: str, label: str) -> None:
    """The mean over seeds, and from the lowest to the highest."""
    columns = list(zip(*values, strict=True))
    axes.fill_between(
        steps, [min(c) for c in columns], [max(c) for c in columns], color=colour, alpha=0.15, linewidth=0
    )
    axes.plot(steps, [fmean(c) for c in columns], color=colour, linewidth=1.3, label=label)


if __name__ == "__main__":
    main()
