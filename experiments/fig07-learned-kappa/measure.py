"""Fig. 7: the coefficients that LS learned, on 30 noise inputs, against the curve and the range of CS.

Shapes: n noises, N skips.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from output import Claim, Outcome, dress, save, write_csv
from settings import Experiment
from torch import Tensor, nn

from scalelong.backbones import as_network
from scalelong.data import load_source
from scalelong.random import normal
from scalelong.report.colours import colour
from scalelong.runs.reader import Run
from scalelong.scaling.constant import constant_coefficients
from scalelong.skips import coefficients
from scalelong.stability import Recommendation, recommend_kappa
from scalelong.training import load_run
from scalelong.training.run import evaluating

NOISES = 30  # "we randomly sample 30 Gaussian noises"


def measure(experiment: Experiment, runs: Mapping[str, Sequence[Run]], out: Path) -> Outcome:
    learned = {run.seed: coefficients_of(run) for run in runs["ls"]}
    found = interval(runs["ls"][0], next(iter(learned.values())).shape[1])
    rows = [row(seed, values, found) for seed, values in learned.items()]
    write_csv(table(learned), out / "coefficients.csv")
    write_csv(rows, out / "fits.csv")
    draw(learned, found, out / "fig07.png")
    setting = f"LS on {experiment.setting}; averaged weights, {NOISES} noises from N(0, I) at t = 1"
    return Outcome(judged(learned, rows, found), setting, {"fits": rows})


def coefficients_of(run: Run) -> Tensor:
    """(30, N) on the averaged weights at pure noise."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load_run(run.folder, device=device)
    time = float(loaded.objective.process.network_time(torch.ones(1)))
    return learned_coefficients(as_network(loaded.model), loaded.model, loaded.shape, time)


def interval(run: Run, num_skips: int) -> Recommendation:
    """The range of kappa that Sec. 4.1 gives for these data."""
    config, objective = run.config, load_run(run.folder).objective
    source = load_source(config.data.name, image_size=config.data.image_size, root=config.data.root)
    return recommend_kappa(source, objective.process, num_skips, prediction=objective.prediction)


def row(seed: int, values: Tensor, found: Recommendation) -> dict[str, Any]:
    """The fits of one run and the share of its coefficients inside the range."""
    kappas = values.mean(0).tolist()
    exact, free = fit_cs(kappas), fit_cs(kappas, free_scale=True)
    low, high = (torch.tensor(constant_coefficients(len(kappas), kappa)) for kappa in found.kappa_interval)
    inside = ((values >= low) & (values <= high)).float().mean(0)
    return {
        "seed": seed,
        "cs_kappa": exact.kappa,
        "cs_r2": exact.r_squared,
        "free_scale": free.scale,
        "free_kappa": free.kappa,
        "free_r2": free.r_squared,
        "share_inside": float(inside.mean()),
        "falls_with_i": sum(b < a for a, b in pairwise(kappas)) / (len(kappas) - 1),
    }


def judged(learned: dict[int, Tensor], rows: list[dict[str, Any]], found: Recommendation) -> list[Claim]:
    """The two sentences of Sec. 6 about Fig. 7."""
    low, high = found.kappa_interval
    means = torch.stack([values.mean(0) for values in learned.values()]).mean(0)
    shown = ", ".join(f"{kappa:.3f}" for kappa in means)
    return [
        Claim(
            "The coefficients of LS fall within the range that Sec. 4.1 gives for CS",
            f"kappa from {low:.3f} to {high:.3f}; inside: {mean(r['share_inside'] for r in rows):.0%} of the coefficients",
            all(r["share_inside"] == 1 for r in rows),
        ),
        Claim(
            "They lie on almost the same exponential curve as Eq. 8",
            f"kappa_1..N on average over the seeds: {shown}; nearest kappa^(i-1) has R² "
            f"{shown_r2(rows, 'cs_r2')}, with a free factor "
            f"{shown_r2(rows, 'free_r2')} (seed by seed)",
            all(r["cs_r2"] > 0.9 for r in rows),
        ),
    ]


def shown_r2(rows: list[dict[str, Any]], key: str) -> str:
    """Seed by seed; what is below 0 is worse than a constant, however much."""
    return ", ".join(format(row[key], ".2f") if row[key] >= 0 else "below 0" for row in rows)


