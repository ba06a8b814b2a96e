"""Means, differences and running means of runs, and how numbers are written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

Indices = npt.NDArray[np.intp]

UNKNOWN = "–"
UNRESOLVED = "not resolved"  # of a speed-up: the evaluations are too far apart


@dataclass(frozen=True)
class Estimate:
    """Mean and standard deviation of n values; the deviation of a single one is nan."""

    mean: float
    sd: float
    n: int


@dataclass(frozen=True)
class Difference:
    """a - b with its standard error; clear if zero lies outside the 95% interval (Student's t)."""

    value: float
    standard_error: float
    clear: bool
    margin: float = math.nan  # half of the 95% interval
    test: str = ""

    @property
    def within_noise(self) -> bool:
        """True for a difference that was tested and is not clear."""
        return math.isfinite(self.standard_error) and not self.clear

    def interval(self) -> str:
        """Format the interval and the test: "95% interval −0.012 to 0.051, paired t-test"."""
        low, high = (
            f"{'−' * (v < 0)}{number(abs(v), 2)}" for v in (self.value - self.margin, self.value + self.margin)
        )
        return f"95% interval {low} to {high}, {self.test}"


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and sample standard deviation of the finite values.

    >>> estimate([1.0, 3.0, float("nan")]).mean
    2.0
    """
    finite = [value for value in values if math.isfinite(value)]
    mean = sum(finite) / len(finite) if finite else math.nan
    sd = float(np.std(finite, ddof=1)) if len(finite) > 1 else math.nan
    return Estimate(mean, sd, len(finite))


def difference(a: Sequence[float], b: Sequence[float], paired: bool) -> Difference:
    """mean(a) - mean(b), over pairs of one seed or one step, or by Welch's test."""
    if paired and len(a) != len(b):
        raise ValueError(f"a, b: pairs need equal numbers of values, got {len(a)} and {len(b)}")
    first, second = estimate(a), estimate(b)
    value, error, freedom = first.mean - second.mean, math.nan, 0.0
    if paired:
        gaps = estimate([x - y for x, y in zip(a, b, strict=True)])
        value, error, freedom = gaps.mean, gaps.sd / math.sqrt(max(gaps.n, 1)), gaps.n - 1
    elif min(first.n, second.n) > 1:
        va, vb = first.sd**2 / first.n, second.sd**2 / second.n
        spread = va**2 / (first.n - 1) + vb**2 / (second.n - 1)
        error = math.sqrt(va + vb)
        freedom = (va + vb) ** 2 / spread if spread > 0 else first.n + second.n - 2
    margin = float(stdtrit(freedom, 0.975)) * error if freedom > 0 else math.nan
    return Difference(value, error, abs(value) > margin, margin, "paired t-test" if paired else "Welch's t-test")


def running_mean(steps: Sequence[int], values: Sequence[float], window: int) -> list[float]:
    """At each step s the mean of the values of the steps in (s - window, s].

    >>> running_mean([1, 2, 3], [4.0, 2.0, 6.0], window=2)
    [4.0, 3.0, 4.0]
    """
    if not values:
        return []
    own, stop = np.asarray(steps), np.arange(1, len(values) + 1)
    return _means(values, np.minimum(np.searchsorted(own, own - window, side="right"), stop - 1), stop)


def centred_mean(steps: Sequence[int], values: Sequence[float], window: int) -> list[float]:
    """At each step the mean over `window` steps around it, over fewer at both ends, so that curves are not shifted.

    >>> centred_mean([1, 2, 3], [4.0, 2.0, 6.0], window=2)
    [4.0, 4.0, 6.0]
    """
    if not values:
        return []
    own = np.asarray(steps)
    half = np.minimum(window / 2, np.minimum(own - own[0], own[-1] - own))
    return _means(values, np.searchsorted(own, own - half), np.searchsorted(own, own + half, side="right"))


def _means(values: Sequence[float], first: Indices, stop: Indices) -> list[float]:
    """The mean of values[first:stop] for each pair."""
    bounds = np.stack([first, stop], axis=1).ravel()
    sums = np.add.reduceat([*values, 0.0], bounds)[::2]  # not by cumsum, in which a spike would leave rounding errors
    return [float(mean) for mean in sums / (stop - first)]


# ---------------------------------------------------------------------------------------------------------------- as text


def number(value: float, digits: int = 4) -> str:
    """Format with significant digits and thousands separators: 0.2301, 12.30, 1,234."""
    if not math.isfinite(value):
        return UNKNOWN
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


def count(value: float) -> str:
    """Format a whole number: 1,234."""
    return f"{value:,.0f}" if math.isfinite(value) else UNKNOWN


def with_sd(value: Estimate, digits: int = 4) -> str:
    """Format mean and sd, with as many decimals as the mean: 0.2301 ± 0.0012; a single value has no sd."""
    mean = number(value.mean, digits)
    if not math.isfinite(value.sd):
        return mean
    decimals = len(mean.partition(".")[2]) if "e" not in mean else 0
    sd = f"{value.sd:,.{decimals}f}"
    return f"{mean} ± {sd if float(sd.replace(',', '')) or not value.sd else number(value.sd, 2)}"


def percent(new: float, old: float) -> str:
    """Format the change from old to new: −35%, +4.2%."""
    if not (math.isfinite(new) and math.isfinite(old)) or old == 0:
        return UNKNOWN
    change = 100 * (new / old - 1)
    return f"{'−' if change < 0 else '+'}{abs(change):.{0 if abs(change) >= 9.95 else 1}f}%"


def duration(seconds: float) -> str:
    """Format seconds: 12.3 s, 4 min 5 s, 3 h 20 min, 5 days 4 h."""
    if not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 100:
        return f"{seconds:.3g} s"
    if round(seconds) < 3600:
        return "{} min {} s".format(*divmod(round(seconds), 60))
    if seconds < 48 * 3600:
        return "{:,} h {} min".format(*divmod(round(seconds / 60), 60))
    return "{:,} days {} h".format(*divmod(round(seconds / 3600), 24))


def duration_with_sd(value: Estimate) -> str:
    """Format mean and sd of seconds: 12.3 ± 0.4 s, or 4 min 5 s ± 12 s."""
    if not math.isfinite(value.sd):
        return duration(value.mean)
    return f"{with_sd(value, 3)} s" if value.mean < 100 else f"{duration(value.mean)} ± {duration(value.sd)}"


def times(value: float) -> str:
    """Format a ratio: 1.33×."""
    return f"{value:.2f}×" if math.isfinite(value) else UNKNOWN


def at_steps(values: Sequence[tuple[int, float]]) -> str:
    """Format values with their steps: 238.2 at step 4,000 and 115.7 at step 8,000."""
    return joined([f"{number(value)} at step {count(step)}" for step, value in values]) or UNKNOWN


def joined(parts: list[str]) -> str:
    """Join to "a, b and c"."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def shortened(names: Iterable[str]) -> dict[str, str]:
    """The first eight letters of each name, or as many as it takes to tell them apart."""
    full = set(names)
    length = next(n for n in range(8, 9 + max(map(len, full), default=0)) if len({f[:n] for f in full}) == len(full))
    return {name: name[:length] for name in full}
