"""How numbers are written."""

import math

import pytest

from scalelong.report.numbers import (
    count,
    duration,
    duration_with_sd,
    joined,
    number,
    percent,
    shortened,
    times,
    with_sd,
)
from scalelong.report.statistics import Estimate, estimate


@pytest.mark.parametrize(
    ("value", "text"), [(0.23, "0.2300"), (12.3, "12.30"), (1234.4, "1,234"), (0.0, "0"), (math.nan, "–")]
)
def test_number_keeps_four_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_the_sd_has_the_decimals_of_the_mean() -> None:
    assert with_sd(Estimate(0.2301, 0.0012, 3)) == "0.2301 ± 0.0012"
    assert with_sd(Estimate(471.0, 17.4, 3), 3) == "471 ± 17"
    assert with_sd(estimate([0.5])) == "0.5000"
    assert with_sd(Estimate(100.0, 0.02, 3), 3) == "100 ± 0.020"  # a small sd is not rounded to none


def test_changes_times_and_lists() -> None:
    assert percent(0.065, 0.1) == "−35%"
    assert percent(1.042, 1.0) == "+4.2%"
    assert percent(1.0, 0.0) == "–"
    assert [duration(s) for s in (12.345, 245.0, 12_000.0, math.nan)] == ["12.3 s", "4 min 5 s", "3 h 20 min", "–"]
    assert duration_with_sd(Estimate(12.34, 0.41, 3)) == "12.3 ± 0.4 s"
    assert (times(4 / 3), times(math.nan)) == ("1.33×", "–")
    assert (count(1234.0), count(math.nan)) == ("1,234", "–")
    assert [joined(parts) for parts in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]


def test_names_are_shortened_as_far_as_they_stay_apart() -> None:
    assert shortened(["0123456789", "abcdefghij"]) == {"0123456789": "01234567", "abcdefghij": "abcdefgh"}
    assert set(shortened(["sha256:0123", "sha256:0145"]).values()) == {"sha256:012", "sha256:014"}
    assert shortened([]) == {}
