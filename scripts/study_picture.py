"""Figure of the long runs for README.md and the docs; called by scripts/study_table.py."""

from __future__ import annotations

from collections.abc import Mapping

from figures_table import DOCS
from matplotlib.figure import Figure
from PIL import Image
from study_table import AGAIN, MILD, NAMES, Pair, as_range, name

from scalelong.report.colours import GREEN
from scalelong.report.colours import colour as colour_of

PICTURE = DOCS / "assets" / "study.png"


def colour(method: str) -> str:
    return GREEN if method == MILD else colour_of("none" if method == AGAIN else method)


def draw(found: Mapping[str, list[Pair]], digest: str) -> None:
    """Loss relative to unscaled, and FID; one colour per method, one line per seed."""
    figure = Figure(figsize=(10, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    left.axhline(0, color=colour("none"), linewidth=2, label=NAMES["none"])
    order = sorted(found, key=[*NAMES, *found].index)
    long = [method for method in order if max(pair.last for pair in found[method]) > 50_000]
    shown = {method: found[method] for method in long if len(found[method]) > 1 or method in (MILD, AGAIN)}
    for method, each in shown.items():
        for i, pair in enumerate(each):
            steps = [step for step in sorted(pair.loss) if step >= 8_000]
            style = {"color": colour(method), "linewidth": 1.8, "alpha": 0.95 if pair.seed else 0.6}
            style |= {"linestyle": ":"} if method == AGAIN else {}
            left.plot(steps, [pair.loss[step] for step in steps], label=None if i else name(method), **style)
            at = pair.level_at
            if at is not None and method == "cs kappa=0.7":
                left.plot(at, pair.loss[at], "o", color=colour(method), markersize=6)
    marks = [pair.level_at for pair in shown["cs kappa=0.7"] if pair.level_at is not None]
    if marks:
        text = f"CS catches up at {as_range(marks)} steps"
        line = {"arrowstyle": "-", "color": "#888"}
        left.annotate(
            text, (max(marks), -0.01), xytext=(max(marks), -0.42), fontsize=9.5, color="#333", arrowprops=line
        )
    left.set(ylim=(-0.5, 1.5), xlim=(8_000, None))
    left.set_title("training loss relative to unscaled (%)", fontsize=11, loc="left")
    bases = {pair.seed: pair.base_fid for method, each in shown.items() if method != MILD for pair in each}
    lines = [("none", seed, curve) for seed, curve in bases.items()]
    lines += [(method, pair.seed, pair.fid) for method, each in shown.items() for pair in each]
    for method, seed, curve in lines:
        style = {"color": colour(method), "markersize": 5, "linewidth": 1.8, "alpha": 0.95 if seed else 0.6}
        right.plot(list(curve), list(curve.values()), "o:" if method == AGAIN else "o-", **style)
    right.set_yscale("log")
    right.set_yticks((30, 40, 60, 80, 100), labels=("30", "40", "60", "80", "100"))
    right.minorticks_off()
    left.legend(frameon=False, fontsize=10)
    right.set_title("FID-10k of the averaged weights", fontsize=11, loc="left")
    for axes in (left, right):
        axes.set_xlabel("training step (one line per seed)", fontsize=9.5)
        axes.xaxis.set_major_formatter(lambda step, _position: f"{step / 1000:g}k")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, dpi=130, facecolor="white", metadata={"Description": digest})


def picture_digest() -> str:
    """Hash of the table that the figure was drawn from."""
    with Image.open(PICTURE) as image:
        return str(image.info.get("Description", ""))
