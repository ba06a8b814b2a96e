"""Static pictures: the U of a model, as text or drawn, and runs side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from PIL import Image, ImageDraw, ImageFont

from scalelong.report.numbers import running_mean
from scalelong.runs.reader import Run

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch


@dataclass(frozen=True)
class Rung:
    """A long skip."""

    index: int  # 1 = outermost
    made_in: str
    used_in: str
    channels: int
    size: str  # "32 x 32", "257 tokens", or empty if unknown
    coefficient: float | None  # None: unknown before the model has run
    reach: str


@dataclass(frozen=True)
class UShape:
    """The skips of a model."""

    title: str
    subtitle: str
    rungs: Sequence[Rung]  # outermost first

    def stages(self) -> list[int]:
        """Depth of each rung in the U: one more at each change of size, or at each rung if none changes."""
        sizes = [rung.size for rung in self.rungs]
        if len(set(sizes)) == 1:
            return list(range(len(sizes)))
        depth, found = 0, []
        for before, size in zip([sizes[0], *sizes], sizes, strict=False):
            depth += before != size
            found.append(depth)
        return found


# ---------------------------------------------------------------------------------------------------------------- as text

LINES = {"full": "━", "partial": "╌", "shortcut": "─", "none": " ", "unknown": "·"}


def as_text(shape: UShape) -> str:
    """The U as lines for a terminal."""
    stages = shape.stages()
    step = 2 if max(stages) <= 12 else 1
    left = [f"{rung.made_in}  {_what(rung)}" for rung in shape.rungs]
    inset = [step * stage for stage in stages]
    start = max(map(len, left))
    labels = [f" {rung.index}: κ = {_number(rung.coefficient)} {rung.reach} " for rung in shape.rungs]
    narrowest = max(map(len, labels)) + 6
    lines = [shape.title, shape.subtitle, ""]
    for rung, name, space, label in zip(shape.rungs, left, inset, labels, strict=True):
        width = narrowest + 2 * (max(inset) - space)
        line = label.center(width, LINES[rung.reach])
        lines.append(f"{' ' * space}{name.rjust(start)} ┝{line}▶ {rung.used_in}")
    middle = "middle".center(narrowest + 2, "─")
    return "\n".join([*lines, f"{' ' * (max(inset) + start)} ╰{middle}╯"])


def _what(rung: Rung) -> str:
    return f"{rung.channels} ch" + (f", {rung.size}" if rung.size else "")


def _number(value: float | None) -> str:
    return "?" if value is None or math.isnan(value) else f"{value:.3g}"


# ------------------------------------------------------------------------------------------------------------- as a picture

STYLES: dict[str, Any] = {"full": "-", "partial": (0, (5, 2)), "shortcut": (0, (1.4, 1.6)), "none": ":", "unknown": "-"}
REACHES = {
    "full": "full: all that follows sees κ",
    "partial": "partial: a norm over main path and skip bends κ",
    "shortcut": "shortcut: only the block's shortcut sees κ",
    "none": "none: κ is cancelled",
    "unknown": "reach not measured",
}
INK, PALE, ENCODER, DECODER = "#2b3440", "#8a94a0", "#e8f0fa", "#fdf0e3"
KAPPA = LinearSegmentedColormap.from_list("kappa", ["#d9dee4", "#9dbbe0", "#2f6fb7", "#123a6b"])


def draw(shape: UShape, path: str | Path) -> Path:
    """Draw the U into a file; its suffix sets the format (png, svg, pdf)."""
    stages, count = shape.stages(), len(shape.rungs)
    row = 0.42
    height = row * (count + max(stages) * 0.35) + 2.4
    figure, axes = plt.subplots(figsize=(12, height), layout="constrained")
    inset = 2.2 / max(1, max(stages))
    y = 0.0
    for at, (rung, stage) in enumerate(zip(shape.rungs, stages, strict=True)):
        if at and stage != stages[at - 1] and len({r.size for r in shape.rungs}) > 1:
            y -= 0.35 * row
        _rung(axes, rung, stage * inset, y, row)
        if rung.size and (at == 0 or rung.size != shape.rungs[at - 1].size):
            axes.text(0, y + row * 0.62, rung.size, ha="center", va="bottom", fontsize=7.5, color=PALE)
        y -= row * 1.18
    _middle(axes, (max(stages)) * inset, y - 0.1, row)
    axes.set(xlim=(-8.6, 8.6), ylim=(y - 0.9, row * 1.6))
    axes.axis("off")
    axes.set_title(f"{shape.title}\n", fontsize=13, color=INK, loc="left", fontweight="bold")
    axes.text(0, 1.005, shape.subtitle, transform=axes.transAxes, fontsize=9.5, color=PALE, va="bottom")
    _legend(axes, sorted({rung.reach for rung in shape.rungs}))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140, facecolor="white")
    plt.close(figure)
    return path


def _rung(axes: plt.Axes, rung: Rung, inset: float, y: float, row: float) -> None:
    """Encoder box, arrow with the coefficient, decoder box, and the names of the modules."""
    half = 4.6 - inset
    for side, fill in ((-1, ENCODER), (1, DECODER)):
        box = (side * half - 0.42, y - row * 0.4)
        axes.add_patch(
            FancyBboxPatch(
                box, 0.84, row * 0.8, "round,pad=0,rounding_size=0.08", facecolor=fill, edgecolor=PALE, lw=0.8
            )
        )
        axes.text(side * half, y, str(rung.channels), ha="center", va="center", fontsize=8, color=INK)
        name = rung.made_in if side < 0 else rung.used_in
        align = "right" if side < 0 else "left"
        axes.text(side * (half + 0.55), y, name or "(model)", ha=align, va="center", fontsize=7.5, color=INK)
    value = rung.coefficient
    known = value is not None and not math.isnan(value)
    strength = min(1.0, max(0.0, value)) if value is not None and known else 0.5
    axes.add_patch(
        FancyArrowPatch(
            (-half + 0.5, y), (half - 0.5, y), arrowstyle="-|>", mutation_scale=9, shrinkA=0, shrinkB=0,
            linestyle=STYLES[rung.reach], linewidth=0.9 + 2.4 * strength, color=KAPPA(strength),
        )
    )  # fmt: skip
    axes.text(
        0, y, f"κ$_{{{rung.index}}}$ = {_number(value)}", ha="center", va="center", fontsize=8.5, color=INK,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )  # fmt: skip


def _middle(axes: plt.Axes, inset: float, y: float, row: float) -> None:
    half = 4.6 - inset
    for side in (-1, 1):
        ends = ((side * half, y + row * 0.75), (side * 0.75, y)) if side < 0 else ((0.75, y), (half, y + row * 0.75))
        style = "angle,angleA=90,angleB=0,rad=6" if side < 0 else "angle,angleA=0,angleB=90,rad=6"
        axes.add_patch(
            FancyArrowPatch(*ends, connectionstyle=style, arrowstyle="-|>", mutation_scale=9, color=PALE, lw=1.1)
        )
    axes.add_patch(
        FancyBboxPatch((-0.7, y - row * 0.4), 1.4, row * 0.8, "round,pad=0,rounding_size=0.08", facecolor="#eceff2",
                       edgecolor=PALE, lw=0.8)
    )  # fmt: skip
    axes.text(0, y, "middle", ha="center", va="center", fontsize=8.5, color=INK)


def _legend(axes: plt.Axes, reaches: Sequence[str]) -> None:
    handles = [
        plt.Line2D([], [], color="#2f6fb7", linewidth=1.8, linestyle=STYLES[reach], label=REACHES[reach])
        for reach in reaches
    ]
    axes.legend(handles=handles, loc="lower left", frameon=False, fontsize=8, labelcolor=INK, handlelength=3.2)


# ------------------------------------------------------------------------------------------------------ runs side by side

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#b07aa1")


def plot_comparison(runs: Sequence[Run], path: Path) -> None:
    """Loss, the middle block's norm, gradient norm and coefficients of each run."""
    figure, ((loss, feature), (gradient, kappa)) = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    for i, run in enumerate(runs):
        style = {"color": COLOURS[i % len(COLOURS)], "label": run.label, "linewidth": 1.4}
        steps, losses = run.column("train", "loss")
        loss.plot(steps, running_mean(range(len(losses)), losses, window=10), **style)
        gradient.plot(*run.column("train", "gradient_norm"), **{**style, "linewidth": 0.9})
        feature.plot(*run.column("probe", f"norm/{run.middle_block}"), **style)
        values = run.coefficients()
        kappa.plot(range(1, len(values) + 1), values, marker="o", markersize=4, **style)
    _label(loss, "Training loss (running mean)", "step", log=True)
    _label(feature, "Norm of the middle block on a fixed batch", "step")
    _label(gradient, "Gradient norm", "step", log=True)
    _label(kappa, "Coefficients of the long skips", "index i (1 = outermost)")
    loss.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def stack_grids(runs: Sequence[Run], path: Path) -> None:
    """The last sample grids of the runs side by side, with labels."""
    grids = [(run.label, Image.open(run.sample_grids()[-1][1])) for run in runs]
    band, gap = 34, 16
    width = sum(grid.width + gap for _, grid in grids) - gap
    sheet = Image.new("RGB", (width, band + max(grid.height for _, grid in grids)), "white")
    draw, left = ImageDraw.Draw(sheet), 0
    for label, grid in grids:
        draw.text((left + 4, 6), label, fill="black", font=ImageFont.load_default(size=20))
        sheet.paste(grid.convert("RGB"), (left, band))
        left += grid.width + gap
    sheet.save(path)


def _label(axes: plt.Axes, title: str, xlabel: str, log: bool = False) -> None:
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(xlabel, fontsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if log:
        axes.set_yscale("log")
