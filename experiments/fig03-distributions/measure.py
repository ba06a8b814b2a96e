"""Fig. 3: distributions of the network's input and target, and robustness to extra input noise.

Shapes: B images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from output import Claim, Outcome, dress, save, write_csv
from settings import Experiment
from torch import Tensor

from scalelong.backbones import as_network
from scalelong.data import Source, load_source, to_float
from scalelong.diffusion import VPSDE, Objective, draw_time_and_noise
from scalelong.diffusion.objective import Network
from scalelong.random import normal
from scalelong.report.colours import PALETTE, colour
from scalelong.runs.reader import Run
from scalelong.stability import recommend_kappa
from scalelong.training import load_run

SAMPLES = 4096
SIGMAS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
BARS = tuple(light for light, _ in PALETTE[1:4])
Runs = Mapping[str, Sequence[Run]]  # by name, a run for each seed


def measure(experiment: Experiment, runs: Runs, out: Path) -> Outcome:
    names = experiment.options["data"]
    sizes = {name: squared_norms(load_source(name)) for name in names}
    ratios = {name: np.array(recommend_kappa(load_source(name), VPSDE(), 6, samples=SAMPLES).ratios) for name in names}
    points = [point for own in runs.values() for run in own for point in robustness(run)]
    distributions = [summary_row(name, sizes[name], ratios[name]) for name in names]
    write_csv(distributions, out / "distributions.csv")
    write_csv(points, out / "extra_noise.csv")
    draw(sizes, ratios, points, out / "fig03.png")
    claims = [*distribution_claims(distributions), noise_claim(points)]
    return Outcome(claims, experiment.setting, {"distributions": distributions, "extra_noise": averages(points)})


def squared_norms(source: Source) -> np.ndarray[Any, Any]:
    """||x_t||^2 / m of training inputs of the VP-SDE."""
    index = torch.arange(SAMPLES)
    process, found = VPSDE(), []
    for part in index.split(512):
        images = to_float(source.read_many((part % len(source)).tolist()))
        t, noise = draw_time_and_noise(process, 0, part, source.shape)
        x_t, _, _ = process.diffuse(images, noise, t)
        found.append(x_t.square().flatten(1).mean(1))
    return torch.cat(found).numpy()


def summary_row(name: str, sizes: np.ndarray[Any, Any], ratios: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The numbers of one data set."""
    return {
        "data": name,
        "mean_norm2_over_m": float(sizes.mean()),
        "sd_norm2_over_m": float(sizes.std()),
        "mean_ratio": float(ratios.mean()),
        "ratio_97": float(np.quantile(ratios, 0.97)),
        "share_below_5": float((ratios < 5).mean()),
    }


def robustness(run: Run) -> list[dict[str, Any]]:
    """The curve of one run on 512 images."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load_run(run.folder, device=device)
    source = load_source(run.config.data.name, root=run.config.data.root)
    images = to_float(source.read_many(range(min(512, len(source))))).to(device)
    curve = robustness_curve(as_network(loaded.model), loaded.objective, images)
    base = curve[0].loss
    return [
        {"method": run.label, "seed": run.seed, **vars(point), "loss_over_clean": point.loss / base} for point in curve
    ]


def averages(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the seeds."""
    table = []
    for method, sigma in dict.fromkeys((p["method"], p["sigma"]) for p in points):
        here = [p for p in points if (p["method"], p["sigma"]) == (method, sigma)]
        columns = ("output_change", "gain", "loss", "loss_over_clean")
        table.append({"method": method, "sigma": sigma} | {c: mean(p[c] for p in here) for c in columns})
    return table


def distribution_claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Lemma 3.2's size, and the two numbers of Sec. 4.1."""
    sizes = ", ".join(f"{row['data']} {row['mean_norm2_over_m']:.3f} (sd {row['sd_norm2_over_m']:.3f})" for row in rows)
    ratios = ", ".join(
        f"{row['data']} mean {row['mean_ratio']:.2f}, 97% below {row['ratio_97']:.2f}, {row['share_below_5']:.1%} below 5"
        for row in rows
    )
    return [
        Claim(
            "||x_t||^2 is of the size of m on common data (Lemma 3.2: 0.82 m for U[-1, 1] and E[abar] = 0.27)",
            f"mean of ||x_t||^2 / m: {sizes}",
            all(0.5 < row["mean_norm2_over_m"] < 1.5 for row in rows),
        ),
        Claim(
            "||eps||^2 / ||x_t||^2 is 1.22 on average and more than 97% of it is below 5",
            ratios,
            all(abs(row["mean_ratio"] - 1.22) < 0.122 and row["share_below_5"] > 0.97 for row in rows),
        ),
    ]


def noise_claim(points: list[dict[str, Any]]) -> Claim:
    """At every sigma, the loss of CS and LS grows by a smaller factor than that of none."""
    table = averages(points)
    growth = {(row["method"], row["sigma"]): row["loss_over_clean"] for row in table}
    sigmas = [sigma for method, sigma in growth if method == "none" and sigma > 0]
    ours = [
        method for method in dict.fromkeys(row["method"] for row in table) if method.startswith("cs") or method == "ls"
    ]
    shown = "; ".join(
        f"sigma {sigma:g}: " + ", ".join(f"{m} x{growth[m, sigma]:.3f}" for m in ("none", "rsqrt2", *ours))
        for sigma in (0.05, 0.2)
    )
    wins = {method: sum(growth[method, s] < growth["none", s] for s in sigmas) for method in ours}
    listed = ", ".join(f"{method} at {count} of {len(sigmas)} sizes" for method, count in wins.items())
    return Claim(
        "CS and LS resist extra noise better than the original (Fig. 3c)",
        f"growth of the loss, mean over seeds: {shown}; below none: {listed}",
        all(count == len(sigmas) for count in wins.values()),
    )


