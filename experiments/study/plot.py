"""Draw the study's curves: loss relative to the unscaled run of the same seed and kernels, with crossovers, and FID.

    python experiments/study/plot.py    # experiments/results/study/curves.csv -> curves.png beside it, and a table

Only pieces of the same network and training are drawn: those of the last piece, or of `--experiment NAME`.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from results import RESULTS, read_meta, read_rows

from scalelong.report.colours import GREEN
from scalelong.report.colours import colour as colour_of

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BASELINE, AGAIN = "none", "none again=True"  # the unscaled run, and one of the same seed with later kernels
OWN_BASELINE = ("min_snr", "flow", "muon")  # runs with one of these are compared with an unscaled run with it
DASHES = ("--", "-", ":")  # by seed
TRAINING = ("process", "optimizer", "ema", "data", "precision")  # what two protocols must share to be drawn together
FIRST = 4000  # earlier steps are not drawn
Curve = dict[int, float]  # value by step
Key = tuple[str, int]  # method, seed


def colour(method: str) -> str:
    return GREEN if method == "ls start=0.95" else colour_of(method)


def curves(rows: Sequence[Mapping[str, str]], column: str) -> dict[Key, Curve]:
    """The curve of every run, without empty cells."""
    found: dict[Key, Curve] = defaultdict(dict)
    for row in rows:
        if row[column]:
            found[row["method"], int(row["seed"])][int(row["step"])] = float(row[column])
    return dict(found)


def baselines(rows: Sequence[Mapping[str, str]]) -> dict[Key, Key]:
    """The unscaled run, of the same objective and optimizer, that each run is compared with.

    That of its piece, or else the last of its seed in the table.
    """
    own, last = {}, {}
    for row in rows:
        if row["method"] == AGAIN or row["method"] == _unscaled(row["method"]):
            kind, seed = _unscaled(row["method"]), int(row["seed"])
            last[kind, seed] = row["method"]
            if row["method"] != AGAIN:
                own[row["experiment"], kind, seed] = row["method"]
    found = {}
    for row in rows:
        method, seed, kind = row["method"], int(row["seed"]), _unscaled(row["method"])
        if method != kind and (kind, seed) in last:
            base = kind if method == AGAIN else own.get((row["experiment"], kind, seed), last[kind, seed])
            found[method, seed] = (base, seed)
    return found


def _unscaled(method: str) -> str:
    return " ".join([BASELINE, *(word for word in method.split() if word.split("=")[0] in OWN_BASELINE)])


def relative(curve: Curve, baseline: Curve) -> Curve:
    """(method - baseline) / baseline in percent, at the steps both have: below 0 is better than the baseline."""
    return {step: 100 * (value / baseline[step] - 1) for step, value in curve.items() if step in baseline}


def intervals_ahead(difference: Curve) -> list[tuple[int, int]]:
    """The ranges of steps over which the method is ahead at every evaluation."""
    found: list[tuple[int, int]] = []
    extends = False
    for step in sorted(difference):
        if difference[step] < 0:
            found = [*found[:-1], (found[-1][0], step)] if extends else [*found, (step, step)]
        extends = difference[step] < 0
    return found


def speed_up(curve: Curve, baseline: Curve) -> float | None:
    """Steps that the baseline took to its last loss, divided by those the method took to the same loss."""
    last = max(baseline)
    reached = [step for step in sorted(curve) if curve[step] <= baseline[last]]
    if not reached:
        return None
    after = reached[0]
    before = max((step for step in curve if step < after), default=after)
    share = 1.0 if before == after else (curve[before] - baseline[last]) / (curve[before] - curve[after])
    return last / (before + share * (after - before))


def smoothed(curve: Curve, width: int = 5) -> Curve:
    """The mean over the last `width` evaluations."""
    steps = sorted(curve)
    return {
        step: sum(curve[s] for s in steps[i + 1 - width : i + 1]) / width
        for i, step in enumerate(steps)
        if i + 1 >= width
    }


def draw(rows: Sequence[Mapping[str, str]], path: Path) -> None:
    """Losses relative to the unscaled run of the same seed, and FID."""
    figure, panels = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    bases = baselines(rows)
    for axes, column, title, width in (
        (panels[0, 0], "train_loss", "training loss, mean of 5,000 steps", 5),
        (panels[0, 1], "raw_test_loss", "test loss of the weights, mean of 5 evaluations", 5),
        (panels[1, 0], "test_loss", "test loss of the EMA weights", 1),
    ):
        losses = curves(rows, column)
        axes.axhline(0, color=colour(BASELINE), linewidth=1.2, label=BASELINE)
        for (method, seed), curve in losses.items():
            if (base := bases.get((method, seed))) in losses:
                both = (smoothed(c, width) for c in (curve, losses[base]))
                _draw_relative(axes, relative(*both), method, seed, mark=width > 1)
        axes.set_ylim(-0.8, 1.2)
        axes.set_title(f"{title}: % above none", fontsize=10, loc="left")
    scores = panels[1, 1]
    for (method, seed), curve in curves(rows, "fid").items():
        steps = [step for step in sorted(curve) if step >= FIRST]
        scores.plot(steps, [curve[step] for step in steps], "o", markersize=4, **_style(method, seed))
    scores.set_yscale("log")
    scores.set_yticks((30, 40, 50, 60, 80, 100), labels=("30", "40", "50", "60", "80", "100"))
    scores.minorticks_off()
    scores.set_title("FID-10k of the EMA weights", fontsize=10, loc="left")
    for axes in panels.flat:
        axes.set_xlabel("step", fontsize=9)
        axes.xaxis.set_major_formatter(lambda step, _position: f"{step / 1000:g}k")
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8, frameon=False)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _draw_relative(axes: plt.Axes, difference: Curve, method: str, seed: int, mark: bool) -> None:
    """One curve, with `mark` also the step at which the method first draws ahead."""
    shown = {step: difference[step] for step in sorted(difference) if step >= FIRST}
    axes.plot(list(shown), list(shown.values()), **_style(method, seed))
    for at, _ in intervals_ahead(shown)[:1] if mark else []:
        axes.plot(at, shown[at], "o", color=colour(method), markersize=4)
        offset = (-8, -14) if seed % 2 else (3, 5)
        axes.annotate(f"{at // 1000}k", (at, shown[at]), xytext=offset, textcoords="offset points", fontsize=8)


def _style(method: str, seed: int) -> dict[str, Any]:
    """Colour by method, dashes by seed."""
    return {
        "color": colour(method),
        "linestyle": "-." if method == AGAIN else DASHES[seed % len(DASHES)],
        "linewidth": 1.4,
        "label": f"{method}, seed {seed}",
    }


def table(rows: Sequence[Mapping[str, str]], steps: Sequence[int]) -> str:
    """Markdown: loss (FID) at the given steps and at the last, where the method is ahead, and its speed-up."""
    losses, fids, bases = curves(rows, "test_loss"), curves(rows, "fid"), baselines(rows)
    lines = [
        "| method | seed | " + " | ".join(f"{step // 1000}k" for step in steps) + " | last | ahead at | speed-up |"
    ]
    lines.append("|---" * (len(steps) + 5) + "|")
    for (method, seed), curve in losses.items():
        scores, last = fids.get((method, seed), {}), max(curve)
        cells = [_cell(curve, scores, step) for step in steps]
        cells.append(f"{_cell(curve, scores, last)} at {last}")
        baseline, ahead, faster = losses.get(bases.get((method, seed), ("", 0)), {}), "", None
        if baseline:
            ranges = intervals_ahead(relative(curve, baseline))
            ahead = ", ".join(f"{first}-{end}" for first, end in ranges) or "never"
            faster = speed_up(curve, baseline)
        cells += [ahead, f"{faster:.2f}x" if faster else ""]
        lines.append(f"| {method} | {seed} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def window_table(rows: Sequence[Mapping[str, str]], column: str, width: int = 5) -> str:
    """Markdown: loss relative to the unscaled run of the seed, means of `width` evaluations, at every second window."""
    losses, bases = {key: smoothed(curve, width) for key, curve in curves(rows, column).items()}, baselines(rows)
    ends = sorted({step for curve in losses.values() for step in curve if step % 10_000 == 0})
    lines = [
        f"| {column} | seed | " + " | ".join(f"to {end // 1000}k" for end in ends) + " |",
        "|---" * (len(ends) + 2) + "|",
    ]
    for (method, seed), curve in losses.items():
        if (base := bases.get((method, seed))) in losses:
            found = relative(curve, losses[base])
            cells = [f"{found[end]:+.2f}%" if end in found else "" for end in ends]
            lines.append(f"| {method} | {seed} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(losses: Curve, fids: Curve, step: int) -> str:
    if step not in losses:
        return ""
    return f"{losses[step]:.5f}" + (f" ({fids[step]:.1f})" if step in fids else "")


def comparable(results: Path, experiment: str = "", free: Sequence[str] = ()) -> list[dict[str, str]]:
    """The rows of all pieces of the network and training of one of them, but for the settings in `free`. Methods are compared
    within a piece's seed only, so pieces may differ in how they are evaluated.
    """
    pieces = read_meta(results)["pieces"]

    def trained(name: str) -> list[object]:
        about = pieces[name]
        sizes = ("batch", "lr", "warmup", "dim", "depth", "heads", "patch")
        network = about["settings"].get("network", "uvit")
        return [
            network,
            *(about["protocol"][key] for key in TRAINING),
            *(about["settings"][key] for key in sizes if key not in free),
        ]

    wanted = trained(experiment or list(pieces)[-1])
    return [row for row in read_rows(results / "curves.csv") if trained(row["experiment"]) == wanted]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--experiment", default="", help="a piece whose training to draw; default: the last")
    options = parser.parse_args()
    rows = comparable(options.results, options.experiment)
    draw(rows, options.results / "curves.png")
    print(table(rows, (5_000, 10_000, 25_000, 50_000, 66_000, 73_000, 100_000)))
    for column in ("train_loss", "raw_test_loss", "test_loss"):
        print("\n" + window_table(rows, column))


if __name__ == "__main__":
    main()