def table(learned: dict[int, Tensor]) -> list[dict[str, Any]]:
    """Every coefficient: seed, noise, skip."""
    return [
        {"seed": seed, "noise": n, "skip": i, "kappa": float(value)}
        for seed, values in learned.items()
        for n, line in enumerate(values)
        for i, value in enumerate(line, 1)
    ]


def draw(learned: dict[int, Tensor], found: Recommendation, path: Path) -> None:
    """A panel for each seed: the noises' coefficients, their mean, the nearest CS and its range."""
    figure, panels = plt.subplots(
        1, len(learned), figsize=(4.2 * len(learned), 3.8), layout="constrained", squeeze=False
    )
    for axes, (seed, values) in zip(panels[0], learned.items(), strict=True):
        count = values.shape[1]
        index, means = range(1, count + 1), values.mean(0).tolist()
        fit = fit_cs(means)
        bounds = [constant_coefficients(count, kappa) for kappa in found.kappa_interval]
        axes.fill_between(index, *bounds, color=colour("rsqrt2"), alpha=0.2, label="range of CS (Sec. 4.1)")
        axes.plot(index, values.T, color=colour("ls"), alpha=0.12, linewidth=0.8)
        axes.plot(index, means, color=colour("ls"), marker="o", markersize=4, label="LS, mean of 30 noises")
        share = f"R² = {fit.r_squared:.2f}" if fit.r_squared >= 0 else "R² below 0"
        name = f"nearest CS: κ = {fit.kappa:.2f}, {share}"
        axes.plot(index, fit.curve(count), color=colour("cs"), linestyle="--", label=name)
        axes.set(ylim=(0, 1.05), xticks=list(index))
        dress(axes, f"seed {seed}", "skip i (1 = outermost)", "κ_i")
        axes.legend(frameon=False, fontsize=8)
    save(figure, path)


@dataclass(frozen=True)
class CSFit:
    """kappa_i = scale * kappa^(i-1) fitted to coefficients; scale = 1 is CS (Eq. 8)."""

    kappa: float
    scale: float
    r_squared: float  # share of the variance over i that the curve explains; below 0: worse than a constant

    def curve(self, num_skips: int) -> list[float]:
        """kappa_1 .. kappa_N of the fit."""
        return [self.scale * k for k in constant_coefficients(num_skips, self.kappa)]


@torch.no_grad()
def learned_coefficients(
    network: Callable[..., Tensor],  # as_network(model): (x, time) -> prediction
    model: nn.Module,  # the scaled model inside it
    shape: Sequence[int],  # of one image
    time: float,  # the network's time input: 999 for pure noise of the VP-SDE
    count: int = NOISES,
    seed: int = 0,
) -> Tensor:
    """(n, N): the mean coefficient of each skip on each of `count` noises from N(0, I); a function of the seed."""
    if count < 1:
        raise ValueError(f"count: must be at least 1, got {count}; the paper uses {NOISES}")
    device = next(model.parameters()).device
    noises = normal(seed, "learned", torch.arange(count, device=device), shape)
    rows = []
    with evaluating(model):
        for noise in noises:
            network(noise[None], torch.full((1,), time, device=device))
            rows.append(coefficients(model))
    return torch.tensor(rows)


def fit_cs(kappas: Sequence[float], free_scale: bool = False) -> CSFit:
    """The least-squares fit with kappa in (0, 1.5]; `free_scale` lets kappa_1 differ from 1.

    >>> round(fit_cs([1.0, 0.7, 0.49]).kappa, 6)
    0.7
    """
    if len(kappas) < 2:
        raise ValueError(f"kappas: a curve needs at least 2 skips, got {len(kappas)}")
    values = np.array(kappas, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"kappas: must be finite, got {list(kappas)}; run the model once first")
    low, high, points = 1e-6, 1.5, 200
    while True:  # a grid, then a finer one around its best point
        grid = np.linspace(low, high, points)
        curves = grid[:, None] ** np.arange(len(kappas))  # (points, N)
        scales = curves @ values / (curves**2).sum(1) if free_scale else np.ones(points)
        errors = ((values - scales[:, None] * curves) ** 2).sum(1)
        best = int(errors.argmin())
        if high - low < 1e-10:
            break
        low, high = grid[max(0, best - 1)], grid[min(points - 1, best + 1)]
    residual, total = float(errors[best]), float(((values - values.mean()) ** 2).sum())
    r_squared = 1 - residual / total if total > 0 else (1.0 if residual < 1e-18 else -math.inf)
    return CSFit(float(grid[best]), float(scales[best]), r_squared)
