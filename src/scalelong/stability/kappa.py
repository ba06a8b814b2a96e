"""Which kappa, from the data: Sec. 4.1 made into a function.

The output of a U-shaped network is of the size ||x_t||^2 sum_j kappa_j^2 (Theorem 3.1) and should be that of its target,
||eps||^2. So sum_j kappa_j^2 should lie between the mean of ||eps||^2 / ||x_t||^2 and its 97% quantile; with the number of
skips given, that is an interval for the kappa of CS. Within it the paper leaves the choice open, and no rule that looks at
the data or at the model's start chose better than 0.7 (experiments/auto_kappa.py): 0.7 is recommended, the interval told.

Shapes: n images, B samples, m values per image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scalelong.data import Source, sample_to_item, to_float
from scalelong.diffusion import Objective, Process, draw_time_and_noise
from scalelong.skips.auto import TAIL, USUAL_KAPPA, kappa_for_sum, ratio_interval, sum_of_squares

_CHUNK = 256

Data = Source | Tensor | npt.NDArray[Any]


@dataclass(frozen=True)
class Recommendation:
    """An interval for sum_j kappa_j^2 from the data, the interval of kappa it means for CS, and one value."""

    kappa: float  # the recommended value
    middle: float  # the kappa whose sum is the geometric middle of the interval
    kappa_interval: tuple[float, float]  # for CS with num_skips; 0 stands for "as small as you like"
    sum_interval: tuple[float, float]  # mean and 97% quantile of the ratio
    num_skips: int
    samples: int
    standard_error: float  # of the mean ratio
    prediction: str
    ratios: tuple[float, ...]  # every sampled ||target||^2 / ||x_t||^2, sorted
    reasoning: str
    warnings: tuple[str, ...] = ()

    @property
    def mean_ratio(self) -> float:
        """The lower end of the interval of sums."""
        return self.sum_interval[0]

    @property
    def tail_ratio(self) -> float:
        """The upper end of the interval of sums: the 97% quantile."""
        return self.sum_interval[1]


def recommend_kappa(
    data: Data,  # a Source, or values in [-1, 1]: (n, ...); uint8 is read as pixels
    process: Process,
    num_skips: int,
    *,
    prediction: str = "",  # what the network predicts; default: the process's own, the noise
    samples: int = 4096,
    seed: int = 0,
) -> Recommendation:
    """The interval of Sec. 4.1 from your own data and noise process, and one kappa in it; a function of its arguments."""
    if isinstance(num_skips, bool) or not isinstance(num_skips, int) or num_skips < 1:
        raise ValueError(
            f"num_skips: must be a whole number of at least 1, got {num_skips!r}; see scalelong.find_skips"
        )
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 100:
        raise ValueError(f"samples: must be a whole number of at least 100, got {samples!r}; 4096 is the default")
    objective = Objective(process, prediction)
    values = _Values(data, seed)
    ratios, warnings = sampled_ratios(values, objective, samples, seed), values.range_warnings()
    interval = ratio_interval(ratios)
    if values.outside:
        rescaled = ratio_interval(sampled_ratios(values.rescaled(), objective, samples, seed))
        warnings.append(
            f"the interval for the sum is {_shown(interval)} as given, {_shown(rescaled)} with the data scaled to [-1, 1]"
        )
    if (share := _tail_share(ratios)) > 0.5:
        warnings.append(
            f"1% of the samples make up {share:.0%} of the mean ratio: it hangs on a few inputs near zero; trust the "
            "quantile more than the mean"
        )
    return _recommend(ratios, interval, num_skips, objective.prediction, warnings)


def sampled_ratios(values: _Values, objective: Objective, samples: int, seed: int) -> Tensor:
    """||target||^2 / ||input||^2 of training inputs, sorted; t, noise and image are functions of seed and index."""
    process, found = objective.process, []
    for start in range(0, samples, _CHUNK):
        index = torch.arange(start, min(start + _CHUNK, samples))
        x0 = values.rows(index)
        t, noise = draw_time_and_noise(process, seed, index, (x0.shape[1],))
        alpha, sigma = (value.double()[:, None] for value in process.marginal(t))
        p, q = objective.target_weights(alpha, sigma)
        noise = noise.double()
        x_t = process.input_scale(t).double()[:, None] * (alpha * x0 + sigma * noise)
        found.append((p * x0 + q * noise).square().sum(1) / x_t.square().sum(1))
    ratios = torch.cat(found)
    if not ratios.isfinite().all():
        raise ValueError("data: an input x_t is exactly zero, so the ratio has no mean; leave out empty images")
    return ratios.sort().values


class _Values:
    """Rows of float64 values, whatever they came from."""

    def __init__(self, data: Data, seed: int, scale: float = 1.0, shift: float = 0.0) -> None:
        self.data, self.seed, self.scale, self.shift = data, seed, scale, shift
        if isinstance(data, np.ndarray):
            self.data = data = torch.from_numpy(np.ascontiguousarray(data))
        if not isinstance(data, (Source, Tensor)):
            raise TypeError(f"data: must be a Source, a tensor or an array, got {type(data).__name__}")
        if len(data) == 0 or (isinstance(data, Tensor) and (data.ndim < 2 or data.numel() == 0)):
            shape = tuple(data.shape)
            raise ValueError(f"data: needs images, (n, ...) with n of at least 1, got shape {shape}")
        self.low, self.high = self._range()

    def _range(self) -> tuple[float, float]:
        """Pixels are [-1, 1] by construction; other values are looked at."""
        if not isinstance(self.data, Tensor) or self.data.dtype == torch.uint8:
            return -1.0, 1.0
        low, high = float(self.data.min()), float(self.data.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError(f"data: has values that are not finite (from {low} to {high}); clean it first")
        return low, high

    @property
    def outside(self) -> bool:
        return self.low < -1 - 1e-6 or self.high > 1 + 1e-6

    def range_warnings(self) -> list[str]:
        if self.outside:
            return [f"the data reach from {self.low:.4g} to {self.high:.4g}, outside [-1, 1]"]
        if self.low >= 0:
            return [
                f"no value is below 0 (from {self.low:.4g} to {self.high:.4g}); if the data are [0, 1], use 2 x - 1"
            ]
        return []

    def rescaled(self) -> _Values:
        """The same data, shifted and scaled so that they fill [-1, 1]."""
        scale = 2 / (self.high - self.low) if self.high > self.low else 1 / max(abs(self.high), 1.0)
        return _Values(self.data, self.seed, scale, -1 - scale * self.low if self.high > self.low else 0.0)

    def rows(self, index: Tensor) -> Tensor:
        """(B, m) float64 of the samples at these indices, in the order that training draws them."""
        if isinstance(self.data, Source):
            stored = self.data.read_many(sample_to_item(self.seed, len(self.data), index, self.data.window).tolist())
            values = self.data.prepare(stored, self.seed, index, None)
        else:
            drawn = self.data[sample_to_item(self.seed, len(self.data), index)]
            values = to_float(drawn) if drawn.dtype == torch.uint8 else drawn
        return values.cpu().flatten(1).double() * self.scale + self.shift


def _shown(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.3f} .. {interval[1]:.3f}"


def _tail_share(ratios: Tensor) -> float:
    return float(ratios[-max(1, len(ratios) // 100) :].sum() / ratios.sum())


def _recommend(
    ratios: Tensor, interval: tuple[float, float], num_skips: int, prediction: str, warnings: list[str]
) -> Recommendation:
    """Clamp the interval to what CS can reach, and say where its middle and the recommended value lie."""
    low, high = interval
    kappas = kappa_for_sum(low, num_skips), kappa_for_sum(high, num_skips)
    balance = math.sqrt(low * high)
    middle = kappa_for_sum(balance, num_skips)
    clamped = not math.isclose(sum_of_squares(middle, num_skips), balance, rel_tol=1e-6)
    told = "is as near as CS comes to missing" if clamped else "misses"
    kappa = USUAL_KAPPA if num_skips > 1 else 1.0
    what = "eps" if prediction == "noise" else f"target ({prediction})"
    place = "inside" if kappas[0] <= kappa <= kappas[1] else "above" if kappa > kappas[1] else "below"
    reasoning = (
        f"||{what}||^2 / ||x_t||^2 is {low:.3f} on average and {high:.3f} at its {TAIL:.0%} quantile over {len(ratios)} "
        "samples. Sec. 4.1 wants sum_j kappa_j^2 between the two; with "
        f"N = {num_skips} skips, kappa_i = kappa^(i-1), that is kappa from {kappas[0]:.3f} to {kappas[1]:.3f}; at "
        f"{middle:.3f} the sum {told} the average sample and the {TAIL:.0%} sample by the same factor. "
        f"Recommended {kappa:g}, {place} the interval: the sum is then {sum_of_squares(kappa, num_skips):.3f}. No rule that "
        f"looks at the data or at the model's start chose better than {USUAL_KAPPA:g} by more than the noise, this middle "
        "among them; where it matters, try a few values."
    )
    error = float(ratios.std() / math.sqrt(len(ratios)))
    return Recommendation(
        kappa, middle, kappas, interval, num_skips, len(ratios), error, prediction, tuple(ratios.tolist()), reasoning,
        tuple(warnings + _clamp_warnings(low, high, num_skips)),
    )  # fmt: skip


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
