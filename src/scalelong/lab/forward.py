"""Theorem 3.1: ||h_i||^2 lies within (1 -/+ rho)^2 [c_1 ||x||^2 sum_j kappa_j^2 + c_2] (Eq. 4; Eq. 50 of its proof).

Shapes: R networks, N skips, S sets of coefficients, i the index of h_i.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from scalelong.lab.findings import UP_TO_CONSTANTS, Finding, Study, fails, judged
from scalelong.lab.matrix_unet import MatrixUNet
from scalelong.lab.networks import (
    PAPER_GAIN,
    UNIT_GAIN,
    change_gain_,
    coefficient_sets,
    draw_weights_,
    feedforward_spread,
    hidden_squared,
    mean_hidden_squared,
    noisy_inputs,
)

LAYERS = 2


@dataclass(frozen=True)
class LineFit:
    """y = slope * x + intercept by least squares."""

    slope: float
    intercept: float
    r_squared: float


def fit_line(x: Tensor, y: Tensor) -> LineFit:
    """Least squares in one variable; R^2 is 1 - residual / total sum of squares."""
    centred = x - x.mean()
    slope = float((centred * (y - y.mean())).sum() / centred.square().sum())
    intercept = float(y.mean() - slope * x.mean())
    residual = (y - slope * x - intercept).square().sum()
    return LineFit(slope, intercept, float(1 - residual / (y - y.mean()).square().sum()))


def measure_ratios(
    width: int, sets: Tensor, networks: int, seed: int, gains: tuple[float, ...] = (UNIT_GAIN,)
) -> dict[float, Tensor]:
    """||h_i||^2 / ||x||^2, (R, N + 1, S) for each gain; every network has its own input, all gains the same draws."""
    model = MatrixUNet(width, LAYERS, sets.shape[1])
    generator = torch.Generator().manual_seed(seed)
    inputs, _ = noisy_inputs(networks, width, seed)
    found: dict[float, list[Tensor]] = {gain: [] for gain in gains}
    for x in inputs:
        draw_weights_(model, generator, gains[0])
        gain_now = gains[0]
        for gain in gains:
            change_gain_(model, gain_now, gain)
            gain_now = gain
            found[gain].append(hidden_squared(model, x[None], sets)[:, :, 0] / float(x.double().square().sum()))
    return {gain: torch.stack(values) for gain, values in found.items()}


def index_effect(num_skips: int, width: int, seed: int) -> tuple[float, float]:
    """(largest change of h_i when kappa_i is doubled, smallest when kappa_(i+1) is), relative, over i >= 1."""
    base = torch.full((1, num_skips), 0.7, dtype=torch.float64)
    doubled = base + 0.7 * torch.eye(num_skips, dtype=torch.float64)
    ratios = measure_ratios(width, torch.cat([base, doubled]), 1, seed)[UNIT_GAIN][0]  # (N + 1, 1 + N)
    change = (ratios[:, 1:] / ratios[:, :1] - 1).abs()  # [i, j - 1]: h_i, kappa_j doubled
    own = max(float(change[i, i - 1]) for i in range(1, num_skips + 1))
    following = min(float(change[i, i]) for i in range(num_skips))
    return own, following


def study_theorem31(quick: bool = False, seed: int = 0) -> Study:
    """The index, the weights under the stated initialisation, the fit with unit gain, and rho."""
    shapes = [(4, 64, 16), (8, 64, 16)] if quick else [(4, 256, 64), (8, 256, 64), (16, 512, 24), (32, 512, 20)]
    fits = [_fit(n, m, networks, seed) for n, m, networks in shapes]
    weights = skip_weights(4 if quick else 6, 64 if quick else 128, 100 if quick else 300, seed)
    spread = _spread(quick, seed)
    findings = (
        _about_index(fits, index_effect(8, 64, seed)),
        _about_weights(weights, fits),
        _about_fit(fits),
        _about_width(spread),
        _about_depth(spread),
    )
    return Study("theorem31", findings, {"fits": fits, "weights": weights, "spread": spread})


def _fit(num_skips: int, width: int, networks: int, seed: int) -> dict[str, Any]:
    """Fits of h_0 and of the middle h_i over many sets of coefficients, means over the networks."""
    sets = coefficient_sets(num_skips, seed)
    ratios = measure_ratios(width, sets, networks, seed + num_skips, (UNIT_GAIN, PAPER_GAIN))
    squares, mean = sets.square(), ratios[UNIT_GAIN].mean(0)
    total, half = squares.sum(1), num_skips // 2
    slopes = torch.tensor([fit_line(total, one[0]).slope for one in ratios[UNIT_GAIN]])
    paper = ratios[PAPER_GAIN].mean(0)[0] / PAPER_GAIN ** (2 * num_skips + 1)
    exact = torch.tensor([mean_hidden_squared(row, 0, PAPER_GAIN) for row in sets.tolist()])
    exact = exact.double() / PAPER_GAIN ** (2 * num_skips + 1)
    return {
        "num_skips": num_skips,
        "width": width,
        "networks": networks,
        "sums": total.tolist(),
        "unit": mean[0].tolist(),
        "unit_fit": asdict(fit_line(total, mean[0])),
        "slope_error": float(slopes.std() / math.sqrt(networks)),
        "from_i": asdict(fit_line(squares[:, half - 1 :].sum(1), mean[half])),
        "from_next": asdict(fit_line(squares[:, half:].sum(1), mean[half])),
        "paper": paper.tolist(),
        "paper_fit": asdict(fit_line(total, paper)),
        "weighted_fit": asdict(fit_line(exact, paper)),
    }


def skip_weights(num_skips: int, width: int, networks: int, seed: int) -> dict[str, Any]:
    """The weight of each kappa_j^2 in ||h_0||^2 / ||x||^2: with kappa_j alone on, less with all off."""
    sets = torch.cat([torch.zeros(1, num_skips), torch.eye(num_skips)]).double()
    ratios = measure_ratios(width, sets, networks, seed, (UNIT_GAIN, PAPER_GAIN))
    found: dict[str, Any] = {"j": list(range(1, num_skips + 1)), "width": width, "networks": networks}
    for name, gain in (("unit", UNIT_GAIN), ("paper", PAPER_GAIN)):
        differences = ratios[gain][:, 0, 1:] - ratios[gain][:, 0, :1]
        found[name] = differences.mean(0).tolist()
        found[f"{name}_error"] = (differences.std(0) / math.sqrt(networks)).tolist()
        found[f"{name}_middle"] = float(ratios[gain][:, 0, 0].mean())
        found[f"{name}_exact"] = [gain ** (2 * j) for j in found["j"]]
    return found


def rho_of(ratios: Tensor, expected: float) -> float:
    """The rho of Eq. 4 that 95% of the networks keep: the quantile of | ||h|| / sqrt(E||h||^2) - 1 |."""
    return float(((ratios / expected).sqrt() - 1).abs().quantile(0.95))


def _spread(quick: bool, seed: int) -> dict[str, Any]:
    """rho of h_0 with all kappa = 1 and with all kappa = 0: against m at N = 2, and against N at one m."""
    widths = {64: 200, 128: 200, 256: 200} if quick else {32: 400, 64: 400, 128: 400, 256: 300, 512: 200}  # m: networks
    depths, at, networks = ((1, 4, 8), 64, 100) if quick else ((1, 2, 4, 8, 16), 256, 120)

    def measure(num_skips: int, width: int, networks: int) -> tuple[float, float]:
        sets = torch.stack([torch.ones(num_skips), torch.zeros(num_skips)]).double()
        ratios = measure_ratios(width, sets, networks, seed + 7 * width + num_skips)[UNIT_GAIN][:, 0]
        return rho_of(ratios[:, 0], num_skips + 1), rho_of(ratios[:, 1], 1)

    by_width = [measure(2, width, count) for width, count in widths.items()]
    by_depth = [measure(n, at, networks) for n in depths]
    return {
        "widths": list(widths),
        "by_width": by_width,
        "gaussian_by_width": [_gaussian_rho(width, 2) for width in widths],
        "width_slope": _log_slope(tuple(widths), [one for one, _ in by_width]),
        "depths": list(depths),
        "at_width": at,
        "by_depth": by_depth,
        "gaussian_by_depth": [_gaussian_rho(at, n) for n in depths],
        "depth_slope": _log_slope(depths, [one for one, _ in by_depth]),
    }


def _gaussian_rho(width: int, num_skips: int) -> float:
    """rho of the path through the middle (all kappa = 0) if its spread were Gaussian: half that of the square."""
    return 1.96 * feedforward_spread(width, LAYERS, 2 * num_skips + 1) / 2


def _log_slope(x: tuple[int, ...], y: list[float]) -> float:
    return fit_line(torch.tensor(x).double().log(), torch.tensor(y).double().log()).slope


def _about_index(fits: list[dict[str, Any]], effect: tuple[float, float]) -> Finding:
    clearest = max(fits, key=lambda fit: fit["from_next"]["r_squared"] - fit["from_i"]["r_squared"])
    own, following = effect
    return Finding(
        "Theorem 3.1, Eq. 4: ||h_i||^2 depends on sum_{j >= i} kappa_j^2",
        "kappa_i moves h_i",
        f"doubling kappa_i changes ||h_i||^2 by {own:.0%}, doubling kappa_(i+1) by at least {following:.0%}; at "
        f"N = {clearest['num_skips']}, i = N/2: R^2 {clearest['from_i']['r_squared']:.3f} from j = i, "
        f"{clearest['from_next']['r_squared']:.3f} from j = i + 1",
        judged(own == 0 and following > 0, fails("the sum starts at j = i + 1, as in its proof (Eq. 50)")),
    )


def _about_weights(weights: dict[str, Any], fits: list[dict[str, Any]]) -> Finding:
    found = torch.tensor(weights["paper"]).double()
    off = (found - torch.tensor(weights["paper_exact"]).double()).abs() / torch.tensor(weights["paper_error"]).double()
    growth = math.exp(_log_slope_linear(weights["j"], weights["paper"]))
    share = weights["paper_middle"] / (weights["paper_middle"] + float(found.sum()))
    r_squared = ", ".join(f"{fit['paper_fit']['r_squared']:.2f} (N = {fit['num_skips']})" for fit in fits)
    why = (
        "no ReLU follows a block's last N(0, 2/m) matrix, so each block doubles ||.||^2: "
        "E||h_i||^2 = ||x||^2 2^-i [sum_{j>i} 4^j kappa_j^2 + 2 * 4^N]"
    )
    return Finding(
        "Theorem 3.1 with every matrix N(0, 2/m), as stated",
        "every kappa_j^2 has the same weight c_1; the middle block is a small rest",
        f"the weight grows by {growth:.2f} per j (exact: 4), within {float(off.max()):.1f} standard errors of 4^j; the "
        f"middle block is {share:.0%} of ||h_0||^2 at kappa = 1; R^2 of the printed form {r_squared}",
        judged(float(off.max()) < 4 and growth > 2, fails(why)),
    )


def _log_slope_linear(x: list[int], y: list[float]) -> float:
    return fit_line(torch.tensor(x).double(), torch.tensor(y).double().clamp(min=1e-12).log()).slope


def _about_fit(fits: list[dict[str, Any]]) -> Finding:
    def describe(fit: dict[str, Any]) -> str:
        line = fit["unit_fit"]
        return (
            f"N = {fit['num_skips']}, m = {fit['width']}: c_1 = {line['slope']:.2f} +- {fit['slope_error']:.2f}, "
            f"c_2 = {line['intercept']:.2f} ||x||^2, R^2 = {line['r_squared']:.4f}"
        )

    true = all(
        fit["unit_fit"]["r_squared"] > 0.9 and abs(fit["unit_fit"]["slope"] - 1) < 4 * fit["slope_error"]
        for fit in fits
    )
    return Finding(
        "Theorem 3.1 with unit-gain blocks (last matrix N(0, 1/m)), sum from i + 1",
        "c_1 = 1 and c_2 = ||x||^2: c_2 is the middle block's path and no constant",
        "; ".join(describe(fit) for fit in fits),
        judged(true, UP_TO_CONSTANTS + ": c_2 is proportional to ||x||^2"),
    )


def _about_width(spread: dict[str, Any]) -> Finding:
    return Finding(
        "Theorem 3.1: rho shrinks with the width, probability 1 - O(N) exp(-Omega(m rho^2))",
        "rho ~ m^-0.50",
        f"the rho that 95% of networks keep ~ m^{spread['width_slope']:.2f}, from {spread['by_width'][0][0]:.2f} at "
        f"m = {spread['widths'][0]} to {spread['by_width'][-1][0]:.2f} at m = {spread['widths'][-1]} (N = 2)",
        judged(abs(spread["width_slope"] + 0.5) < 0.15),
    )


def _about_depth(spread: dict[str, Any]) -> Finding:
    found = ", ".join(f"{one:.2f}" for one, _ in spread["by_depth"])
    return Finding(
        "Theorem 3.1: the exponent m rho^2 does not hold N",
        "at a fixed probability rho does not grow with N",
        f"rho {found} for N = {', '.join(map(str, spread['depths']))} at m = {spread['at_width']}, ~ "
        f"N^{spread['depth_slope']:.2f}",
        judged(
            spread["by_depth"][-1][0] > 1.3 * spread["by_depth"][0][0],
            fails(
                "the longest path has 2N + 1 blocks and each adds (5 (l - 1) + 2) / m to the relative variance, "
                "so depth belongs in the exponent: m rho^2 / (N l) for that path"
            ),
        ),
    )
