"""Oscillation and spread of recorded series."""

from __future__ import annotations

import math
import statistics

import pytest

from scalelong.runs.oscillation import relative_oscillation, relative_spread


def test_oscillation_and_spread_by_hand() -> None:
    assert relative_oscillation([1.0, 3.0, 2.0]) == pytest.approx((2 + 1) / 2 / 2)
    assert relative_oscillation([5.0, 5.0, 5.0]) == 0
    assert relative_spread([1.0, 3.0]) == pytest.approx(2**0.5 / 2)
    values = [0.3, 1.7, 2.2, 0.9]
    assert relative_spread(values) == pytest.approx(statistics.stdev(values) / statistics.mean(values))


@pytest.mark.parametrize("function", [relative_oscillation, relative_spread])
def test_series_of_zeros_infinities_and_single_records(function) -> None:
    assert math.isnan(function([0.0, 0.0]))
    assert not math.isfinite(function([1.0, math.inf, 2.0]))
    with pytest.raises(ValueError, match="at least 2 records, got 1"):
        function([1.0])
