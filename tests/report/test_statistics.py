"""The arithmetic, against numbers worked out by hand or by scipy."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from scalelong.report.statistics import (
    estimate,
    first_at_most,
    paired_difference,
    ratio,
    running_mean,
    unpaired_difference,
)


def test_estimate_is_the_mean_and_the_sample_sd() -> None:
    value = estimate([1.0, 2.0, 6.0])
    assert (value.mean, value.n) == (3.0, 3)
    assert value.sd == pytest.approx(math.sqrt(7))


def test_estimate_leaves_out_what_is_not_finite_and_knows_no_sd_of_one() -> None:
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


def test_first_at_most_takes_the_first_crossing_not_before_the_window_is_full() -> None:
    steps, values = [10, 20, 30, 40], [0.1, 0.5, 0.3, 0.2]
    assert first_at_most(steps, values, 0.3) == 10
    assert first_at_most(steps, values, 0.3, after=20) == 30
    assert first_at_most(steps, values, 0.05) is None
    assert first_at_most(steps, values, 0.2, after=20) == 40  # exactly the target counts


def test_differences_agree_with_the_t_tests_of_scipy() -> None:
    a, b = [1.0, 1.3, 0.9, 1.2], [0.7, 1.1, 0.6, 1.15]
    paired, unpaired = paired_difference(a, b), unpaired_difference(a, b)
    assert [paired.value, unpaired.value] == pytest.approx([0.2125, 0.2125])
    assert paired.value / paired.standard_error == pytest.approx(stats.ttest_rel(a, b).statistic)
    assert unpaired.value / unpaired.standard_error == pytest.approx(stats.ttest_ind(a, b, equal_var=False).statistic)
    assert stats.ttest_rel(a, b).pvalue < 0.05 < stats.ttest_ind(a, b, equal_var=False).pvalue
    assert (paired.clear, unpaired.clear) == (True, False)


def test_two_seeds_need_a_far_larger_difference_than_two_standard_errors() -> None:
    difference = paired_difference([1.0, 1.1], [0.5, 0.8])
    assert difference.value / difference.standard_error == pytest.approx(4)
    assert not difference.clear


def test_a_difference_of_single_values_is_never_clear() -> None:
    for difference in (paired_difference([9.0], [1.0]), unpaired_difference([9.0], [1.0, 2.0])):
        assert math.isnan(difference.standard_error)
        assert not difference.clear
    with pytest.raises(ValueError, match="equal numbers"):
        paired_difference([1.0], [1.0, 2.0])


def test_ratio_has_no_meaning_over_nothing() -> None:
    assert ratio(3.0, 2.0) == 1.5
    assert math.isnan(ratio(3.0, 0.0))
    assert math.isnan(ratio(math.nan, 2.0))
