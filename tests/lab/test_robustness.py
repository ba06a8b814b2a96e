"""The robustness curve on networks whose answer is known."""

from __future__ import annotations

import math

import pytest
import torch

from scalelong.diffusion import VPSDE, Objective
from scalelong.lab.robustness import robustness_curve

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
    clean, shaken = robustness_curve(lambda x, t: 0.5 * x, OBJECTIVE, images, (0.0, 0.4))
    assert shaken.loss - clean.loss == pytest.approx(0.25 * 0.16, rel=0.1)


def test_a_network_that_looks_at_nothing_is_not_shaken() -> None:
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


def test_bad_input_is_refused() -> None:
    for images, sigmas, message in (
        (IMAGES[:0], (0.1,), "images: needs at least one"),
        (IMAGES, (0.1, -0.1), r"sigmas: must be numbers of at least 0, got \[-0.1\]"),
        (IMAGES, (math.nan,), "sigmas"),
        (IMAGES, (), "sigmas: must be numbers of at least 0, got none"),
    ):
        with pytest.raises(ValueError, match=message):
            robustness_curve(lambda x, t: x, OBJECTIVE, images, sigmas)
    with pytest.raises(TypeError, match="images: must be floats"):
        robustness_curve(lambda x, t: x, OBJECTIVE, IMAGES.to(torch.uint8))
