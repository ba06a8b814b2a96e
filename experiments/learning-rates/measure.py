"""Loss and share of collapsed runs over the learning rate, for every run of the settings.

A run has collapsed if its loss is not finite or, over its last tenth, above `options.collapsed`: predicting no noise gives 1.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib.pyplot as plt
from output import Claim, Outcome, dress, plot_rates, save, write_csv
from scipy.stats import fisher_exact
from settings import Experiment, run_key
from tqdm import tqdm

from scalelong import progress
from scalelong.runs.settings import RunConfig
from scalelong.stability.transfer import loss_of

RUNS = Path("runs/experiments")
Key = tuple[str, float, int]  # run, rate, seed


def measure(experiment: Experiment, _: object, out: Path) -> Outcome:
    rates, limit = experiment.options["rates"], experiment.options["collapsed"]
    grid = {
        (name, rate, seed): replace(config, optimizer=replace(config.optimizer, lr=rate))
        for rate in rates
        for (name, seed), config in experiment.configs.items()
    }
    losses = trained(grid, experiment.options["jobs"])
    rows = [
        {"run": name, "lr": rate, "seed": seed, "loss": loss, "collapsed": loss is None or loss > limit}
        for (name, rate, seed), loss in losses.items()
    ]
    write_csv(rows, out / "runs.csv")
    table = averages(rows)
    draw(rows, out / "learning-rates.png")
    config = next(iter(grid.values()))
    setting = (
        f"U-ViT of width {config.model.dim} on {config.data.name} at {config.data.image_size}x{config.data.image_size}, "
        f"{config.training.steps} steps (warm-up {config.optimizer.warmup_steps}), batch {config.training.batch_size}; "
        f"collapsed: loss above {limit:g} at the end"
    )
    return Outcome(judged(table, rows), setting, {"table": table})


def trained(grid: Mapping[Key, RunConfig], jobs: int) -> dict[Key, float | None]:
    """The final training loss of every run, None where it was not finite; runs that are complete are not repeated."""
    os.environ["OMP_NUM_THREADS"] = "1"  # of the workers
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), progress.hide) as pool:
        futures = {
            pool.submit(loss_of, config, RUNS / run_key(config)): key
            for key, config in sorted(grid.items(), key=lambda item: item[0][2])  # seed by seed
        }
        bar = tqdm(as_completed(futures), total=len(futures), desc="runs", disable=None)
        found = {futures[future]: future.result() for future in bar}
    return {key: found[key] for key in grid}


def finite(value: float) -> float | None:
    """None instead of infinity, which JSON lacks."""
    return value if math.isfinite(value) else None


def averages(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per run and rate: the number of collapsed runs, the median loss, and the mean over the others."""
    table = []
    for name, rate in dict.fromkeys((row["run"], row["lr"]) for row in rows):
        here = [row for row in rows if (row["run"], row["lr"]) == (name, rate)]
        alive = [row["loss"] for row in here if not row["collapsed"]]
        table.append(
            {
                "run": name,
                "lr": rate,
                "seeds": len(here),
                "collapsed": sum(row["collapsed"] for row in here),
                "median loss": finite(median(math.inf if row["loss"] is None else row["loss"] for row in here)),
                "mean loss of the others": fmean(alive) if alive else None,
            }
        )
    return table


def judged(table: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[Claim]:
    """Per depth: do all methods collapse less often than no scaling (Fisher's exact test, 5%), and have a lower loss?"""
    claims = []
    for depth in dict.fromkeys(row["run"].partition(", ")[0] for row in table):
        own = [row for row in table if row["run"].startswith(f"{depth}, ")]
        names = list(dict.fromkeys(row["run"].partition(", ")[2] for row in own))
        by_name = {name: [row for row in own if row["run"] == f"{depth}, {name}"] for name in names}
        count = {name: sum(row["collapsed"] for row in found) for name, found in by_name.items()}
        runs = sum(row["seeds"] for row in by_name["none"])
        best = {
            name: min((row for row in found if row["median loss"] is not None), key=lambda row: row["median loss"])
            for name, found in by_name.items()
        }
        said = ", ".join(f"{name} {count[name]} of {runs}" for name in names)
        counts = {name: [count[name], runs - count[name]] for name in names}
        fewer = all(fisher_exact([counts[n], counts["none"]], "less").pvalue < 0.05 for n in names if n != "none")
        claims.append(
            Claim(f"scaling stabilizes training ({depth}): fewer collapsed runs", f"collapsed: {said}", fewer)
        )
        said = ", ".join(f"median {best[name]['median loss']:.4f} for {name} at {best[name]['lr']:g}" for name in names)
        losses = {name: by_seed(rows, best[name]) for name in names}
        wins = {name: sum(a < b for a, b in zip(losses[name], losses["none"], strict=True)) for name in names[1:]}
        seeds = len(losses["none"])
        said += "".join(f"; {name} below none in {count} of {seeds} seeds" for name, count in wins.items())
        lower = all(count == seeds for count in wins.values())
        claims.append(Claim(f"each method at its own best rate ({depth}): lower loss than no scaling", said, lower))
    return claims


def by_seed(rows: list[dict[str, Any]], best: dict[str, Any]) -> list[float]:
    """The losses at this run and rate, seed by seed."""
    here = [row for row in rows if (row["run"], row["lr"]) == (best["run"], best["lr"])]
    return [math.inf if row["loss"] is None else row["loss"] for row in sorted(here, key=lambda row: row["seed"])]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Median loss over the rate, a panel for each depth."""
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        depth, _, method = row["run"].partition(", ")
        loss = math.inf if row["loss"] is None else row["loss"]
        panels.setdefault(depth, []).append({**row, "method": method, "loss": loss})
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(5.5 * len(panels), 4), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (depth, own) in zip(all_axes[0], panels.items(), strict=True):
        plot_rates(axes, own, "loss", median)
        axes.set_yscale("log")
        axes.minorticks_off()
        dress(axes, depth, "learning rate")
    all_axes[0][0].set_ylabel("training loss at the end", fontsize=9)
    all_axes[0][0].legend(frameon=False, fontsize=8)
    save(figure, path)
