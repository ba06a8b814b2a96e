"""Static pictures of several runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

from scalelong.runs.reader import Run

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#b07aa1")


def plot_comparison(runs: Sequence[Run], path: Path) -> None:
    """Loss, the middle block's norm, gradient norm and coefficients of each run."""
    figure, ((loss, feature), (gradient, kappa)) = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    for run, colour in zip(runs, _colours(len(runs)), strict=True):
        style = {"color": colour, "label": run.label, "linewidth": 1.4}
        loss.plot(*_smoothed(*run.column("train", "loss")), **style)
        gradient.plot(*run.column("train", "gradient_norm"), **{**style, "linewidth": 0.9})
        feature.plot(*run.column("probe", f"norm/{run.middle_block}"), **style)
        values = run.train[-1]["kappa"]
        kappa.plot(range(1, len(values) + 1), values, marker="o", markersize=4, **style)
    _dress(loss, "Training loss (running mean)", "step", log=True)
    _dress(feature, "Norm of the middle block on a fixed batch", "step")
    _dress(gradient, "Gradient norm", "step", log=True)
    _dress(kappa, "Coefficients of the long skips", "index i (1 = outermost)")
    loss.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def stack_grids(runs: Sequence[Run], path: Path) -> None:
    """The newest sample grid of each run beside each other, with its name above."""
    grids = [(run.label, Image.open(sorted((run.folder / "samples").glob("*.png"))[-1])) for run in runs]
    band, gap = 34, 16
    width = sum(grid.width + gap for _, grid in grids) - gap
    sheet = Image.new("RGB", (width, band + max(grid.height for _, grid in grids)), "white")
    draw, left = ImageDraw.Draw(sheet), 0
    for label, grid in grids:
        draw.text((left + 4, 6), label, fill="black", font=ImageFont.load_default(size=20))
        sheet.paste(grid.convert("RGB"), (left, band))
        left += grid.width + gap
    sheet.save(path)


def _colours(n: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(n)]


def _smoothed(steps: list[int], values: list[float], width: int = 10) -> tuple[list[int], list[float]]:
    """A running mean over the last `width` records."""
    means = [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]
    return steps, means


def _dress(axes: plt.Axes, title: str, xlabel: str, log: bool = False) -> None:
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(xlabel, fontsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if log:
        axes.set_yscale("log")
