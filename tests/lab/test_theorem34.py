"""Theorem 3.4: where it is tight, where the printed form breaks, and that the corrected forms never do."""

import math

import pytest
import torch
from torch import nn

from scalelong.lab.bounds import (
    block_norms,
    composed_norms,
    counterexample,
    linear_pieces,
    local_bound,
    path_bound,
    power_bound,
    power_iteration,
    product_bound,
    segment_jacobians,
)
from scalelong.lab.matrix_unet import MatrixUNet, coefficients_of, matrices, noisy_inputs
from scalelong.lab.theorem34 import broken_case, change_per_perturbation, random_case, tightness_at, violations

FACTORS, MIDDLE = [2.0, 3.0, 1.5], 0.8


def scaled_identities(factors: list[float], middle: float, layers: int = 2, width: int = 5) -> MatrixUNet:
    """||b_i|| ||a_i|| = factors[i] with nothing lost between blocks on positive inputs: every bound is attained."""
    model = MatrixUNet(width, layers, len(factors)).double()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(torch.eye(width))
        for i, factor in enumerate(factors):
            matrices(model.a[i])[0].mul_(math.sqrt(factor))
            matrices(model.b[i])[-1].mul_(math.sqrt(factor))
        matrices(model.middle)[0].mul_(middle)
    return model


@pytest.mark.parametrize("method", ["none", "universal", "cs", "cs_reversed"])
@pytest.mark.parametrize("layers", [1, 3])
def test_bound_is_attained_and_any_other_index_is_violated(method: str, layers: int) -> None:
    kappas = coefficients_of(method, 3, 0.5)
    model = scaled_identities(FACTORS, MIDDLE, layers)
    x, step = torch.full((5,), 2.0).double(), torch.linspace(0.1, 0.5, 5).double()
    measured = change_per_perturbation(model, x, step, kappas)
    factors, middle = block_norms(model)
    assert factors == pytest.approx(FACTORS)
    assert product_bound(kappas, factors, middle) == pytest.approx(measured, rel=1e-12)
    jacobians = segment_jacobians(model, x, x + step, kappas)
    assert local_bound(jacobians, kappas) == pytest.approx(measured, rel=1e-12)
    assert path_bound(jacobians, kappas) == pytest.approx(measured, rel=1e-12)
    if method == "cs":
        shifted = [0.5**i for i in range(1, 4)]  # kappa^i for kappa^(i-1)
        assert product_bound(shifted, factors, middle) < 0.9 * measured
        assert product_bound(kappas[::-1], factors, middle) != pytest.approx(measured, rel=0.05)
        assert product_bound(kappas, factors, 0.0) < 0.9 * measured  # c_0 cannot be left out


def test_power_bound_is_the_printed_sum() -> None:
    assert power_bound([1.0, 0.5], 3.0, 2.0) == pytest.approx(1 * 3 + 0.5 * 9 + 9 * 2)


@pytest.mark.parametrize("m0", [1.0, 1.5])
@pytest.mark.parametrize("num_skips", [1, 3])
def test_counterexample_violates_the_printed_bound_only(m0: float, num_skips: int) -> None:
    model = counterexample(4.0, m0, num_skips)
    assert composed_norms(model) == pytest.approx([m0] * num_skips)
    x, step = torch.ones(2).double(), torch.tensor([0.1, 0.0]).double()
    kappas = [1.0] * num_skips
    measured, (factors, middle) = change_per_perturbation(model, x, step, kappas), block_norms(model)
    assert middle == pytest.approx(1)
    assert measured > power_bound(kappas, m0, middle) * 1.5
    assert measured <= product_bound(kappas, factors, middle)


def test_counterexample_holds_with_relu() -> None:
    linear, relu = counterexample(4.0), counterexample(4.0, layers=2)
    x = torch.rand(3, 2).double()
    torch.testing.assert_close(linear(x, [0.7]), relu(x, [0.7]))


def test_without_stretch_the_printed_bound_is_met_exactly() -> None:
    case = broken_case(1.0, 1.0)
    assert case["measured"] <= case["printed"]
    assert broken_case(8.0, 1.0)["measured"] == pytest.approx(math.sqrt(1 + 64**2))


def test_no_violation_in_random_networks_and_violations_are_counted() -> None:
    cases = [random_case(number, 1) for number in range(150)]
    for bound in ("largest factor", "product", "local", "path", "printed"):
        assert violations(cases, bound) == 0
    for case in cases:
        assert case["path"] <= case["local"] * (1 + 1e-9) <= case["product"] * (1 + 1e-8)
        assert case["product"] <= case["largest factor"] * (1 + 1e-9)
    assert violations([{"measured": 2.0, "product": 1.0}, {"measured": math.nan, "product": 1.0}], "product") == 2
    assert max(case["pieces"] for case in cases) > 5
    assert random_case(7, 1) == pytest.approx(random_case(7, 1))


def test_all_linear_pieces_are_found() -> None:
    """Between breaks the network is affine, across each break it is not; the integral of J gives the exact change."""
    model = MatrixUNet(8, 3, 2).double().sample_weights_(torch.Generator().manual_seed(0))
    (x, other) = noisy_inputs(2, 8, 3)[0].double()
    kappas = [1.0, 0.6]
    places = linear_pieces(model, x, other, kappas)
    assert len(places) > 4
    thirds = torch.stack([places[:-1] + places.diff() * share for share in (0.25, 0.5, 0.75)])
    with torch.no_grad():
        left, middle, right = (model(torch.lerp(x, other, row[:, None]), kappas) for row in thirds)
        torch.testing.assert_close(middle, (left + right) / 2, rtol=1e-9, atol=1e-12)
        jacobians = segment_jacobians(model, x, other, kappas)
        change = (jacobians.network(kappas) @ (other - x) * jacobians.lengths[:, None]).sum(0)
        torch.testing.assert_close(change, (model(other, kappas) - model(x, kappas)).squeeze(), rtol=1e-9, atol=1e-12)


def test_power_iteration_finds_the_norm_from_below() -> None:
    model = MatrixUNet(12, 2, 3).double().sample_weights_(torch.Generator().manual_seed(2))
    x, kappas = noisy_inputs(1, 12, 0)[0][0].double(), [1.0, 0.7, 0.49]
    jacobian = torch.func.jacrev(lambda point: model(point, kappas))(x).detach()
    exact = float(torch.linalg.matrix_norm(jacobian, ord=2))
    norm, direction = power_iteration(lambda point: model(point, kappas), x, 200)
    assert exact * (1 - 1e-6) < norm <= exact * (1 + 1e-12)
    assert float((jacobian @ direction).norm()) == pytest.approx(exact, rel=1e-6)
    assert power_iteration(lambda point: model(point, kappas), x, 1)[0] < exact
    assert power_iteration(lambda point: 0 * point, x)[0] == 0


def test_cs_wins_by_kappa_to_the_n_minus_2_in_the_skips_but_not_in_the_whole_bound() -> None:
    row = tightness_at(8, 12, 1, 0)
    cs, universal = row["methods"]["cs"], row["methods"]["universal"]
    assert cs["skips"] / universal["skips"] == pytest.approx(0.7**6, rel=0.1)
    assert cs["product"] / universal["product"] > 0.7
