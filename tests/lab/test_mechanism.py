"""What CS is under Adam, and the gradients at the start."""

from __future__ import annotations

import pytest
import torch

import scalelong
from scalelong.backbones import UViT, UViTConfig
from scalelong.lab.mechanism import adam_distances, gradient_ratios, split_joins


@pytest.mark.slow
def test_cs_is_an_initial_size_and_a_rate_under_adam() -> None:
    """30 AdamW steps in float64: both together are CS to 1e-12, either alone is not."""
    distances = adam_distances(steps=30)
    assert distances["size and rate"] < 1e-12
    assert min(distances["size only"], distances["rate only"], distances["none"]) > 1e-3


def test_split_joins_with_factors_are_the_scaling_of_the_package() -> None:
    torch.manual_seed(0)
    model = UViT(UViTConfig(image_size=8, patch_size=2, dim=16, depth=6, heads=2)).double()
    x, time = torch.randn(2, 3, 8, 8, dtype=torch.float64), torch.tensor([10.0, 500.0], dtype=torch.float64)
    kappa = [1.0, 0.5, 0.25]
    by_factor, by_size = split_joins(model, kappa, [1.0] * 3)(x, time), split_joins(model, [1.0] * 3, kappa)(x, time)
    scalelong.apply(model, "cs", kappa=0.5)
    torch.testing.assert_close(by_factor, model(x, time), rtol=0, atol=1e-12)
    torch.testing.assert_close(by_size, model(x, time), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_ratios_are_those_of_the_gradients() -> None:
    found = gradient_ratios(depth=8, width=64, seeds=[0, 1])
    assert all(len(values) == 2 for values in found.values())
    assert max(found["none"]) < min(min(values) for label, values in found.items() if label != "none")
    assert gradient_ratios(depth=8, width=64, seeds=[1])["ls"][0] == pytest.approx(found["ls"][1], rel=1e-4)