def draw(sizes: dict[str, Any], ratios: dict[str, Any], points: list[dict[str, Any]], path: Path) -> None:
    """Two distributions and two curves."""
    figure, ((size, ratio), (growth, gain)) = plt.subplots(2, 2, figsize=(11, 7.4), layout="constrained")
    for bar, (name, values) in zip(BARS, sizes.items(), strict=False):
        size.hist(values, 80, range=(0, 2), color=bar, alpha=0.55, density=True, label=name)
        ratio.hist(ratios[name], 80, range=(0, 8), color=bar, alpha=0.55, density=True, label=name)
    size.axvline(1 - 2 / 3 * 0.27, color="#444444", linestyle="--", linewidth=1, label="Lemma 3.2, U[-1, 1]: 0.82")
    ratio.axvline(5, color="#444444", linestyle="--", linewidth=1, label="5")
    table = averages(points)
    plain = {row["sigma"]: row["loss_over_clean"] for row in table if row["method"] == "none"}
    for name in dict.fromkeys(row["method"] for row in table):
        here = [row for row in table if row["method"] == name and row["sigma"] > 0]
        x = [row["sigma"] for row in here]
        style = {"color": colour(name), "marker": "o", "markersize": 3.5, "label": name}
        growth.plot(x, [100 * (row["loss_over_clean"] / plain[row["sigma"]] - 1) for row in here], **style)
        gain.plot(x, [row["gain"] for row in here], **style)
    dress(size, "(a) squared norm of the network's input", "||x_t||² / m", "density")
    dress(ratio, "(b) target over input", "||ε||² / ||x_t||²", "density")
    dress(growth, "(c) growth of the loss with extra input noise, against none", "σ of the extra noise", "%")
    dress(gain, "(d) change of the output per change of the input", "σ of the extra noise")
    for axes in (growth, gain):
        axes.set_xscale("log")
    for axes in (size, ratio, growth):
        axes.legend(frameon=False, fontsize=8)
    save(figure, path)


@dataclass(frozen=True)
class RobustnessPoint:
    """The effect of extra noise of one size, as means over the images."""

    sigma: float
    output_change: float  # ||f(x + sigma delta) - f(x)|| / ||f(x)||
    gain: float  # ||f(x + sigma delta) - f(x)|| / ||sigma delta||; Theorem 3.4 bounds it; nan at sigma = 0
    loss: float


@torch.no_grad()
def robustness_curve(
    network: Network,  # (x, time) -> prediction, as from scalelong.backbones.as_network
    objective: Objective,
    images: Tensor,  # (B, C, H, W) in [-1, 1], on the network's device
    sigmas: Sequence[float] = SIGMAS,
    *,
    seed: int = 0,
    chunk: int = 256,
) -> list[RobustnessPoint]:
    """Output change and loss when the network sees x_t + sigma * delta, delta ~ N(0, I), instead of x_t.

    Times, noises and extra noises are functions of the seed, so methods can be compared.

    >>> from scalelong.diffusion import VPSDE
    >>> points = robustness_curve(lambda x, time: 3 * x, Objective(VPSDE()), torch.zeros(8, 1, 4, 4), (0.1,))
    >>> round(points[0].gain, 3)
    3.0
    """
    _check(images, sigmas)
    parts = [
        _measure(network, objective, images[start : start + chunk], start, sigmas, seed)
        for start in range(0, len(images), chunk)
    ]
    found = torch.cat(parts, dim=1).double().mean(1).tolist()  # (sigmas, B, 3) -> means
    return [RobustnessPoint(float(sigma), *row) for sigma, row in zip(sigmas, found, strict=True)]


def _measure(
    network: Network, objective: Objective, images: Tensor, start: int, sigmas: Sequence[float], seed: int
) -> Tensor:
    """(sigmas, B, 3): relative change, gain and loss of each image."""
    index = torch.arange(start, start + len(images), device=images.device)
    process, shape = objective.process, images.shape[1:]
    t, noise = draw_time_and_noise(process, seed, index, shape)
    extra = normal(seed, "extra noise", index, shape)

    def run(sigma: float) -> tuple[Tensor, Tensor]:
        """Prediction and loss at x_t + sigma * extra."""
        outputs: list[Tensor] = []

        def perturbed(x: Tensor, time: Tensor) -> Tensor:
            outputs.append(network(x + sigma * extra, time).float())
            return outputs[-1]

        loss = objective.loss(perturbed, images, noise, t)
        return outputs[-1], loss

    plain, rows = run(0.0)[0], []
    for sigma in sigmas:
        output, loss = run(sigma)
        change = (output - plain).flatten(1).norm(dim=1)
        relative = change / plain.flatten(1).norm(dim=1)
        gain = change / (sigma * extra.flatten(1).norm(dim=1)) if sigma else torch.full_like(change, math.nan)
        rows.append(torch.stack([relative, gain, loss], dim=1))
    return torch.stack(rows)


def _check(images: Tensor, sigmas: Sequence[float]) -> None:
    if images.ndim < 2 or len(images) == 0:
        raise ValueError(f"images: at least one is needed, (B, ...), got shape {tuple(images.shape)}")
    if not images.is_floating_point():
        raise TypeError(f"images: must be floats in [-1, 1], got {images.dtype}; convert with scalelong.data.to_float")
    wrong = [sigma for sigma in sigmas if not (math.isfinite(sigma) and sigma >= 0)]
    if wrong or not sigmas:
        raise ValueError(f"sigmas: must be numbers of at least 0, got {wrong or 'none'}; for example {SIGMAS}")
