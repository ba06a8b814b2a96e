"""What the experiments write: CSV files, a picture, and summary.json with the paper's claims beside what was measured."""

from __future__ import annotations

import csv
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from scalelong.files import write_text
from scalelong.report.colours import PALETTE
from scalelong.report.numbers import running_mean
from scalelong.runs.reader import Run

VERDICTS = {True: "yes", False: "no", None: "inconclusive: one seed"}


@dataclass(frozen=True)
class Claim:
    """One statement of the paper, what was measured, and whether the two agree: computed, never typed."""

    paper: str
    measured: str
    agrees: bool | None  # None: these runs cannot decide it


@dataclass(frozen=True)
class Outcome:
    """What an experiment found: its claims and tables, and what was trained, in words."""

    claims: Sequence[Claim]
    setting: str
    tables: Mapping[str, Any]  # by the name that they have in summary.json


def write_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Rows of equal keys, numbers with six digits."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({key: _short(value) for key, value in row.items()} for row in rows)


def write_summary(
    folder: Path, claims: Sequence[Claim], setting: str, arguments: Sequence[str] | None = None, **numbers: Any
) -> None:
    """summary.json: where and how the numbers came about, and how they stand to the paper."""
    summary = {
        "command": shlex.join(["python", *recorded_command(arguments or sys.argv)]),
        "commit": commit(),
        "device": device_name(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "setting": setting,
        "claims": [asdict(claim) for claim in claims],
        **numbers,
    }
    write_text(folder / "summary.json", json.dumps(summary, indent=1) + "\n")


def commit() -> str:
    """The commit of the code: $SCALELONG_COMMIT where there is no repository."""
    if given := os.environ.get("SCALELONG_COMMIT"):
        return given
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def device_name() -> str:
    """The GPU, or the processor's kind."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Aligned columns."""
    cells = [list(rows[0]), *([_short(value) for value in row.values()] for row in rows)]
    widths = [max(len(str(row[i])) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_outcome(outcome: Outcome) -> None:
    """Claim, measurement and verdict, then the tables."""
    for claim in outcome.claims:
        print(f"\npaper     {claim.paper}\nmeasured  {claim.measured}\nagrees    {VERDICTS[claim.agrees]}")
    for table in outcome.tables.values():
        if isinstance(table, list):
            print()
            print_table(table)


def by_run(rows: Sequence[Mapping[str, Any]], measure: str) -> dict[str, list[float]]:
    """The values of one measure by run, seed by seed."""
    found: dict[str, list[float]] = {}
    for each in rows:
        found.setdefault(each["run"], []).append(each[measure])
    return found


def draw(
    runs: Mapping[str, Sequence[Run]], rows: Sequence[Mapping[str, Any]], measures: Sequence[str], path: Path
) -> None:
    """Loss against the first run's, norm of the middle block, measures relative to the first run's; samples if any."""
    grids = {name: own[0].sample_grids()[-1][1] for name, own in runs.items() if own[0].sample_grids()}
    columns = max(3, len(grids))
    figure = plt.figure(figsize=(14, 4.2 + (14 / columns if grids else 0)), layout="constrained")
    axes = figure.add_gridspec(1 + bool(grids), 6 * columns, height_ratios=[4.2, *([14 / columns] if grids else [])])
    loss, norm, bars = (figure.add_subplot(axes[0, 2 * columns * i : 2 * columns * (i + 1)]) for i in range(3))
    first = next(iter(runs))
    for at, (name, own) in enumerate(runs.items()):
        colour = PALETTE[at % len(PALETTE)][0]
        for seed, (each, base) in enumerate(zip(own, runs[first], strict=True)):
            style = {"color": colour, "linewidth": 1.2, "alpha": 1.0 if seed == 0 else 0.35}
            other = dict(zip(*base.column("train", "loss"), strict=True))
            own_losses = zip(*each.column("train", "loss"), strict=True)
            apart = {step: value - other[step] for step, value in own_losses if step in other}
            steps = list(apart)  # a run that was interrupted has more records
            loss.plot(steps, running_mean(steps, list(apart.values()), window=max(1, steps[-1] // 8)), **style)
            norm.plot(*each.column("probe", f"norm/{each.middle_block}"), label=name if seed == 0 else None, **style)
        for group, measure in enumerate(measures):
            found = by_run(rows, measure)
            ratios = [value / base for value, base in zip(found[name], found[first], strict=True)]
            place = group + 0.8 * ((at + 0.5) / len(runs) - 0.5)
            bars.plot([place] * len(ratios), ratios, "o", color=colour, markersize=3, alpha=0.6)
            bars.plot([place], [fmean(ratios)], "_", color=colour, markersize=12, markeredgewidth=2.5)
    bars.set_xticks(range(len(measures)), [m.replace("_", "\n") for m in measures], fontsize=7)
    dress(loss, f"Loss minus that of {first}, same seed", "step; smoothed; faint: other seeds")
    dress(norm, "Norm of the middle block on a fixed batch", "step")
    dress(bars, f"Measures divided by those of {first}; dots: seeds", "")
    norm.legend(frameon=False, fontsize=8)
    width = 6 * columns // max(1, len(grids))
    for at, (name, file) in enumerate(grids.items()):
        panel = figure.add_subplot(axes[1, at * width : (at + 1) * width])
        panel.imshow(plt.imread(file), cmap="gray", interpolation="nearest")
        panel.set_title(f"samples, {name}", fontsize=10, loc="left")
        panel.set_axis_off()
    save(figure, path)


def plot_rates(
    axes: plt.Axes, rows: Sequence[Mapping[str, Any]], value: str, average: Callable[[list[float]], float]
) -> None:
    """Average over seeds against the learning rate `lr`, a line for each `method`; dots are seeds."""
    methods, rates = (list(dict.fromkeys(row[key] for row in rows)) for key in ("method", "lr"))
    rates.sort()
    for at, method in enumerate(methods):
        mine = [row for row in rows if row["method"] == method]
        averages = [average([row[value] for row in mine if row["lr"] == rate]) for rate in rates]
        colour, shift = PALETTE[at % len(PALETTE)][0], 1.04 ** (at - (len(methods) - 1) / 2)
        axes.plot([rate * shift for rate in rates], averages, color=colour, marker="_", markersize=12, label=method)
        dots = [row["lr"] * shift for row in mine]
        axes.plot(dots, [row[value] for row in mine], "o", color=colour, markersize=3.5, alpha=0.6)
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)


def dress(axes: plt.Axes, title: str, xlabel: str, ylabel: str = "") -> None:
    """The look of every picture."""
    axes.set_title(title, fontsize=10.5, loc="left")
    axes.set_xlabel(xlabel, fontsize=9)
    axes.set_ylabel(ylabel, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: plt.Figure, path: Path) -> None:
    """Write and forget a picture."""
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def recorded_command(arguments: Sequence[str]) -> list[str]:
    """The script as it is called from the repository's root, without where its files went."""
    kept = [f"experiments/{Path(arguments[0]).name}"]
    rest = iter(arguments[1:])
    for argument in rest:
        if argument in ("--out", "--runs"):
            next(rest, None)
        else:
            kept.append(argument)
    return kept
