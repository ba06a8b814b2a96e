"""Choose kappa from the data (Sec. 4.1).

The output of a U-shaped network has size ||x_t||^2 sum_j kappa_j^2 (Theorem 3.1) and should match the size of its target,
||eps||^2. So sum_j kappa_j^2 should lie between the mean of ||eps||^2 / ||x_t||^2 and its 97% quantile: an interval for the
kappa of CS. No rule beats 0.7 (experiments/auto-kappa). In the long runs CS trails the unscaled network for up to
`CROSSOVER` steps and ends on par with it (docs/should-i-use-it.md): no scaling for shorter runs, 0.7 or none for longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import bisect
from torch import Tensor

from scalelong.data import Source, sample_to_item, to_float
from scalelong.diffusion import Objective, Process, draw_time_and_noise
from scalelong.errors import require
from scalelong.report.colours import BLUE, ORANGE, PINK
from scalelong.report.plots import finish, panels, save_figure
from scalelong.runs.settings import ScalingSettings
from scalelong.scaling.constant import constant_coefficients

USUAL_KAPPA = 0.7
CROSSOVER = 40_000  # steps after which CS matches or beats the unscaled training loss
TAIL = 0.97  # Sec. 4.1: "more than 97% of the values are smaller than 5"
_CHUNK = 256

Data = Source | Tensor | npt.NDArray[Any]


def sum_of_squares(kappa: float, num_skips: int) -> float:
    """sum_i kappa^(2(i-1)) of CS (Eq. 8)."""
    return sum(k * k for k in constant_coefficients(num_skips, kappa))


def kappa_for_sum(total: float, num_skips: int) -> float:
    """The kappa in [0, 1] with sum_i kappa^(2(i-1)) = total, clamped to 0 or 1.

    >>> round(kappa_for_sum(1.22, num_skips=6), 2)
    0.42
    """
    if total <= 1 or total >= num_skips:
        return float(total > 1)
    return float(bisect(lambda kappa: sum_of_squares(kappa, num_skips) - total, 0.0, 1.0, xtol=1e-12))


@dataclass(frozen=True)
class Reading:
    """One meaning of "the mean of ||eps||^2 / ||x_t||^2", the lower end of the interval for sum_j kappa_j^2."""

    name: str
    ratio: float
    kappa_interval: tuple[float, float]  # from this ratio to the 97% quantile


@dataclass(frozen=True)
class Recommendation:
    """An interval for sum_j kappa_j^2 from the data, the corresponding interval for the kappa of CS, and one value.

    >>> from scalelong.diffusion import VPSDE
    >>> print(recommend_kappa(torch.rand(64, 3, 8, 8) * 2 - 1, VPSDE(), num_skips=6, samples=200).reasoning)
    ||eps||^2 / ||x_t||^2 has mean ...
    """

    kappa: float  # the recommended value; 1: no scaling
    middle: float  # the kappa whose sum is the geometric middle of the interval
    kappa_interval: tuple[float, float]  # for CS with num_skips; 0: any small kappa
    sum_interval: tuple[float, float]  # mean and 97% quantile of the ratio
    num_skips: int
    samples: int
    standard_error: float  # of the mean ratio
    prediction: str
    ratios: tuple[float, ...]  # every sampled ||target||^2 / ||x_t||^2, sorted
    readings: tuple[Reading, ...]  # of the mean ratio; the first is the one used above
    steps: int | None  # of the training, if known
    warnings: tuple[str, ...]

    @property
    def reasoning(self) -> str:
        """Explain the interval and the recommended value."""
        (mean, tail), (low, high), n = self.sum_interval, self.kappa_interval, self.num_skips
        place = "inside" if low <= USUAL_KAPPA <= high else "above" if high < USUAL_KAPPA else "below"
        reached = math.isclose(sum_of_squares(self.middle, n) ** 2, mean * tail, rel_tol=1e-6)
        target = "eps" if self.prediction == "noise" else f"target ({self.prediction})"
        return (
            f"||{target}||^2 / ||x_t||^2 has mean {mean:.3f} and {TAIL:.0%} quantile {tail:.3f} over {self.samples} "
            f"samples. Sec. 4.1 asks for sum_j kappa_j^2 between the two: with N = {n} skips and kappa_i = kappa^(i-1), "
            f"kappa from {low:.3f} to {high:.3f} (geometric middle {self.middle:.3f}{'' if reached else ', clamped'}). "
            f"{USUAL_KAPPA:g} is {place} the interval, where the sum is {sum_of_squares(USUAL_KAPPA, n):.3f}; no rule "
            "based on the data or the initial model, including the middle of this interval, beat it by more than the noise. "
            f"{self.advice}"
        )

    @property
    def advice(self) -> str:
        """Recommendation for this training length."""
        return advice(self.steps)


def advice(steps: int | None) -> str:
    """Recommendation for this training length, from the study in docs/should-i-use-it.md.

    >>> advice(600)
    'But in our long runs CS trails the unscaled network for up to 40,000 steps, and LS throughout: for 600 steps, ...'
    """
    early = f"in our long runs CS trails the unscaled network for up to {CROSSOVER:,} steps, and LS throughout"
    late = (
        "after that CS was at most 0.2% ahead in training loss and ended on par, within the difference of two unscaled "
        "runs: expect no clear gain"
    )
    if steps is None:
        return f"But {early}; {late}. Use no scaling (kappa = 1) for shorter runs, {USUAL_KAPPA:g} or none for longer ones."
    if steps < CROSSOVER:
        return f"But {early}: for {steps:,} steps, no scaling (kappa = 1) is recommended."
    return f"For {steps:,} steps {USUAL_KAPPA:g} or no scaling (kappa = 1): {early}; {late}."


def training_note(scaling: ScalingSettings, steps: int) -> str:
    """One-line expectation from the study; empty for methods it does not cover.

    >>> training_note(ScalingSettings("none"), 600)
    ''
    """
    if scaling.method not in ("cs", "ls") or (scaling.method == "ls" and scaling.start is not None):
        return ""
    usual = {"cs": f"--kappa {USUAL_KAPPA:g}", "ls": f"--method cs --kappa {USUAL_KAPPA:g}"}[scaling.method]
    change = "" if steps < CROSSOVER or scaling.label == f"cs {USUAL_KAPPA:g}" else f"{usual}, or "
    said = advice(steps).removeprefix("But ").rstrip(".")
    return f"{scaling.label}: {said} ({change}--method none; docs/should-i-use-it.md)"


def recommend_kappa(
    data: Data,  # a Source, or values in [-1, 1]: (n, ...); uint8 is read as pixels
    process: Process,
    num_skips: int,
    *,
    prediction: str = "",  # of the network; default: the process's own, the noise
    samples: int = 4096,
    seed: int = 0,
    steps: int | None = None,  # of the training
) -> Recommendation:
    """Compute the interval of Sec. 4.1 for data, noise process and number of skips, and recommend a kappa; deterministic.

    >>> from scalelong.diffusion import VPSDE
    >>> found = recommend_kappa(torch.rand(64, 3, 8, 8) * 2 - 1, VPSDE(), num_skips=6, samples=200)
    >>> found.kappa
    0.7
    """
    for key, number, least in (("num_skips", num_skips, 1), ("samples", samples, 100)):
        require(type(number) is int and number >= least, key, f"an int of at least {least}", number)
    objective, values = Objective(process, prediction), _Values(data, seed)
    targets, inputs = squared_norms(values.rows, objective, samples, seed)
    ratios, warnings = (targets / inputs).sort().values, []
    interval, between = ratio_interval(ratios), f"from {values.low:.4g} to {values.high:.4g}"
    if values.low >= 0 and not values.outside:
        warnings.append(f"no value is below 0 ({between}); if the data are in [0, 1], use 2 x - 1")
    if values.outside:
        warnings.append(f"the data range {between}, outside [-1, 1]")
        rescaled = ratio_interval(torch.div(*squared_norms(values.rescaled_rows, objective, samples, seed)))
        given, scaled = (f"{low:.3f} .. {high:.3f}" for low, high in (interval, rescaled))
        warnings.append(f"the interval for the sum is {given} as given, {scaled} with the data scaled to [-1, 1]")
    if (share := float(ratios[-max(1, samples // 100) :].sum() / ratios.sum())) > 0.5:
        warnings.append(f"1% of the samples, of inputs near zero, make up {share:.0%} of the mean; prefer the quantile")
    means = {"mean of ratios": interval[0], "ratio of means": float(targets.sum() / inputs.sum())}
    if objective.prediction == "noise":  # alpha^2 + sigma^2 = 1, so Lemma 3.2 applies
        means["Lemma 3.2, uniform x_0"] = 1 / (1 - 2 * process.mean_alpha_bar() / 3)
    readings = [
        Reading(name, ratio, (kappa_for_sum(ratio, num_skips), kappa_for_sum(interval[1], num_skips)))
        for name, ratio in means.items()
    ]
    short = steps is not None and steps < CROSSOVER
    return Recommendation(
        kappa=1.0 if short or num_skips == 1 else USUAL_KAPPA,
        middle=kappa_for_sum(math.sqrt(math.prod(interval)), num_skips),
        kappa_interval=readings[0].kappa_interval,
        sum_interval=interval,
        num_skips=num_skips,
        samples=samples,
        standard_error=float(ratios.std() / math.sqrt(samples)),
        prediction=objective.prediction,
        ratios=tuple(ratios.tolist()),
        readings=tuple(readings),
        steps=steps,
        warnings=(*warnings, *_clamp_warnings(*interval, num_skips)),
    )


def ratio_interval(ratios: Tensor) -> tuple[float, float]:
    """(mean, 97% quantile) in ascending order."""
    mean, tail = float(ratios.mean()), float(ratios.quantile(TAIL))
    return min(mean, tail), max(mean, tail)


def squared_norms(
    rows: Callable[[Tensor], Tensor], objective: Objective, samples: int, seed: int
) -> tuple[Tensor, Tensor]:
    """(||target||^2, ||input||^2), (B,) each, of training samples; t, noise and image are functions of seed and index."""
    process, targets, inputs = objective.process, [], []
    for start in range(0, samples, _CHUNK):
        index = torch.arange(start, min(start + _CHUNK, samples))
        x0 = rows(index)
        t, noise = draw_time_and_noise(process, seed, index, (x0.shape[1],))
        x_t, alpha, sigma = process.diffuse(x0, noise.double(), t)
        p, q = objective.target_weights(alpha.double(), sigma.double())
        x, _ = process.network_input(x_t, t)
        targets.append((p * x0 + q * noise).square().sum(1))
        inputs.append(x.double().square().sum(1))
    target, given = torch.cat(targets), torch.cat(inputs)
    if not (target / given).isfinite().all():
        raise ValueError("data: an input x_t is exactly zero, so the ratio has no mean; leave out empty images")
    return target, given


class _Values:
    """Rows of float64 values from any kind of data."""

    def __init__(self, data: Data, seed: int) -> None:
        self.data, self.seed = data, seed
        if isinstance(data, np.ndarray):
            self.data = data = torch.from_numpy(np.ascontiguousarray(data))
        if not isinstance(data, (Source, Tensor)):
            raise TypeError(f"data: must be a Source, a tensor or an array, got {type(data).__name__}")
        if len(data) == 0 or (isinstance(data, Tensor) and (data.ndim < 2 or data.numel() == 0)):
            raise ValueError(f"data: needs images, (n, ...) with n of at least 1, got shape {tuple(data.shape)}")
        self.low, self.high = -1.0, 1.0  # pixels, by construction
        if isinstance(data, Tensor) and data.dtype != torch.uint8:
            self.low, self.high = float(data.min()), float(data.max())
            if not (math.isfinite(self.low) and math.isfinite(self.high)):
                raise ValueError(f"data: has values that are not finite ({self.low} to {self.high}); remove them")

    @property
    def outside(self) -> bool:
        return self.low < -1 - 1e-6 or self.high > 1 + 1e-6

    def rows(self, index: Tensor) -> Tensor:
        """(B, m) float64 of the samples at these indices, in the order of training."""
        if isinstance(self.data, Source):
            items = sample_to_item(self.seed, len(self.data), index, self.data.window)
            stored = self.data.read_many(items.tolist())
            values = self.data.prepare(stored, self.seed, index, None)
        else:
            values = self.data[sample_to_item(self.seed, len(self.data), index)]
            values = to_float(values) if values.dtype == torch.uint8 else values
        return values.cpu().flatten(1).double()

    def rescaled_rows(self, index: Tensor) -> Tensor:
        """The same, shifted and scaled to fill [-1, 1]."""
        if self.high == self.low:
            return self.rows(index) / max(abs(self.high), 1.0)
        scale = 2 / (self.high - self.low)
        return self.rows(index) * scale - (1 + scale * self.low)


def _clamp_warnings(low: float, high: float, num_skips: int) -> list[str]:
    if num_skips == 1:
        return ["with one skip CS does nothing: kappa_1 is 1 whatever kappa"]
    found = []
    if low < 1:
        found.append(f"the interval begins at {low:.3f}, below 1, the least sum of CS: clamped to kappa = 0")
    if high > num_skips:
        found.append(f"the interval ends at {high:.3f}, above N = {num_skips}, the sum at kappa = 1: clamped to 1")
    return found


def plot(found: Recommendation, title: str, path: Path) -> None:
    """Plot the distribution of the ratio with the interval, and the sum against kappa."""
    figure, (left, right) = panels(2)
    low, high = found.sum_interval
    left.hist([ratio for ratio in found.ratios if ratio <= 2 * high], 60, color=BLUE, alpha=0.8)
    left.axvline(low, color=ORANGE, label=f"mean {low:.2f}")
    left.axvline(high, color=PINK, label=f"97% quantile {high:.2f}")
    finish(left, title, "||target||² / ||x_t||²", "samples")
    grid = [i / 200 for i in range(201)]
    right.plot(grid, [sum_of_squares(kappa, found.num_skips) for kappa in grid], color=BLUE)
    right.axhspan(low, high, color=ORANGE, alpha=0.2, label="interval for the sum")
    right.axvspan(*found.kappa_interval, color=BLUE, alpha=0.12, label="interval for κ")
    chosen, label = sum_of_squares(found.kappa, found.num_skips), f"recommended κ = {found.kappa:g}"
    right.plot(found.kappa, chosen, "o", color=PINK, label=label)
    right.set_ylim(0.5, max(found.num_skips, high) * 1.05)
    finish(right, f"CS with N = {found.num_skips} skips", "κ", "Σ κ^(2(i-1))")
    save_figure(figure, path, dpi=100)
