"""Which kappa: the interval of the paper's Sec. 4.1 from a preset's data, noise and number of skips, and one value in it.

Example: scalelong kappa digits-demo --out runs/kappa
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
import tyro

from scalelong import find_skips
from scalelong.data import load_source
from scalelong.data.base import Shape
from scalelong.diffusion import get_process
from scalelong.stability.kappa import Recommendation, recommend_kappa, sum_of_squares
from scalelong.training import RunConfig, get_preset
from scalelong.training.build import build_model

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BLUE, ORANGE, RED = "#4e79a7", "#f28e2b", "#e15759"


@dataclass(frozen=True)
class Kappa:
    """What is on the command line."""

    preset: tyro.conf.Positional[str]  # as in `scalelong train`
    out: str = "runs/kappa"  # folder of the plot
    data: str | None = None  # instead of the preset's data: a name, folder:PATH or hf:NAME
    skips: int | None = None  # instead of the preset's model: its number of long skips
    samples: int = 4096
    seed: int = 0


def main(arguments: list[str]) -> None:
    """Sample, recommend, draw."""
    command = tyro.cli(Kappa, args=arguments, prog="scalelong kappa", description=__doc__)
    config = get_preset(command.preset)
    settings = config.data
    source = load_source(
        command.data or settings.name, image_size=settings.image_size, split=settings.split, root=settings.root
    )
    skips = command.skips if command.skips is not None else count_skips(config, source.shape)
    process, prediction = get_process(config.diffusion.process), config.diffusion.prediction
    found = recommend_kappa(source, process, skips, prediction=prediction, samples=command.samples, seed=command.seed)
    out = Path(command.out)
    out.mkdir(parents=True, exist_ok=True)
    picture = out / f"kappa-{command.preset}.png"
    plot(found, f"{command.preset}: {source.name}, {process.name}", picture)
    print(summary(found, config))
    if found.prediction != "noise" and "noise" in process.predictions:
        paper = recommend_kappa(source, process, skips, prediction="noise", samples=command.samples, seed=command.seed)
        low, high = paper.kappa_interval
        print(
            f"\nWith eps as the target, as in the paper: kappa {low:.3f} .. {high:.3f}, recommended {paper.kappa:.3f}."
        )
    print(f"\npicture  {picture}")


def count_skips(config: RunConfig, shape: Shape) -> int:
    """The number of long skips of the preset's model, built without memory on the meta device."""
    with torch.device("meta"):
        return len(find_skips(build_model(config, shape)))


def summary(found: Recommendation, config: RunConfig) -> str:
    """The numbers, the reasoning and what to beware of."""
    low, high = found.kappa_interval
    lines = [
        f"skips N                   {found.num_skips}",
        f"ratio, mean               {found.mean_ratio:.3f}  (standard error {found.standard_error:.3f})",
        f"ratio, 97% quantile       {found.tail_ratio:.3f}",
        f"kappa of CS, interval     {low:.3f} .. {high:.3f}",
        f"kappa of CS, recommended  {found.kappa:.3f}",
        f"kappa in the preset       {config.scaling.kappa} ({config.scaling.method})",
        "",
        found.reasoning,
    ]
    return "\n".join(lines + [f"warning: {warning}" for warning in found.warnings])


def plot(found: Recommendation, title: str, path: Path) -> None:
    """The distribution of the ratio with the interval, and kappa against the sum."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    low, high = found.sum_interval
    shown = [ratio for ratio in found.ratios if ratio <= 2 * high]
    left.hist(shown, 60, color=BLUE, alpha=0.8)
    left.axvline(low, color=ORANGE, label=f"mean {low:.2f}")
    left.axvline(high, color=RED, label=f"97% quantile {high:.2f}")
    left.set(xlabel="||target||² / ||x_t||²", ylabel="samples")
    left.set_title(title, fontsize=10.5, loc="left")
    grid = [i / 200 for i in range(201)]
    right.plot(grid, [sum_of_squares(kappa, found.num_skips) for kappa in grid], color=BLUE)
    right.axhspan(low, high, color=ORANGE, alpha=0.2, label="interval for the sum")
    right.axvspan(*found.kappa_interval, color=BLUE, alpha=0.12, label="interval for κ")
    right.plot(
        found.kappa, sum_of_squares(found.kappa, found.num_skips), "o", color=RED, label=f"κ = {found.kappa:.2f}"
    )
    right.set(xlabel="κ", ylabel="Σ κ^(2(i-1))", ylim=(0.5, max(found.num_skips, high) * 1.05))
    right.set_title(f"CS with N = {found.num_skips} skips", fontsize=10.5, loc="left")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)
    plt.close(figure)
