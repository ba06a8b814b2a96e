"""Fig. 3: the distributions of ||x_t||^2 and ||eps||^2 / ||x_t||^2, and what extra noise on the input does to each method.

    python experiments/fig03_distributions.py                          # minutes on one core
    python experiments/fig03_distributions.py --scale gpu --jobs 3     # U-ViT-S/2 on CIFAR-10

The trained networks are those of Fig. 1 and 12. The paper shows FID against extra noise; here it is the loss and the
change of the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import tyro
from common import Options, grid, setting, trained
from output import Claim, dress, print_claims, print_table, save, write_csv, write_summary
from trained_models import robustness_curve

from scalelong.backbones import as_network
from scalelong.data import Source, load_source, to_float
from scalelong.diffusion import VPSDE, draw_time_and_noise
from scalelong.report.colours import PALETTE, colour
from scalelong.runs.reader import Run
from scalelong.stability import recommend_kappa
from scalelong.training import load_run

NAME = "fig03-distributions"
SAMPLES = 4096
BARS = tuple(light for light, _ in PALETTE[1:4])


@dataclass(frozen=True)
class Figure3(Options):
    """All options."""

    data: tuple[str, ...] = ()  # whose distributions; default: digits and emoji32 (cpu), cifar10 (gpu)


def main() -> None:
    options = tyro.cli(Figure3, description=__doc__)
    out = options.folder(NAME)
    names = options.data or (("cifar10",) if options.scale == "gpu" else ("digits", "emoji32"))
    sizes = {name: squared_norms(load_source(name)) for name in names}
    ratios = {name: np.array(recommend_kappa(load_source(name), VPSDE(), 6, samples=SAMPLES).ratios) for name in names}
    runs = trained(grid(options), options)
    points = [point for run in runs for point in robustness(run)]
    distributions = [summary_row(name, sizes[name], ratios[name]) for name in names]
    write_csv(distributions, out / "distributions.csv")
    write_csv(points, out / "extra_noise.csv")
    draw(sizes, ratios, points, out / "fig03.png")
    claims = [*distribution_claims(distributions), noise_claim(points)]
    write_summary(out, claims, setting(runs[0].config), distributions=distributions, extra_noise=averages(points))
    print_claims(claims)
    for table in (distributions, averages(points)):
        print()
        print_table(table)


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


if __name__ == "__main__":
    main()
