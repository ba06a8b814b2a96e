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
