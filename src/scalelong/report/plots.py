"""Static plots: the U of a model (as text or image), and runs side by side."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from PIL import Image, ImageDraw, ImageFont

from scalelong.files import atomic_write
from scalelong.report.colours import PALETTE, assign
from scalelong.report.compare import Comparison, paired


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
        return list(itertools.accumulate((a != b for a, b in itertools.pairwise(sizes)), initial=0))


# ---------------------------------------------------------------------------------------------------------------- as text

REACHES: dict[str, tuple[str, Any, str]] = {  # how far kappa reaches -> line as text, line as drawn, legend
    "full": ("━", "-", "full: all that follows sees κ"),
    "partial": ("╌", (0, (5, 2)), "partial: a norm over main path and skip bends κ"),
    "shortcut": ("─", (0, (1.4, 1.6)), "shortcut: only the block's shortcut sees κ"),
    "none": (" ", ":", "none: κ is cancelled"),
    "unknown": ("·", "-", "reach not measured"),
}


def as_text(shape: UShape) -> str:
    """The U as lines for a terminal."""
    stages = shape.stages()
    step = 2 if max(stages) <= 12 else 1
    sizes = [f"{rung.channels} ch" + (f", {rung.size}" if rung.size else "") for rung in shape.rungs]
    left = [f"{rung.made_in}  {size}" for rung, size in zip(shape.rungs, sizes, strict=True)]
    inset = [step * stage for stage in stages]
    start = max(map(len, left))
    labels = [f" {rung.index}: κ = {_number(rung.coefficient)} {rung.reach} " for rung in shape.rungs]
    narrowest = max(map(len, labels)) + 6
    lines = [shape.title, shape.subtitle, ""]
    for rung, name, space, label in zip(shape.rungs, left, inset, labels, strict=True):
        line = label.center(narrowest + 2 * (max(inset) - space), REACHES[rung.reach][0])
        lines.append(f"{' ' * space}{name.rjust(start)} ┝{line}▶ {rung.used_in}")
    middle = "middle".center(narrowest + 2, "─")
    return "\n".join([*lines, f"{' ' * (max(inset) + start)} ╰{middle}╯"])


def _number(value: float | None) -> str:
    return "?" if value is None or math.isnan(value) else f"{value:.3g}"


# ------------------------------------------------------------------------------------------------------------- as a picture

INK, PALE, ENCODER, DECODER = "#2b3440", "#8a94a0", "#e8f0fa", "#fdf0e3"
KAPPA = LinearSegmentedColormap.from_list("kappa", ["#d9dee4", "#9dbbe0", "#2f6fb7", "#123a6b"])


def draw(shape: UShape, path: str | Path) -> Path:
    """Draw the U into a file; its suffix sets the format (png, svg, pdf)."""
    stages, row, y = shape.stages(), 0.42, 0.0
    height = row * (len(stages) + max(stages) * 0.35) + 2.4
    figure = Figure(figsize=(12, height), layout="constrained")
    axes = figure.subplots()
    inset = 2.2 / max(1, max(stages))
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
    for _, line, label in (REACHES[reach] for reach in sorted({rung.reach for rung in shape.rungs})):
        axes.plot([], [], color="#2f6fb7", linewidth=1.8, linestyle=line, label=label)
    axes.legend(loc="lower left", frameon=False, fontsize=8, labelcolor=INK, handlelength=3.2)
    return save_figure(figure, path, dpi=140)


def _rung(axes: Axes, rung: Rung, inset: float, y: float, row: float) -> None:
    """Encoder box, arrow with the coefficient, decoder box, and the names of the modules."""
    half = 4.6 - inset
    for side, fill, name, align in ((-1, ENCODER, rung.made_in, "right"), (1, DECODER, rung.used_in, "left")):
        _box(axes, side * half, y, 0.84, row, fill, str(rung.channels), 8)
        axes.text(side * (half + 0.55), y, name or "(model)", ha=align, va="center", fontsize=7.5, color=INK)
    value = rung.coefficient
    strength = 0.5 if value is None or math.isnan(value) else min(1.0, max(0.0, value))
    style = {"linestyle": REACHES[rung.reach][1], "linewidth": 0.9 + 2.4 * strength, "color": KAPPA(strength)}
    _arrow(axes, (-half + 0.5, y), (half - 0.5, y), shrinkA=0, shrinkB=0, **style)
    axes.text(
        0, y, f"κ$_{{{rung.index}}}$ = {_number(value)}", ha="center", va="center", fontsize=8.5, color=INK,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )  # fmt: skip


def _middle(axes: Axes, inset: float, y: float, row: float) -> None:
    half, style = 4.6 - inset, {"color": PALE, "lw": 1.1}
    _arrow(axes, (-half, y + row * 0.75), (-0.75, y), connectionstyle="angle,angleA=90,angleB=0,rad=6", **style)
    _arrow(axes, (0.75, y), (half, y + row * 0.75), connectionstyle="angle,angleA=0,angleB=90,rad=6", **style)
    _box(axes, 0, y, 1.4, row, "#eceff2", "middle", 8.5)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, **style))


def _box(axes: Axes, x: float, y: float, width: float, row: float, fill: str, text: str, size: float) -> None:
    corner, shape = (x - width / 2, y - row * 0.4), "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch(corner, width, row * 0.8, shape, facecolor=fill, edgecolor=PALE, lw=0.8))
    axes.text(x, y, text, ha="center", va="center", fontsize=size, color=INK)


# ------------------------------------------------------------------------------------------------------ runs side by side


def plot_seeds(comparison: Comparison, path: Path) -> None:
    """Loss, loss relative to the baseline (of the same seed if shared), and coefficients; means and ranges over seeds."""
    figure, (loss, gap, kappa) = panels(3)
    chosen = assign([group.method for group in comparison.groups])
    for group, index in zip(comparison.groups, chosen, strict=True):
        style: dict[str, Any] = {"color": PALETTE[index][0], "label": group.label, "linewidth": 1.6}
        curves = [comparison.smoothed_loss(run) for run in group.runs]
        _band(loss, curves[0][0], [values for _, values in curves], style)
        pairs = [[comparison.smoothed_loss(run) for run in pair] for pair in paired(group, comparison.baseline)]
        gaps = [[100 * (a / b - 1) for a, b in zip(m, n, strict=True)] for (at, m), (other, n) in pairs if at == other]
        _band(gap, curves[0][0], gaps, style)
        values = group.coefficients()
        kappa.plot(range(1, len(values) + 1), values, marker="o", markersize=4, **style)
    finish(loss, "Training loss (running mean)", "step", "", log="y")
    finish(gap, f"Loss against {comparison.baseline.label} (%)", "step", "")
    finish(kappa, "Coefficients of the long skips", "index i (1 = outermost)", "")
    save_figure(figure, path)


def panels(count: int) -> tuple[Figure, list[Axes]]:
    """An empty figure with `count` panels side by side."""
    figure = Figure(figsize=(7.5 if count == 1 else 14, 4.2), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def finish(axes: Axes, title: str, xlabel: str, ylabel: str, log: str = "", legend: str = "best", **ticks: Any) -> None:
    """Labels, scales, grid and legend of a panel; log: the logarithmic axes, such as "xy"; ticks: xticks, yticks."""
    axes.set(**{f"{axis}scale": "log" for axis in log})
    for name, values in ticks.items():
        axes.set(**{name: values, f"{name[:-1]}labels": [f"{value:g}" for value in values]})
        axes.minorticks_off()
    axes.set_title(title, fontsize=10.5, loc="left")
    axes.set_xlabel(xlabel, fontsize=9)
    axes.set_ylabel(ylabel, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, loc=legend)


def save_figure(figure: Figure, path: str | Path, dpi: int = 110) -> Path:
    """Write a figure atomically, in the format of the file's ending."""
    path = Path(path)
    with atomic_write(path) as file:
        figure.savefig(file, dpi=dpi, facecolor="white", format=path.suffix[1:] or "png")
    return path


