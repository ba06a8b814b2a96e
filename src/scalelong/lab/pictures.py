"""One picture per statement, drawn from the numbers of its study."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

from scalelong.diffusion import DDPM, VPSDE
from scalelong.lab.findings import Study
from scalelong.lab.networks import METHODS
from scalelong.lab.sensitivity import BOUNDS, KAPPA, TOLERANCE, cs_over_universal

BLUE, ORANGE, GREEN, RED, GREY = "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#8c8c8c"
METHOD_COLOURS = dict(zip(METHODS, (BLUE, ORANGE, GREEN, RED), strict=True))
FORMS = {"product": "o--", "local": "s-", "path": "^:"}
Data = Mapping[str, Any]


def draw(study: Study, folder: Path) -> Path:
    """Write the picture of a study and return its path."""
    path = folder / f"{study.name}.png"
    figure = {"lemma32": _lemma32, "theorem31": _theorem31, "theorem33": _theorem33, "theorem34": _theorem34}[
        study.name
    ](study.data)
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return path


def _dress(axes: plt.Axes, title: str, xlabel: str, ylabel: str) -> None:
    axes.set_title(title, fontsize=10.5, loc="left")
    axes.set_xlabel(xlabel, fontsize=9)
    axes.set_ylabel(ylabel, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _lemma32(data: Data) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    u = torch.linspace(0, 1, 201, dtype=torch.float64)
    for label, process, colour, marker in (("VP-SDE", VPSDE(), BLUE, "o"), ("DDPM", DDPM(), ORANGE, "x")):
        alpha, _ = process.marginal(process.time_from_uniform(u.clamp(max=1 - 1e-9)).double())
        style = "-" if label == "VP-SDE" else "--"
        axes.plot(u, 1 - 2 * alpha.square() / 3, style, color=colour, linewidth=1.6, label=f"{label}: 1 - 2 abar / 3")
        curve = data["curves"][label]
        axes.plot(curve["u"], curve["mean"], marker, color=colour, markersize=5, label=f"{label}: Monte Carlo")
    alpha, _ = VPSDE().marginal(u)
    for name, colour in (("digits", GREEN), ("emoji32", RED)):
        second = data["second_moments"][name]
        axes.plot(u, 1 - (1 - second) * alpha.square(), color=colour, linewidth=1.2)
        curve = data["curves"][name]
        axes.plot(curve["u"], curve["mean"], "s", color=colour, markersize=4, label=f"{name}: v = {second:.2f}, VP-SDE")
    _dress(axes, "Lemma 3.2: the size of the network's input", "t / T", "E||x_t||² / m")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def _theorem31(data: Data) -> plt.Figure:
    figure, (fit, weight, rho) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    for row, colour in zip(data["fits"], (BLUE, ORANGE, GREEN, RED), strict=False):
        label = f"N = {row['num_skips']}, m = {row['width']}"
        fit.plot(np.array(row["sums"]) + 1, row["unit"], "o", markersize=4, alpha=0.8, color=colour, label=label)
    ends = np.array([1.0, max(max(row["sums"]) for row in data["fits"]) + 1])
    fit.plot(ends, ends, color="black", linewidth=1, label="exact mean (c₁ = 1, c₂ = ||x||²)")
    fit.loglog()
    _dress(fit, "Unit-gain blocks: mean over networks", "Σ κⱼ² + 1", "||h₀||² / ||x||²")
    found = data["weights"]
    for name, colour, label in (
        ("paper", RED, "every matrix N(0, 2/m), as stated"),
        ("unit", BLUE, "unit-gain blocks"),
    ):
        errors = 2 * np.array(found[f"{name}_error"])
        weight.errorbar(found["j"], found[name], errors, fmt="o", color=colour, markersize=5, capsize=3, label=label)
        weight.plot(found["j"], found[f"{name}_exact"], color=colour, linewidth=1)
    weight.set_yscale("log")
    _dress(weight, "Weight of κⱼ² in ||h₀||² (lines: 4ʲ and 1)", "j (1 = outermost)", "weight")
    _rho(rho, data["spread"])
    for axes in (fit, weight, rho):
        axes.legend(frameon=False, fontsize=8)
    return figure


def _rho(axes: plt.Axes, spread: Data) -> None:
    widths = np.array(spread["widths"], dtype=float)
    ones, zeros = np.array(spread["by_width"]).T
    axes.plot(widths, ones, "o-", color=BLUE, markersize=5, label="all κ = 1")
    axes.plot(widths, zeros, "s", color=ORANGE, markersize=5, label="all κ = 0")
    axes.plot(
        widths, spread["gaussian_by_width"], color=ORANGE, linewidth=1, label="all κ = 0, from the exact variance"
    )
    axes.plot(widths, ones[-1] * np.sqrt(widths[-1] / widths), ":", color=GREY, label="m^(-1/2)")
    axes.loglog()
    axes.set_xticks(widths, [f"{int(width)}" for width in widths])
    axes.set_yticks([0.2, 0.3, 0.5, 0.8], ["0.2", "0.3", "0.5", "0.8"])
    axes.minorticks_off()
    _dress(axes, "ρ that 95% of networks keep (N = 2)", "width m", "ρ")


def _theorem33(data: Data) -> plt.Figure:
    figure, (depth, kappa, paper) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    for method, colour in METHOD_COLOURS.items():
        for sent, style in (("residual", "o-"), ("fixed", "s--")):
            rows = [r for r in data["table"] if (r["init"], r["method"], r["sent"]) == ("unit", method, sent)]
            label = method if sent == "residual" else None
            depth.plot(
                [r["num_skips"] for r in rows], [r["high"] for r in rows], style, color=colour, label=label, ms=4
            )
    depth.plot([], [], "s--", color=GREY, ms=4, label="residual independent of the weights")
    depth.loglog()
    depth.set_xticks([row["num_skips"] for row in rows], [str(row["num_skips"]) for row in rows])
    depth.set_yticks([2, 5, 10, 20, 50, 100], ["2", "5", "10", "20", "50", "100"])
    depth.minorticks_off()
    _dress(
        depth,
        "Unit-gain blocks: largest over matrices, median network",
        "number of skips N",
        "||∇l||² / (l ||x||² (Σκ² + 1))",
    )
    for sent, colour in (("residual", BLUE), ("fixed", ORANGE)):
        rows = [row for row in data["sweep"] if row["sent"] == sent]
        low, high = ([row[key] for row in rows] for key in ("low", "high"))
        at = [row["kappa"] for row in rows]
        label = "true residual" if sent == "residual" else "independent residual"
        kappa.fill_between(at, low, high, color=colour, alpha=0.35, label=label)
    kappa.set_yscale("log")
    kappa.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    kappa.minorticks_off()
    _dress(kappa, "CS, N = 8: range of the ratio by κ", "κ", "same ratio, smallest to largest")
    for init, method, sent, colour, label in (
        ("paper", "none", "residual", RED, "N(0, 2/m) as stated, κ = 1"),
        ("unit", "cs", "fixed", GREEN, "unit gain, cs(0.7), without c₃"),
    ):
        rows = [r for r in data["table"] if (r["init"], r["method"], r["sent"]) == (init, method, sent)]
        paper.plot(
            [r["num_skips"] for r in rows], [r["printed_max"] for r in rows], "o-", color=colour, label=label, ms=4
        )
    depths = np.array(sorted({r["num_skips"] for r in data["table"]}), dtype=float)
    paper.plot(depths, 4.0**depths, ":", color=GREY, label="4ᴺ")
    paper.set_yscale("log")
    _dress(paper, "Ratio to the bound as printed", "number of skips N", "||∇l||² / (l ||x||² Σκ²), largest")
    for axes in (depth, kappa, paper):
        axes.legend(frameon=False, fontsize=8)
    return figure


def _theorem34(data: Data) -> plt.Figure:
    figure, (share, tight, order) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    _shares(share, data)
    depths = [row["num_skips"] for row in data["tightness"]]
    for method, colour in METHOD_COLOURS.items():
        rows = [row["methods"][method] for row in data["tightness"]]
        for bound, style in FORMS.items():
            tight.plot(depths, [row["worst"] / row[bound] for row in rows], style, color=colour, markersize=4)
        tight.plot([], [], color=colour, label=method)
    for bound, style in FORMS.items():
        tight.plot([], [], style, color=GREY, markersize=4, label=f"{bound} form")
    tight.set_yscale("log")
    _dress(tight, "||J|| at x over each bound (1 = tight)", "number of skips N", "share of the bound reached")
    n = np.array(depths, dtype=float)
    for key, colour, label in (
        ("skips", GREEN, "sum over the skips"),
        ("product", BLUE, "whole bound, with c₀"),
        ("worst", RED, "||J|| measured"),
    ):
        values = [cs_over_universal(row, key) for row in data["tightness"]]
        order.plot(n, values, "o-", color=colour, markersize=4, label=label)
    order.plot(n, KAPPA ** (n - 2), ":", color="black", linewidth=1.6, label="claimed: κ^(N-2)")
    order.set_yscale("log")
    _dress(order, f"CS over universal scaling, κ = {KAPPA}", "number of skips N", "ratio")
    for axes in (share, tight, order):
        axes.legend(frameon=False, fontsize=8)
    return figure


def _shares(axes: plt.Axes, data: Data) -> None:
    """Histograms of measured / bound, and the counterexample to the printed form beyond 1."""
    bins = np.logspace(-12, 2, 57)
    for bound, colour in zip(BOUNDS, (GREY, BLUE, ORANGE, GREEN), strict=True):
        values = [case["measured"] / case[bound] for case in data["cases"] if case[bound] > 0]
        values = [min(value, 1 - 1e-9) if value <= TOLERANCE else value for value in values]  # 1 belongs to the left
        axes.hist(np.clip(values, bins[0], None), bins, histtype="step", color=colour, linewidth=1.4, label=bound)
    broken = [case["measured"] / case["printed"] for case in data["broken"] if case["stretch"] > 1]
    axes.plot(broken, np.full(len(broken), 8.0), "x", color=RED, markersize=7, label="counterexamples to Eq. 7")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    _dress(
        axes,
        f"{len(data['cases']):,} random networks: none beyond 1",
        "measured / bound (first bar: this or less)",
        "networks",
    )
