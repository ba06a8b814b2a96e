"""The arithmetic of comparisons: running means, spreads over seeds, differences with their errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Estimate:
    """A mean over n values and their standard deviation (nan for a single one)."""

    mean: float
    sd: float
    n: int


@dataclass(frozen=True)
class Difference:
    """a - b with its standard error; `clear` if zero lies outside the 95% interval (Student's t)."""

    value: float
    standard_error: float
    clear: bool


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and sample standard deviation of the finite values."""
    finite = [value for value in values if math.isfinite(value)]
    mean = sum(finite) / len(finite) if finite else math.nan
    sd = float(np.std(finite, ddof=1)) if len(finite) > 1 else math.nan
    return Estimate(mean, sd, len(finite))


def paired_difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Mean of a_k - b_k, where both of a pair saw the same seed or the same step."""
    if len(a) != len(b):
        raise ValueError(f"a, b: pairs need equal numbers of values, got {len(a)} and {len(b)}")
    gaps = estimate([x - y for x, y in zip(a, b, strict=True)])
    return _judged(gaps.mean, gaps.sd / math.sqrt(max(gaps.n, 1)), gaps.n - 1)


def unpaired_difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """mean(a) - mean(b) with Welch's standard error and degrees of freedom."""
    first, second = estimate(a), estimate(b)
    if min(first.n, second.n) < 2:
        return Difference(first.mean - second.mean, math.nan, False)
    va, vb = first.sd**2 / first.n, second.sd**2 / second.n
    spread = va**2 / (first.n - 1) + vb**2 / (second.n - 1)
    freedom = (va + vb) ** 2 / spread if spread > 0 else first.n + second.n - 2
    return _judged(first.mean - second.mean, math.sqrt(va + vb), freedom)


def _judged(value: float, standard_error: float, freedom: float) -> Difference:
    if freedom < 1 or math.isnan(standard_error):
        return Difference(value, math.nan, False)
    return Difference(value, standard_error, abs(value) > float(stats.t.ppf(0.975, freedom)) * standard_error)


def running_mean(steps: Sequence[int], values: Sequence[float], window: int) -> list[float]:
    """At each step s the mean of the values of the steps in (s - window, s]."""
    if not values:
        return []
    own = np.asarray(steps)
    last = np.arange(1, len(own) + 1)
    first = np.minimum(np.searchsorted(own, own - window, side="right"), last - 1)
    bounds = np.stack([first, last], axis=1).ravel()
    sums = np.add.reduceat([*values, 0.0], bounds)[::2]  # each window on its own: a spike stays in its windows
    return [float(mean) for mean in sums / (last - first)]


def first_at_most(steps: Sequence[int], values: Sequence[float], target: float, after: int = 0) -> int | None:
    """The first step, not before `after`, whose value is at or below the target; None if there is none."""
    return next((s for s, v in zip(steps, values, strict=True) if s >= after and v <= target), None)


def ratio(numerator: float, denominator: float) -> float:
    """The quotient, or nan where it has no meaning."""
    return numerator / denominator if denominator and math.isfinite(numerator) else math.nan