def _band(axes: Axes, steps: Sequence[int], curves: Sequence[Sequence[float]], style: dict[str, Any]) -> None:
    """The mean of curves over the same steps, within their range."""
    columns = list(zip(*curves, strict=False))
    axes.plot(steps[: len(columns)], [sum(column) / len(column) for column in columns], **style)
    low, high = [min(column) for column in columns], [max(column) for column in columns]
    axes.fill_between(steps[: len(columns)], low, high, color=style["color"], alpha=0.15, linewidth=0)


def image_rows(rows: Mapping[str, Sequence[Any]], path: Path, size: int = 72) -> None:
    """Rows of small grey images (H, W) uint8, enlarged smoothly to `size` pixels, with labels on the left."""
    band, gap, font = 110, 6, ImageFont.load_default(size=20)
    columns = max(len(images) for images in rows.values())
    sheet = Image.new("L", (band + columns * (size + gap), len(rows) * (size + gap) - gap), "white")
    for y, (label, images) in enumerate(rows.items()):
        ImageDraw.Draw(sheet).text((4, y * (size + gap) + size // 2 - 12), label, fill="black", font=font)
        for x, image in enumerate(images):
            enlarged = Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC)
            sheet.paste(enlarged, (band + x * (size + gap), y * (size + gap)))
    with atomic_write(path) as file:
        sheet.save(file, path.suffix[1:].upper() or "PNG")
