"""Theorem 3.1: the exact mean over the weights, its weights per skip, the index, and the spread."""

import math

import pytest
import torch

from scalelong.lab.matrix_unet import MatrixUNet, coefficients_of, noisy_inputs
from scalelong.lab.theorem31 import (
    change_gain_,
    coefficient_sets,
    feedforward_spread,
    fit_line,
    hidden_squared,
    index_effect,
    measure_ratios,
    rho_of,
    skip_weights,
)


def test_all_sets_at_once_equal_the_network() -> None:
    model = MatrixUNet(16, 3, 4)
    x, _ = noisy_inputs(2, 16, 0)
    sets = coefficient_sets(4, 0)
    found = hidden_squared(model, x, sets)
    for s, row in enumerate(sets.tolist()):
        for i, hidden in enumerate(model.hidden(x, row)):
            torch.testing.assert_close(found[i, s], hidden.double().square().sum(1), rtol=1e-4, atol=0)


def mean_hidden_squared(coefficients: list[float], i: int, gain: float) -> float:
    """E||h_i||^2 / ||x||^2 over the weights, as derived in theorem31.py."""
    n = len(coefficients)
    skips = sum(coefficients[j - 1] ** 2 * gain ** (2 * j - i) for j in range(i + 1, n + 1))
    return skips + gain ** (2 * n + 1 - i)


def test_mean_formula_solves_the_recursion() -> None:
    """u_(i-1) = g (kappa_i^2 g^i + u_i), u_N = g^(N+1)."""
    kappas = [0.9, 0.3, 0.7]
    for gain in (1.0, 2.0):
        u = gain**4
        assert mean_hidden_squared(kappas, 3, gain) == pytest.approx(u)
        for i in (3, 2, 1):
            u = gain * (kappas[i - 1] ** 2 * gain**i + u)
            assert mean_hidden_squared(kappas, i - 1, gain) == pytest.approx(u)


@pytest.mark.parametrize("gain", [1.0, 2.0])
def test_measured_mean_is_the_exact_mean(gain: float) -> None:
    sets = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.5, 0.25], [0.2, 0.4, 0.9]], dtype=torch.float64)
    ratios = measure_ratios(48, sets, 700, 0, (gain,))[gain]  # (R, N + 1, S)
    mean, error = ratios.mean(0), ratios.std(0) / math.sqrt(len(ratios))
    exact = torch.tensor([[mean_hidden_squared(row, i, gain) for row in sets.tolist()] for i in range(4)])
    assert ((mean - exact).abs() < 4 * error).all()
    shifted = torch.tensor(
        [[mean_hidden_squared([0.0, *row[:-1]], i, gain) for row in sets.tolist()] for i in range(4)]
    )
    assert ((mean - shifted).abs() > 4 * error).any()  # the test can fail


def test_weights_grow_as_4_to_the_j_as_stated_and_not_at_unit_gain() -> None:
    found = skip_weights(3, 48, 500, 1)
    for name in ("paper", "unit"):
        off = torch.tensor(found[name]) - torch.tensor(found[f"{name}_exact"])
        assert (off.abs() < 4 * torch.tensor(found[f"{name}_error"])).all()
    assert found["paper_exact"] == [4, 16, 64]
    assert found["unit_exact"] == [1, 1, 1]
    assert found["paper"][2] > 2 * found["paper"][1]


def test_h_i_does_not_depend_on_kappa_i() -> None:
    own, following = index_effect(5, 32, 0)
    assert own < 1e-6  # float32 rounding at most
    assert following > 0.01


def test_proportional_to_the_sum_of_squares_with_unit_gain() -> None:
    sets = coefficient_sets(6, 0)
    mean = measure_ratios(128, sets, 40, 2)[1.0].mean(0)
    assert fit_line(sets.square().sum(1), mean[0])["r_squared"] > 0.97
    assert (
        fit_line(sets[:, 3:].square().sum(1), mean[3])["r_squared"]
        > fit_line(sets[:, 2:].square().sum(1), mean[3])["r_squared"]
    )


def test_spread_of_a_path_is_exact_and_falls_with_the_width() -> None:
    sets = torch.zeros(1, 1, dtype=torch.float64)
    for width in (32, 96):
        ratios = measure_ratios(width, sets, 900, 5)[1.0][:, 0, 0]
        exact = feedforward_spread(width, 2, 3)
        assert float(ratios.std()) == pytest.approx(exact, rel=0.15)
    assert feedforward_spread(4000, 2, 3) / feedforward_spread(1000, 2, 3) == pytest.approx(0.5, rel=0.02)
    assert feedforward_spread(10_000, 2, 33) / feedforward_spread(10_000, 2, 3) == pytest.approx(11**0.5, rel=0.05)


def test_rho_is_the_literal_one() -> None:
    ratios = torch.linspace(0.9, 1.1, 201, dtype=torch.float64).square()
    assert rho_of(ratios, 1.0) == pytest.approx(0.095, abs=1e-3)


def test_change_of_gain_equals_weights_sampled_at_that_gain() -> None:
    one = MatrixUNet(8, 2, 2).sample_weights_(torch.Generator().manual_seed(0), 1.0)
    two = MatrixUNet(8, 2, 2).sample_weights_(torch.Generator().manual_seed(0), 2.0)
    change_gain_(one, 1.0, 2.0)
    for left, right in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(left, right)


def test_coefficients_of_methods() -> None:
    assert coefficients_of("none", 3) == [1, 1, 1]
    assert coefficients_of("cs", 3, 0.5) == [1, 0.5, 0.25]
    assert coefficients_of("cs_reversed", 3, 0.5) == [0.125, 0.25, 0.5]
    assert fit_line(torch.tensor([0.0, 1, 2]), torch.tensor([1.0, 3, 5]))["slope"] == pytest.approx(2)
