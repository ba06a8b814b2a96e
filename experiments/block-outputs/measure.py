"""Test loss and oscillation of every method against the learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
from measures import averages, value_of
from output import Outcome, dress, plot_rates, save, write_csv
from settings import Experiment

from scalelong.runs.reader import Run

LABELS = {"test_loss": "Test loss", "oscillation_all_blocks": "Relative oscillation, all blocks"}


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
    rates = ", ".join(f"{rate:g}" for rate in sorted({row["lr"] for row in rows}))
    setting = f"{experiment.setting.rpartition(', lr')[0]}, lr {rates}"
    return Outcome([], setting, {"table": averages(rows, experiment.measures)})


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    figure, panels = plt.subplots(1, len(LABELS), figsize=(5.5 * len(LABELS), 4), layout="constrained")
    for axes, (key, label) in zip(panels, LABELS.items(), strict=True):
        plot_rates(axes, rows, key, fmean)
        dress(axes, label, "learning rate")
    panels[1].set_yscale("log")
    panels[0].legend(frameon=False, fontsize=8)
    save(figure, path)
