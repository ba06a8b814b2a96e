"""CS, its reverse, and the methods with one number for all skips."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalelong.scaling.constant import SkipSize, constant_coefficients, reversed_coefficients, universal_coefficients
from scalelong.scaling.registry import ScalingConfig

IMAGES = [SkipSize(channels=16), SkipSize(channels=32), SkipSize(channels=32)]

num_skips = st.integers(1, 40)
kappas = st.floats(0.05, 1.0)


@given(num_skips, kappas)
def test_cs_keeps_the_outermost_and_decays_inwards(n: int, kappa: float) -> None:
    coefficients = constant_coefficients(n, kappa)
    assert coefficients[0] == 1
    assert all(inner == pytest.approx(kappa * outer) for outer, inner in itertools.pairwise(coefficients))


@given(num_skips, kappas)
def test_cs_reversed_is_cs_from_the_other_end_times_kappa(n: int, kappa: float) -> None:
    expected = [kappa * c for c in reversed(constant_coefficients(n, kappa))]
    assert reversed_coefficients(n, kappa) == pytest.approx(expected)


def test_universal_and_rsqrt2_are_the_same_everywhere() -> None:
    assert universal_coefficients(3, 0.4) == [0.4, 0.4, 0.4]
    assert ScalingConfig.create("rsqrt2").build(IMAGES).current() == pytest.approx([1 / math.sqrt(2)] * 3)


def test_a_constant_scaling_multiplies_by_its_coefficient() -> None:
    scaling = ScalingConfig.create("cs", kappa=0.5).build(IMAGES)
    skip = torch.randn(2, 32, 4, 4)
    assert torch.equal(scaling(3, skip), skip * 0.25)
    assert scaling.coefficient(3, skip) == 0.25


def test_annealed_scaling_is_cs_for_a_kappa_that_falls_with_the_step() -> None:
    config = ScalingConfig.create("cs_annealed", kappa=0.5, anneal_steps=10)
    scaling, skip = config.build([SkipSize(channels=4)] * 3), torch.ones(1, 4, 2, 2)
    assert scaling.current() == [1, 1, 1]
    for step, kappa in ((0, 1.0), (5, 0.75), (10, 0.5), (99, 0.5)):
        scaling.advance(step)
        assert scaling.current() == pytest.approx(constant_coefficients(3, kappa))
        torch.testing.assert_close(scaling(3, skip), kappa**2 * skip)
    other = config.build([SkipSize(channels=4)] * 3)
    other.load_state_dict(scaling.state_dict())
    assert other.current() == scaling.current()


def test_a_subset_removes_inner_or_outer_skips() -> None:
    sizes = [SkipSize(channels=4)] * 4
    assert ScalingConfig.create("subset", removed="inner", count=3).build(sizes).current() == [1, 0, 0, 0]
    assert ScalingConfig.create("subset", removed="outer").build(sizes).current() == [0, 1, 1, 1]
    with pytest.raises(ValueError, match=r"scaling\.count: must be at most 4, the skips of a U, got 5"):
        ScalingConfig.create("subset", count=5).build([*sizes, SkipSize(channels=4, nest=2)])
    with pytest.raises(ValueError, match=r"scaling\.removed: unknown 'middle'"):
        ScalingConfig.create("subset", removed="middle")


@pytest.mark.parametrize("method", ["cs", "cs_reversed", "cs_annealed", "subset", "skip_tuning"])
def test_each_u_of_a_network_is_numbered_from_its_own_outermost_skip(method: str) -> None:
    def current(*nests: int) -> list[float]:
        scaling = ScalingConfig.create(method).build([SkipSize(channels=4, nest=nest) for nest in nests])
        scaling.advance(10_000)
        return scaling.current()

    assert current(1, 1, 1, 2, 2) == [*current(1, 1, 1), *current(1, 1)]
