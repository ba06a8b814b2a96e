"""What LS learnt: read off noise inputs, and the nearest curve of CS."""

from __future__ import annotations

import math

import pytest
import torch

import scalelong
from scalelong.backbones import UViT, UViTConfig, as_network
from scalelong.lab.learned import fit_cs, learned_coefficients
from scalelong.scaling.constant import constant_coefficients
from scalelong.skips import scaling_of


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


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 skips, got 1"):
        fit_cs([1.0])
    with pytest.raises(ValueError, match="must be finite"):
        fit_cs([1.0, math.nan])
    model = gated()
    with pytest.raises(ValueError, match="count: must be at least 1"):
        learned_coefficients(as_network(model), model, (3, 8, 8), 999.0, count=0)
