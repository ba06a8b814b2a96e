"""The choice of kappa from the data: Sec. 4.1 as a function.

The output of a U-shaped network is of size ||x_t||^2 sum_j kappa_j^2 (Theorem 3.1) and should be of the size of its target,
||eps||^2. So sum_j kappa_j^2 should lie between the mean of ||eps||^2 / ||x_t||^2 and its 97% quantile; for a given number of
skips, that is an interval for the kappa of CS. The paper leaves the choice within it open, and no rule that looks at the data
or at the initial model chose better than 0.7 (experiments/auto_kappa.py): 0.7 is recommended, beside the interval.

Shapes: n images, B samples, m values per image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scalelong.data import Source, sample_to_item, to_float
from scalelong.diffusion import Objective, Process, draw_time_and_noise
from scalelong.scaling.constant import constant_coefficients

USUAL_KAPPA = 0.7
TAIL = 0.97  # Sec. 4.1: "more than 97% of the values are smaller than 5"
_CHUNK = 256

Data = Source | Tensor | npt.NDArray[Any]


def sum_of_squares(kappa: float, num_skips: int) -> float:
    """sum_i kappa^(2(i-1)) of CS (Eq. 8)."""
    return sum(k * k for k in constant_coefficients(num_skips, kappa))


def kappa_for_sum(total: float, num_skips: int) -> float:
    """The kappa in [0, 1] with sum_i kappa^(2(i-1)) = total, by bisection; 0 or 1 where the total cannot be reached.

    >>> round(kappa_for_sum(1.22, num_skips=6), 2)
    0.42
    """
    if total <= 1:
        return 0.0
    if total >= num_skips:
        return 1.0
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if sum_of_squares(middle, num_skips) < total else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Reading:
    """One meaning of "the mean of ||eps||^2 / ||x_t||^2", the lower end of the interval for sum_j kappa_j^2."""

    name: str
    ratio: float
    kappa_interval: tuple[float, float]  # from this ratio to the 97% quantile


@dataclass(frozen=True)
class Recommendation:
    """An interval for sum_j kappa_j^2 from the data, the corresponding interval for the kappa of CS, and one value."""

    kappa: float  # the recommended value
    middle: float  # the kappa whose sum is the geometric middle of the interval
    kappa_interval: tuple[float, float]  # for CS with num_skips; 0 means that any small kappa will do
    sum_interval: tuple[float, float]  # mean and 97% quantile of the ratio
    num_skips: int
    samples: int
    standard_error: float  # of the mean ratio
    prediction: str
    ratios: tuple[float, ...]  # every sampled ||target||^2 / ||x_t||^2, sorted
    readings: tuple[Reading, ...]  # of the mean ratio; the first is the one used above
    warnings: tuple[str, ...]

    @property
    def mean_ratio(self) -> float:
        """The lower end of the interval of sums."""
        return self.sum_interval[0]

    @property
    def tail_ratio(self) -> float:
        """The upper end of the interval of sums: the 97% quantile."""
        return self.sum_interval[1]

    @property
    def reasoning(self) -> str:
        """The derivation of the interval and of the recommended value, in sentences."""
        (mean, tail), (low, high), n = self.sum_interval, self.kappa_interval, self.num_skips
        place = "inside" if low <= self.kappa <= high else "above" if self.kappa > high else "below"
        reached = math.isclose(sum_of_squares(self.middle, n) ** 2, mean * tail, rel_tol=1e-6)
        target = "eps" if self.prediction == "noise" else f"target ({self.prediction})"
        return (
            f"||{target}||^2 / ||x_t||^2 has mean {mean:.3f} and {TAIL:.0%} quantile {tail:.3f} over {self.samples} "
            f"samples. Sec. 4.1 asks for sum_j kappa_j^2 between the two: with N = {n} skips and kappa_i = kappa^(i-1), "
            f"kappa from {low:.3f} to {high:.3f} (geometric middle {self.middle:.3f}{'' if reached else ', clamped'}). "
            f"Recommended: {self.kappa:g}, {place} the interval, where the sum is {sum_of_squares(self.kappa, n):.3f}. No "
            f"rule that looks at the data or at the initial model chose better than {USUAL_KAPPA:g} by more than the noise, "
            "the middle of this interval included; where it matters, try a few values."
        )


def recommend_kappa(
    data: Data,  # a Source, or values in [-1, 1]: (n, ...); uint8 is read as pixels
    process: Process,
    num_skips: int,
    *,
    prediction: str = "",  # of the network; default: the process's own, the noise
    samples: int = 4096,
    seed: int = 0,
) -> Recommendation:
    """The interval of Sec. 4.1 for your data, noise process and number of skips, and one kappa; deterministic.

    >>> from scalelong.diffusion import VPSDE
    >>> found = recommend_kappa(torch.rand(64, 3, 8, 8) * 2 - 1, VPSDE(), num_skips=6, samples=200)
    >>> found.kappa
    0.7
    """
    if isinstance(num_skips, bool) or not isinstance(num_skips, int) or num_skips < 1:
        raise ValueError(
            f"num_skips: must be a whole number of at least 1, got {num_skips!r}; see scalelong.find_skips"
        )
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 100:
        raise ValueError(f"samples: must be a whole number of at least 100, got {samples!r}; 4096 is the default")
    objective, values = Objective(process, prediction), _Values(data, seed)
    targets, inputs = squared_norms(values, objective, samples, seed)
    ratios, warnings = (targets / inputs).sort().values, values.range_warnings()
    interval = ratio_interval(ratios)
    if values.outside:
        targets_01, inputs_01 = squared_norms(values.rescaled(), objective, samples, seed)
        rescaled = ratio_interval(targets_01 / inputs_01)
        warnings.append(
            f"the interval for the sum is {_shown(interval)} as given, {_shown(rescaled)} with the data scaled to [-1, 1]"
        )
    if (share := float(ratios[-max(1, samples // 100) :].sum() / ratios.sum())) > 0.5:
        warnings.append(
            f"1% of the samples make up {share:.0%} of the mean ratio: a few inputs near zero dominate it; trust the "
            "quantile more than the mean"
        )
    means = {"mean of ratios": interval[0], "ratio of means": float(targets.sum() / inputs.sum())}
    if objective.prediction == "noise":  # alpha^2 + sigma^2 = 1, so Lemma 3.2 applies
        means["Lemma 3.2, uniform x_0"] = 1 / (1 - 2 * process.mean_alpha_bar() / 3)
    readings = [
        Reading(name, ratio, (kappa_for_sum(ratio, num_skips), kappa_for_sum(interval[1], num_skips)))
        for name, ratio in means.items()
    ]
    kappa, kappas = USUAL_KAPPA if num_skips > 1 else 1.0, readings[0].kappa_interval
    middle = kappa_for_sum(math.sqrt(math.prod(interval)), num_skips)
    error = float(ratios.std() / math.sqrt(samples))
    warnings += _clamp_warnings(*interval, num_skips)
    return Recommendation(
        kappa, middle, kappas, interval, num_skips, samples, error, objective.prediction, tuple(ratios.tolist()),
        tuple(readings), tuple(warnings),
    )  # fmt: skip


def ratio_interval(ratios: Tensor) -> tuple[float, float]:
    """(mean, 97% quantile) in ascending order."""
    mean, tail = float(ratios.mean()), float(ratios.quantile(TAIL))
    return min(mean, tail), max(mean, tail)


def squared_norms(values: _Values, objective: Objective, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """(||target||^2, ||input||^2), (B,) each, of training samples; t, noise and image are functions of seed and index."""
    process, targets, inputs = objective.process, [], []
    for start in range(0, samples, _CHUNK):
        index = torch.arange(start, min(start + _CHUNK, samples))
        x0 = values.rows(index)
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
    """Images from any kind of data as rows of float64 values."""

    def __init__(self, data: Data, seed: int, scale: float = 1.0, shift: float = 0.0) -> None:
        self.data, self.seed, self.scale, self.shift = data, seed, scale, shift
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
                raise ValueError(
                    f"data: has values that are not finite (from {self.low} to {self.high}); clean it first"
                )

    @property
    def outside(self) -> bool:
        return self.low < -1 - 1e-6 or self.high > 1 + 1e-6

    def range_warnings(self) -> list[str]:
        between = f"from {self.low:.4g} to {self.high:.4g}"
        if self.outside:
            return [f"the data range {between}, outside [-1, 1]"]
        if self.low >= 0:
            return [f"no value is below 0 ({between}); if the data are in [0, 1], use 2 x - 1"]
        return []

    def rescaled(self) -> _Values:
        """The same data, shifted and scaled to fill [-1, 1]."""
        scale = 2 / (self.high - self.low) if self.high > self.low else 1 / max(abs(self.high), 1.0)
        return _Values(self.data, self.seed, scale, -1 - scale * self.low if self.high > self.low else 0.0)

    def rows(self, index: Tensor) -> Tensor:
        """(B, m) float64 of the samples at these indices, in the order of training."""
        if isinstance(self.data, Source):
            items = sample_to_item(self.seed, len(self.data), index, self.data.window)
            stored = self.data.read_many(items.tolist())
            values = self.data.prepare(stored, self.seed, index, None)
        else:
            values = self.data[sample_to_item(self.seed, len(self.data), index)]
            values = to_float(values) if values.dtype == torch.uint8 else values
        return values.cpu().flatten(1).double() * self.scale + self.shift


def _shown(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.3f} .. {interval[1]:.3f}"


def _clamp_warnings(low: float, high: float, num_skips: int) -> list[str]:
    found = []
    if num_skips == 1:
        return ["with one skip CS does nothing: kappa_1 is 1 whatever kappa"]
    if low < 1:
        ends = "both ends are" if high <= 1 else "the lower end is"
        found.append(
            f"{ends} below 1, but CS keeps kappa_1 = 1, so its sum is above 1 however small kappa is: clamped to 0"
        )
    if high > num_skips:
        ends = "both ends are" if low >= num_skips else "the upper end is"
        found.append(f"{ends} above N = {num_skips}, the sum at kappa = 1: clamped to 1 (no scaling)")
    return found


def plot(found: Recommendation, title: str, path: Path) -> None:
    """Plot the distribution of the ratio with the interval, and the sum against kappa."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    low, high = found.sum_interval
    left.hist([ratio for ratio in found.ratios if ratio <= 2 * high], 60, color="tab:blue", alpha=0.8)
    left.axvline(low, color="tab:orange", label=f"mean {low:.2f}")
    left.axvline(high, color="tab:red", label=f"97% quantile {high:.2f}")
    left.set(xlabel="||target||² / ||x_t||²", ylabel="samples")
    grid = [i / 200 for i in range(201)]
    right.plot(grid, [sum_of_squares(kappa, found.num_skips) for kappa in grid], color="tab:blue")
    right.axhspan(low, high, color="tab:orange", alpha=0.2, label="interval for the sum")
    right.axvspan(*found.kappa_interval, color="tab:blue", alpha=0.12, label="interval for κ")
    chosen, label = sum_of_squares(found.kappa, found.num_skips), f"recommended κ = {found.kappa:g}"
    right.plot(found.kappa, chosen, "o", color="tab:red", label=label)
    right.set(xlabel="κ", ylabel="Σ κ^(2(i-1))", ylim=(0.5, max(found.num_skips, high) * 1.05))
    for axes, text in ((left, title), (right, f"CS with N = {found.num_skips} skips")):
        axes.set_title(text, fontsize=10.5, loc="left")
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)
