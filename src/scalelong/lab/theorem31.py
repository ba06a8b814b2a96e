"""Theorem 3.1: ||h_i||^2 lies within (1 -/+ rho)^2 [c_1 ||x||^2 sum_j kappa_j^2 + c_2] (Eq. 4; Eq. 50 of its proof).

Exact mean over the weights, at every width m, with gain g: each block's last matrix is independent of the skip and has mean
zero, so squares add without a cross term: E||h_(i-1)||^2 = g (kappa_i^2 g^i ||x||^2 + E||h_i||^2), hence

    E||h_i||^2 = ||x||^2 [sum_{j > i} kappa_j^2 g^(2j - i) + g^(2N + 1 - i)]

Shapes: R networks, N skips, S sets of coefficients, i the index of h_i.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.stats
import torch
from matplotlib.figure import Figure
from torch import Tensor

from scalelong.lab import Finding, Study, judge
from scalelong.lab.matrix_unet import GAINS, METHODS, MatrixUNet, coefficients_of, matrices, noisy_inputs
from scalelong.random import uniform
from scalelong.report.colours import BLUE, GREEN, GREY, ORANGE, PINK
from scalelong.report.plots import finish, panels

LAYERS = 2
UNIT, PAPER = GAINS["unit"], GAINS["paper"]


def coefficient_sets(num_skips: int, seed: int) -> Tensor:
    """(S, N) float64: every method at several kappas, then random sets from U[0, 1]^N."""
    named = [coefficients_of(method, num_skips, kappa) for kappa in (0.3, 0.5, 0.7, 0.9) for method in METHODS[1:]]
    random = uniform(seed, "coefficients", torch.arange(12), (num_skips,))
    return torch.cat([torch.tensor([[1.0] * num_skips, *named], dtype=torch.float64), random])


@torch.no_grad()
def change_gain_(model: MatrixUNet, before: float, after: float) -> MatrixUNet:
    """The same random weights at another gain: the last matrix of each block is multiplied by sqrt(after / before)."""
    for block in model.blocks:
        matrices(block)[-1].mul_(math.sqrt(after / before))
    return model


@torch.no_grad()
def hidden_squared(model: MatrixUNet, x: Tensor, sets: Tensor) -> Tensor:
    """||h_i||^2 for every set of coefficients, (N + 1, S, B) float64; the encoder runs once for all sets."""
    hidden = model.hidden(x, list(sets.to(x.dtype).T[:, :, None, None]))
    return torch.stack([h.double().square().sum(-1).expand(len(sets), -1) for h in hidden])


def feedforward_spread(width: int, layers: int, num_blocks: int) -> float:
    """Relative standard deviation of ||h||^2 after blocks in a row (all kappa = 0), exact.

    Each ReLU layer multiplies E||h||^4 / (E||h||^2)^2 by 1 + 5/m, each last matrix by 1 + 2/m.
    """
    per_block = (1 + 5 / width) ** (layers - 1) * (1 + 2 / width)
    return float(math.sqrt(per_block**num_blocks - 1))


def fit_line(x: Tensor, y: Tensor) -> dict[str, float]:
    """Least squares in one variable: slope, intercept and R^2."""
    line = scipy.stats.linregress(x.double().numpy(), y.double().numpy())
    return {"slope": float(line.slope), "intercept": float(line.intercept), "r_squared": float(line.rvalue**2)}


def measure_ratios(
    width: int, sets: Tensor, networks: int, seed: int, gains: tuple[float, ...] = (UNIT,)
) -> dict[float, Tensor]:
    """||h_i||^2 / ||x||^2, (R, N + 1, S) for each gain; every network has its own input, all gains the same weights."""
    model = MatrixUNet(width, LAYERS, sets.shape[1])
    generator = torch.Generator().manual_seed(seed)
    inputs, _ = noisy_inputs(networks, width, seed)
    found: dict[float, list[Tensor]] = {gain: [] for gain in gains}
    for x in inputs:
        model.sample_weights_(generator, gains[0])
        for before, gain in zip((gains[0], *gains), gains, strict=False):
            change_gain_(model, before, gain)
            found[gain].append(hidden_squared(model, x[None], sets)[:, :, 0] / float(x.double().square().sum()))
    return {gain: torch.stack(values) for gain, values in found.items()}


def index_effect(num_skips: int, width: int, seed: int) -> tuple[float, float]:
    """(largest change of h_i when kappa_i is doubled, smallest when kappa_(i+1) is), relative, over i >= 1."""
    base = torch.full((1, num_skips), 0.7, dtype=torch.float64)
    doubled = base + 0.7 * torch.eye(num_skips, dtype=torch.float64)
    ratios = measure_ratios(width, torch.cat([base, doubled]), 1, seed)[UNIT][0]  # (N + 1, 1 + N)
    change = (ratios[:, 1:] / ratios[:, :1] - 1).abs()  # [i, j - 1]: h_i, kappa_j doubled
    return float(change.diagonal(-1).max()), float(change.diagonal().min())


def study(quick: bool = False, seed: int = 0) -> Study:
    """The index, the weights under the stated initialisation, the fit with unit gain, and rho."""
    shapes = [(4, 64, 16), (8, 64, 16)] if quick else [(4, 256, 64), (8, 256, 64), (16, 512, 24), (32, 512, 20)]
    fits = [_fit(n, m, networks, seed) for n, m, networks in shapes]
    weights = skip_weights(4 if quick else 6, 64 if quick else 128, 100 if quick else 300, seed)
    spread = _spread(quick, seed)
    findings = (
        _about_index(fits, *index_effect(8, 64, seed)),
        _about_weights(weights, fits),
        _about_fit(fits),
        *_about_spread(spread),
    )
    return Study("theorem31", findings, {"fits": fits, "weights": weights, "spread": spread})


def _fit(num_skips: int, width: int, networks: int, seed: int) -> dict[str, Any]:
    """Lines through ||h_0||^2 and the middle ||h_i||^2, means over the networks, against sums of kappa_j^2."""
    sets = coefficient_sets(num_skips, seed)
    ratios = measure_ratios(width, sets, networks, seed + num_skips, (UNIT, PAPER))
    squares, mean = sets.square(), ratios[UNIT].mean(0)
    total, half = squares.sum(1), num_skips // 2
    slopes = torch.tensor([fit_line(total, one[0])["slope"] for one in ratios[UNIT]])
    paper = ratios[PAPER].mean(0)[0] / PAPER ** (2 * num_skips + 1)
    return {
        "num_skips": num_skips,
        "width": width,
        "networks": networks,
        "sums": total.tolist(),
        "unit": mean[0].tolist(),
        "unit_fit": fit_line(total, mean[0]),
        "slope_error": float(slopes.std() / math.sqrt(networks)),
        "from_i": fit_line(squares[:, half - 1 :].sum(1), mean[half]),
        "from_next": fit_line(squares[:, half:].sum(1), mean[half]),
        "paper_fit": fit_line(total, paper),
    }


def skip_weights(num_skips: int, width: int, networks: int, seed: int) -> dict[str, Any]:
    """The weight of each kappa_j^2 in ||h_0||^2 / ||x||^2: with kappa_j alone on, less with all off."""
    sets = torch.cat([torch.zeros(1, num_skips), torch.eye(num_skips)]).double()
    ratios = measure_ratios(width, sets, networks, seed, (UNIT, PAPER))
    found: dict[str, Any] = {"j": list(range(1, num_skips + 1)), "width": width, "networks": networks}
    for name, gain in GAINS.items():
        differences = ratios[gain][:, 0, 1:] - ratios[gain][:, 0, :1]
        found[name] = differences.mean(0).tolist()
        found[f"{name}_error"] = (differences.std(0) / math.sqrt(networks)).tolist()
        found[f"{name}_middle"] = float(ratios[gain][:, 0, 0].mean())
        found[f"{name}_exact"] = [gain ** (2 * j) for j in found["j"]]
    return found


def rho_of(ratios: Tensor, expected: float) -> float:
    """The rho of Eq. 4 within which 95% of the networks stay: the quantile of | ||h|| / sqrt(E||h||^2) - 1 |."""
    return float(((ratios / expected).sqrt() - 1).abs().quantile(0.95))


def _spread(quick: bool, seed: int) -> dict[str, Any]:
    """rho of h_0 with all kappa = 1 and with all kappa = 0: against m at N = 2, and against N at one m."""
    widths = {64: 200, 128: 200, 256: 200} if quick else {32: 400, 64: 400, 128: 400, 256: 300, 512: 200}  # m: networks
    depths, at, networks = ((1, 4, 8), 64, 100) if quick else ((1, 2, 4, 8, 16), 256, 120)

    def measure(num_skips: int, width: int, networks: int) -> tuple[float, float]:
        sets = torch.stack([torch.ones(num_skips), torch.zeros(num_skips)]).double()
        ratios = measure_ratios(width, sets, networks, seed + 7 * width + num_skips)[UNIT][:, 0]
        return rho_of(ratios[:, 0], num_skips + 1), rho_of(ratios[:, 1], 1)

    by_width = [measure(2, width, count) for width, count in widths.items()]
    by_depth = [measure(n, at, networks) for n in depths]
    return {
        "widths": list(widths),
        "by_width": by_width,
        "gaussian_by_width": [1.96 * feedforward_spread(width, LAYERS, 5) / 2 for width in widths],  # half the square's
        "width_slope": _log_slope(tuple(widths), [one for one, _ in by_width]),
        "depths": list(depths),
        "at_width": at,
        "by_depth": by_depth,
        "depth_slope": _log_slope(depths, [one for one, _ in by_depth]),
    }


def _log_slope(x: Sequence[int], y: Sequence[float]) -> float:
    """The exponent p of y ~ x^p."""
    return fit_line(torch.tensor(x).double().log(), torch.tensor(y).double().log())["slope"]


def _about_index(fits: list[dict[str, Any]], own: float, following: float) -> Finding:
    clearest = max(fits, key=lambda fit: fit["from_next"]["r_squared"] - fit["from_i"]["r_squared"])
    return judge(
        "Theorem 3.1, Eq. 4: ||h_i||^2 depends on sum_{j >= i} kappa_j^2",
        "kappa_i moves h_i",
        f"doubling kappa_i changes ||h_i||^2 by {own:.0%}, doubling kappa_(i+1) by at least {following:.0%}; at "
        f"N = {clearest['num_skips']}, i = N/2: R^2 {clearest['from_i']['r_squared']:.3f} from j = i, "
        f"{clearest['from_next']['r_squared']:.3f} from j = i + 1",
        own < 1e-6 < following,
        "fails as printed: the sum starts at j = i + 1, as in its proof (Eq. 50)",
    )


def _about_weights(weights: dict[str, Any], fits: list[dict[str, Any]]) -> Finding:
    found = torch.tensor(weights["paper"]).double()
    off = (found - torch.tensor(weights["paper_exact"]).double()).abs() / torch.tensor(weights["paper_error"]).double()
    growth = math.exp(fit_line(torch.tensor(weights["j"]), found.clamp(min=1e-12).log())["slope"])
    share = weights["paper_middle"] / (weights["paper_middle"] + float(found.sum()))
    r_squared = ", ".join(f"{fit['paper_fit']['r_squared']:.2f} (N = {fit['num_skips']})" for fit in fits)
    return judge(
        "Theorem 3.1 with every matrix N(0, 2/m), as stated",
        "every kappa_j^2 has the same weight c_1; the middle block is a small remainder",
        f"the weight grows by {growth:.2f} per j (exact: 4), within {float(off.max()):.1f} standard errors of 4^j; the "
        f"middle block is {share:.0%} of ||h_0||^2 at kappa = 1; R^2 of the printed form {r_squared}",
        float(off.max()) < 4 and growth > 2,
        "fails as printed: no ReLU follows a block's last N(0, 2/m) matrix, so each block doubles ||.||^2: "
        "E||h_i||^2 = ||x||^2 2^-i [sum_{j>i} 4^j kappa_j^2 + 2 * 4^N]",
    )


def _about_fit(fits: list[dict[str, Any]]) -> Finding:
    pairs = [(fit, fit["unit_fit"]) for fit in fits]
    measured = "; ".join(
        f"N = {fit['num_skips']}, m = {fit['width']}: c_1 = {line['slope']:.2f} +- {fit['slope_error']:.2f}, "
        f"c_2 = {line['intercept']:.2f} ||x||^2, R^2 = {line['r_squared']:.4f}"
        for fit, line in pairs
    )
    return judge(
        "Theorem 3.1 with unit-gain blocks (last matrix N(0, 1/m)), sum from i + 1",
        "c_1 = 1 and c_2 = ||x||^2: c_2 is the middle block's path, not a constant",
        measured,
        all(abs(line["slope"] - 1) < 4 * fit["slope_error"] and line["r_squared"] > 0.9 for fit, line in pairs),
        "holds up to constants: c_2 is proportional to ||x||^2",
    )


def _about_spread(spread: dict[str, Any]) -> tuple[Finding, Finding]:
    found = ", ".join(f"{one:.2f}" for one, _ in spread["by_depth"])
    width = judge(
        "Theorem 3.1: rho shrinks with the width, probability 1 - O(N) exp(-Omega(m rho^2))",
        "rho ~ m^-0.50",
        f"the rho within which 95% of networks stay ~ m^{spread['width_slope']:.2f}, from {spread['by_width'][0][0]:.2f} at "
        f"m = {spread['widths'][0]} to {spread['by_width'][-1][0]:.2f} at m = {spread['widths'][-1]} (N = 2)",
        abs(spread["width_slope"] + 0.5) < 0.15,
    )

    depth = judge(
        "Theorem 3.1: the exponent m rho^2 does not contain N",
        "at a fixed probability rho does not grow with N",
        f"rho {found} for N = {', '.join(map(str, spread['depths']))} at m = {spread['at_width']}, ~ "
        f"N^{spread['depth_slope']:.2f}",
        spread["by_depth"][-1][0] > 1.3 * spread["by_depth"][0][0],
        "fails as printed: the longest path has 2N + 1 blocks and each adds (5 (l - 1) + 2) / m to the relative variance, "
        "so depth belongs in the exponent: m rho^2 / (N l) for that path",
    )
    return width, depth


def figure(data: Mapping[str, Any]) -> Figure:
    """The fit of h_0, the weight of each skip, and rho."""
    canvas, (fit, weight, rho) = panels(3)
    for row, colour in zip(data["fits"], (BLUE, ORANGE, GREEN, PINK), strict=False):
        label = f"N = {row['num_skips']}, m = {row['width']}"
        fit.plot(np.array(row["sums"]) + 1, row["unit"], "o", markersize=4, alpha=0.8, color=colour, label=label)
    ends = np.array([1.0, max(max(row["sums"]) for row in data["fits"]) + 1])
    fit.plot(ends, ends, color="black", linewidth=1, label="exact mean (c₁ = 1, c₂ = ||x||²)")
    finish(fit, "Unit-gain blocks: mean over networks", "Σ κⱼ² + 1", "||h₀||² / ||x||²", log="xy")
    found = data["weights"]
    labels = {"paper": "every matrix N(0, 2/m), as stated", "unit": "unit-gain blocks"}
    for (name, label), colour in zip(labels.items(), (PINK, BLUE), strict=True):
        errors = 2 * np.array(found[f"{name}_error"])
        weight.errorbar(found["j"], found[name], errors, fmt="o", color=colour, markersize=5, capsize=3, label=label)
        weight.plot(found["j"], found[f"{name}_exact"], color=colour, linewidth=1)
    finish(weight, "Weight of κⱼ² in ||h₀||² (lines: 4ʲ and 1)", "j (1 = outermost)", "weight", log="y")
    spread = data["spread"]
    widths, (ones, zeros) = np.array(spread["widths"], dtype=float), np.array(spread["by_width"]).T
    rho.plot(widths, ones, "o-", color=BLUE, markersize=5, label="all κ = 1")
    rho.plot(widths, zeros, "s", color=ORANGE, markersize=5, label="all κ = 0")
    label = "all κ = 0, from the exact variance"
    rho.plot(widths, spread["gaussian_by_width"], color=ORANGE, linewidth=1, label=label)
    rho.plot(widths, ones[-1] * np.sqrt(widths[-1] / widths), ":", color=GREY, label="m^(-1/2)")
    title, ticks = "ρ within which 95% of networks stay (N = 2)", (0.2, 0.3, 0.5, 0.8)
    finish(rho, title, "width m", "ρ", log="xy", xticks=spread["widths"], yticks=ticks)
    return canvas
