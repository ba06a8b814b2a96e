"""Measurements on trained models: the robustness curve, the coefficients that LS learned, and the fit of CS."""

from __future__ import annotations

import math

import pytest
import torch
from settings import load

import scalelong
from scalelong.backbones import UViT, UViTConfig, as_network
from scalelong.diffusion import VPSDE, Objective
from scalelong.scaling.constant import constant_coefficients
from scalelong.skips import scaling_of

robustness_curve = load("fig03-distributions").measure.robustness_curve
fit_cs, learned_coefficients = (
    getattr(load("fig07-learned-kappa").measure, name) for name in ("fit_cs", "learned_coefficients")
)
IMAGES = torch.rand(40, 1, 4, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
OBJECTIVE = Objective(VPSDE())


def test_a_linear_network_has_its_factor_as_gain_and_the_change_grows_with_sigma() -> None:
    clean, small, large = robustness_curve(lambda x, t: 3 * x, OBJECTIVE, IMAGES, (0.0, 0.1, 0.2))
    assert (clean.sigma, clean.output_change) == (0.0, 0.0)
    assert math.isnan(clean.gain)
    assert small.gain == pytest.approx(3, rel=1e-4)
    assert large.output_change == pytest.approx(2 * small.output_change, rel=1e-4)
    assert clean.loss < small.loss < large.loss


def test_the_loss_grows_by_what_the_extra_noise_adds() -> None:
    """For f(x) = c x the loss grows by c^2 sigma^2 on average, the extra noise being independent."""
    images = IMAGES.repeat(50, 1, 1, 1)
    clean, noisy = robustness_curve(lambda x, t: 0.5 * x, OBJECTIVE, images, (0.0, 0.4))
    assert noisy.loss - clean.loss == pytest.approx(0.25 * 0.16, rel=0.1)


def test_a_constant_network_does_not_change() -> None:
    points = robustness_curve(lambda x, t: torch.ones_like(x), OBJECTIVE, IMAGES)
    assert all(point.output_change == 0 for point in points)
    assert len({point.loss for point in points}) == 1


def test_it_is_a_function_of_the_seed_and_not_of_the_chunks() -> None:
    def network(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return x.sin() + t[:, None, None, None] / 999

    one = robustness_curve(network, OBJECTIVE, IMAGES, (0.1,))
    parts = robustness_curve(network, OBJECTIVE, IMAGES, (0.1,), chunk=7)
    assert one[0].loss == pytest.approx(parts[0].loss, rel=1e-5)
    assert one[0].gain == pytest.approx(parts[0].gain, rel=1e-5)
    assert robustness_curve(network, OBJECTIVE, IMAGES, (0.1,), seed=1) != one


def test_robustness_curve_rejects_bad_input() -> None:
    for images, sigmas, message in (
        (IMAGES[:0], (0.1,), "images: at least one is needed"),
        (IMAGES, (0.1, -0.1), r"sigmas: must be numbers of at least 0, got \[-0.1\]"),
        (IMAGES, (math.nan,), "sigmas"),
        (IMAGES, (), "sigmas: must be numbers of at least 0, got none"),
    ):
        with pytest.raises(ValueError, match=message):
            robustness_curve(lambda x, t: x, OBJECTIVE, images, sigmas)
    with pytest.raises(TypeError, match="images: must be floats"):
        robustness_curve(lambda x, t: x, OBJECTIVE, IMAGES.to(torch.uint8))


def gated() -> UViT:
    torch.manual_seed(0)
    model = UViT(UViTConfig(image_size=8, patch_size=4, dim=16, depth=6, heads=2))
    scalelong.apply(model, "ls", reduction=1, activation="elu")
    return model


@pytest.mark.parametrize("kappa", [0.4, 0.7, 1.0, 1.1])
def test_the_fit_finds_the_curve_it_was_made_from(kappa: float) -> None:
    fit = fit_cs(constant_coefficients(6, kappa))
    assert fit.kappa == pytest.approx(kappa, abs=1e-6)
    assert fit.r_squared == pytest.approx(1, abs=1e-9)
    assert fit.curve(6) == pytest.approx(constant_coefficients(6, kappa), abs=1e-5)


def test_a_free_factor_fits_what_the_plain_curve_cannot() -> None:
    values = [0.5 * k for k in constant_coefficients(6, 0.8)]
    plain, free = fit_cs(values), fit_cs(values, free_scale=True)
    assert (free.scale, free.kappa) == (pytest.approx(0.5, abs=1e-6), pytest.approx(0.8, abs=1e-6))
    assert plain.r_squared < 0.5 < free.r_squared
    assert fit_cs([0.5] * 6).r_squared == -math.inf  # nothing varies, and the curve misses it
    rising = fit_cs([0.2, 0.4, 0.6])
    assert rising.r_squared < 0  # worse than a constant


def test_coefficients_are_those_of_each_noise_by_itself() -> None:
    model = gated().train()
    model.norm.eval()  # somebody froze it
    found = learned_coefficients(as_network(model), model, (3, 8, 8), 999.0, count=5)
    assert found.shape == (5, 3)
    assert bool(((found > 0) & (found < 1)).all())
    assert len(set(found[:, 0].tolist())) == 5
    again = learned_coefficients(as_network(model), model, (3, 8, 8), 999.0, count=2)
    assert torch.equal(found[:2], again)
    assert model.training
    assert not model.norm.training
    with torch.no_grad():
        for parameter in scaling_of(model).parameters():
            parameter.zero_()
    assert torch.equal(learned_coefficients(as_network(model), model, (3, 8, 8), 999.0), torch.full((30, 3), 0.5))


def test_fit_and_coefficients_reject_bad_input() -> None:
    with pytest.raises(ValueError, match="at least 2 skips, got 1"):
        fit_cs([1.0])
    with pytest.raises(ValueError, match="must be finite"):
        fit_cs([1.0, math.nan])
    model = gated()
    with pytest.raises(ValueError, match="count: must be at least 1"):
        learned_coefficients(as_network(model), model, (3, 8, 8), 999.0, count=0)
