"""Means, differences and running means against values computed by hand or by scipy, and how numbers are written."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from scalelong.report.numbers import (
    Estimate,
    centred_mean,
    count,
    difference,
    duration,
    duration_with_sd,
    estimate,
    joined,
    number,
    percent,
    running_mean,
    shortened,
    times,
    with_sd,
)


@given(st.integers(1, 40), st.floats(-5, 5), st.integers(1, 30))
def test_smoothing_does_not_shift_a_slope(count: int, slope: float, window: int) -> None:
    steps = [10 * i for i in range(count)]
    values = [slope * step + 1 for step in steps]
    assert centred_mean(steps, values, window) == pytest.approx(values)


def test_smoothing_averages_around_each_step() -> None:
    assert centred_mean([1, 2, 3, 4, 5], [0.0, 0.0, 3.0, 0.0, 0.0], window=2) == pytest.approx([0, 1, 1, 1, 0])


def test_estimate_is_the_mean_and_the_sample_sd() -> None:
    value = estimate([1.0, 2.0, 6.0])
    assert (value.mean, value.n) == (3.0, 3)
    assert value.sd == pytest.approx(math.sqrt(7))


def test_estimate_ignores_values_that_are_not_finite() -> None:
    value = estimate([2.0, math.nan])
    assert (value.mean, value.n) == (2.0, 1)
    assert math.isnan(value.sd)
    assert math.isnan(estimate([]).mean)


def test_running_mean_counts_steps_not_records() -> None:
    assert running_mean([1, 2, 3, 10], [4.0, 2.0, 6.0, 8.0], window=2) == [4.0, 3.0, 4.0, 8.0]


def test_a_spike_leaves_no_trace_after_its_window() -> None:
    assert running_mean([1, 2, 3, 4, 5], [0.1, 1e30, 0.1, 0.3, 0.1], window=2)[3:] == [0.2, 0.2]
    assert running_mean([], [], window=2) == []


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30), st.integers(1, 40))
def test_running_mean_is_the_mean_of_the_window(values: list[float], window: int) -> None:
    steps = list(range(1, len(values) + 1))
    means = running_mean(steps, values, window)
    for i, mean in enumerate(means):
        own = values[max(0, i - window + 1) : i + 1]
        assert mean == pytest.approx(sum(own) / len(own), abs=1e-9)


def test_differences_agree_with_the_t_tests_of_scipy() -> None:
    a, b = [1.0, 1.3, 0.9, 1.2], [0.7, 1.1, 0.6, 1.15]
    paired, unpaired = difference(a, b, paired=True), difference(a, b, paired=False)
    assert [paired.value, unpaired.value] == pytest.approx([0.2125, 0.2125])
    assert paired.value / paired.standard_error == pytest.approx(stats.ttest_rel(a, b).statistic)
    assert unpaired.value / unpaired.standard_error == pytest.approx(stats.ttest_ind(a, b, equal_var=False).statistic)
    assert stats.ttest_rel(a, b).pvalue < 0.05 < stats.ttest_ind(a, b, equal_var=False).pvalue
    assert (paired.clear, unpaired.clear) == (True, False)


def test_two_seeds_need_a_far_larger_difference_than_two_standard_errors() -> None:
    found = difference([1.0, 1.1], [0.5, 0.8], paired=True)
    assert found.value / found.standard_error == pytest.approx(4)
    assert not found.clear


def test_a_difference_of_single_values_is_never_clear() -> None:
    for found in (difference([9.0], [1.0], paired=True), difference([9.0], [1.0, 2.0], paired=False)):
        assert math.isnan(found.standard_error)
        assert not found.clear
    with pytest.raises(ValueError, match="equal numbers"):
        difference([1.0], [1.0, 2.0], paired=True)


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


def test_changes_durations_and_lists() -> None:
    assert percent(0.065, 0.1) == "−35%"
    assert percent(1.042, 1.0) == "+4.2%"
    assert percent(1.0, 0.0) == "–"
    assert [duration(s) for s in (12.345, 245.0, 12_000.0, math.nan)] == ["12.3 s", "4 min 5 s", "3 h 20 min", "–"]
    assert duration_with_sd(Estimate(12.34, 0.41, 3)) == "12.3 ± 0.4 s"
    assert (times(4 / 3), times(math.nan)) == ("1.33×", "–")
    assert (count(1234.0), count(math.nan)) == ("1,234", "–")
    assert [joined(parts) for parts in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]


def test_shortened_names_stay_distinct() -> None:
    assert shortened(["0123456789", "abcdefghij"]) == {"0123456789": "01234567", "abcdefghij": "abcdefgh"}
    assert set(shortened(["sha256:0123", "sha256:0145"]).values()) == {"sha256:012", "sha256:014"}
    assert shortened([]) == {}
