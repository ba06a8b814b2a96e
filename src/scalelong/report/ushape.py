"""The U of a model as text and as a picture: its skips, their sizes, coefficients and how far they reach."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch


@dataclass(frozen=True)
class Rung:
    """One long skip, as it is drawn."""

    index: int  # 1 = outermost
    made_in: str
    used_in: str
    channels: int
    size: str  # "32 x 32", "257 tokens", or empty where it is not known
    coefficient: float | None  # None: not known before the model has run
    reach: str


@dataclass(frozen=True)
class UShape:
    """A whole model, as it is drawn."""

    title: str
    subtitle: str
    rungs: Sequence[Rung]  # outermost first

    def stages(self) -> list[int]:
        """For each rung, how deep down the U it lies: a change of size is one step down, or every rung where none changes."""
        sizes = [rung.size for rung in self.rungs]
        if len(set(sizes)) == 1:
            return list(range(len(sizes)))
        depth, found = 0, []
        for before, size in zip([sizes[0], *sizes], sizes, strict=False):
            depth += before != size
            found.append(depth)
        return found


# ------------------------------------------------------------------------------------------------------------------ text

LINES = {"full": "━", "partial": "╌", "shortcut": "─", "none": " ", "unknown": "·"}


def as_text(shape: UShape) -> str:
    """A few lines a terminal can show."""
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


# --------------------------------------------------------------------------------------------------------------- picture

STYLES: dict[str, Any] = {"full": "-", "partial": (0, (5, 2)), "shortcut": (0, (1.4, 1.6)), "none": ":", "unknown": "-"}
WORDS = {
    "full": "full: all that follows sees κ",
    "partial": "partial: a norm over main path and skip bends κ",
    "shortcut": "shortcut: only the block's shortcut sees κ",
    "none": "none: κ is cancelled",
    "unknown": "reach not measured",
}
INK, PALE, ENCODER, DECODER = "#2b3440", "#8a94a0", "#e8f0fa", "#fdf0e3"
KAPPA = LinearSegmentedColormap.from_list("kappa", ["#d9dee4", "#9dbbe0", "#2f6fb7", "#123a6b"])


def draw(shape: UShape, path: str | Path) -> Path:
    """Write the picture; the ending of the path says which kind (png, svg, pdf)."""
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
    """Encoder box, arrow, decoder box, with names outside and the coefficient on the arrow."""
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
        plt.Line2D([], [], color="#2f6fb7", linewidth=1.8, linestyle=STYLES[reach], label=WORDS[reach])
        for reach in reaches
    ]
    axes.legend(handles=handles, loc="lower left", frameon=False, fontsize=8, labelcolor=INK, handlelength=3.2)
