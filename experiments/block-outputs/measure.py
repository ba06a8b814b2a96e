"""Test loss and oscillation of every method against the learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
from measures import averages, value_of
from output import Outcome, dress, save, write_csv
from settings import Experiment

from scalelong.report.colours import PALETTE
from scalelong.runs.reader import Run

LABELS = {"test_loss": "test loss", "oscillation_all_blocks": "relative oscillation, all blocks"}


def measure(experiment: Experiment, runs: Mapping[str, Sequence[Run]], out: Path) -> Outcome:
    rows = [
        {"run": name, "method": name.partition(",")[0], "lr": each.config.optimizer.lr, "seed": each.seed}
        | {key: value_of(each, key, {}) for key in experiment.measures}
        | {"seconds": each.column("train", "seconds")[1][-1]}
        for name, own in runs.items()
        for each in own
    ]
    write_csv(rows, out / "runs.csv")
    draw(rows, out / "block-outputs.png")
    setting = experiment.setting.rpartition(", lr")[0]
    return Outcome([], f"{setting}; three learning rates", {"table": averages(rows, experiment.measures)})


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Means over seeds; dots are seeds."""
    figure, panels = plt.subplots(1, len(LABELS), figsize=(5.5 * len(LABELS), 4), layout="constrained")
    methods, rates = (list(dict.fromkeys(row[key] for row in rows)) for key in ("method", "lr"))
    for axes, (key, label) in zip(panels, LABELS.items(), strict=True):
        for at, method in enumerate(methods):
            colour, shift = PALETTE[at][0], 1.03 ** (at - (len(methods) - 1) / 2)
            mine = [row for row in rows if row["method"] == method]
            means = {rate: fmean(row[key] for row in mine if row["lr"] == rate) for rate in sorted(rates)}
            axes.plot([rate * shift for rate in means], list(means.values()), color=colour, label=method)
            dots = [row["lr"] * shift for row in mine]
            axes.plot(dots, [row[key] for row in mine], "o", color=colour, markersize=3.5, alpha=0.6)
        axes.set(xscale="log", yscale="log" if key.startswith("oscillation") else "linear")
        axes.set_xticks(sorted(rates), [f"{rate:g}" for rate in sorted(rates)])
        axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        dress(axes, label.capitalize(), "learning rate")
    panels[0].legend(frameon=False, fontsize=8)
    save(figure, path)
