"""How much a recorded series moves, relative to its size. No torch: reports and diagnoses use it too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

PROBE_EVERY = (
    50  # steps between probe records; keeps the probe below 2% of the step time (benchmarks/probe_overhead.py)
)


def relative_oscillation(norms: Sequence[float]) -> float:
    """mean |n_(k+1) - n_k| / mean n: how far a norm moves between two records, relative to its size.

    >>> relative_oscillation([1.0, 3.0, 2.0])
    0.75
    """
    if len(norms) < 2:
        raise ValueError(f"norms: oscillation needs at least 2 records, got {len(norms)}")
    change = sum(abs(after - before) for before, after in pairwise(norms)) / (len(norms) - 1)
    return _ratio(change, sum(norms) / len(norms))


def relative_spread(values: Sequence[float]) -> float:
    """Standard deviation over mean.

    >>> round(relative_spread([1.0, 3.0]), 3)
    0.707
    """
    if len(values) < 2:
        raise ValueError(f"values: a spread needs at least 2 records, got {len(values)}")
    mean = sum(values) / len(values)
    deviation = math.hypot(*(value - mean for value in values)) / math.sqrt(len(values) - 1)
    return _ratio(deviation, mean)


def _ratio(value: float, mean: float) -> float:
    """value / mean; nan for a series of zeros."""
    return value / mean if mean else math.inf if value else math.nan
