"""kappa="auto": what it stands for, and the interval that is told beside it."""

from __future__ import annotations

import logging

import pytest
import torch

import scalelong
from scalelong.backbones import UViT, UViTConfig
from scalelong.runs.settings import ScalingSettings
from scalelong.skips import is_scaled
from scalelong.skips.auto import USUAL_KAPPA, auto_kappa, example_interval, sum_of_squares
from scalelong.training import RunConfig, from_yaml, to_yaml


def uvit() -> UViT:
    return UViT(UViTConfig(image_size=8, patch_size=4, dim=16, depth=8, heads=2))


def test_auto_is_the_usual_kappa_and_the_interval_is_told(caplog) -> None:
    model = uvit()
    example = (torch.full((4, 3, 8, 8), 0.8), torch.zeros(4))
    with caplog.at_level(logging.INFO, "scalelong"):
        handle = scalelong.apply(model, "cs", kappa="auto", example=example)
    assert handle.coefficients() == pytest.approx([USUAL_KAPPA**i for i in range(4)])
    assert handle.config.options["kappa"] == USUAL_KAPPA  # what is saved beside weights is the number
    low, high = example_interval(4, (example, {}))
    assert sum_of_squares(low, 4) == pytest.approx(1 / 0.64, rel=1e-6)
    assert f"auto is 0.7, outside the interval {low:.3f} .. {high:.3f}" in caplog.text


def test_without_noisy_inputs_there_is_no_interval() -> None:
    assert example_interval(4, ((torch.zeros(4),), {})) is None  # no images
    assert example_interval(4, ((torch.zeros(2, 3, 8, 8),), {})) is None  # nothing to divide by
    assert scalelong.apply(uvit(), "cs", kappa="auto").config.options["kappa"] == USUAL_KAPPA


@pytest.mark.parametrize("method", ["universal", "cs_reversed"])
def test_auto_is_for_cs_and_an_error_leaves_the_model_alone(method: str) -> None:
    model = uvit()
    with pytest.raises(ValueError, match=f"'auto' is for 'cs', got method '{method}'; give a number"):
        scalelong.apply(model, method, kappa="auto")
    assert not is_scaled(model)
    with pytest.raises(ValueError, match="'auto' is for 'cs'"):
        auto_kappa(method)


def test_settings_take_auto_from_yaml_and_keep_the_number(tmp_path) -> None:
    (tmp_path / "run.yaml").write_text("scaling: {method: cs, kappa: auto}\n")
    config = from_yaml(tmp_path / "run.yaml")
    assert config.scaling.kappa == USUAL_KAPPA
    assert "kappa: 0.7" in to_yaml(config)
    assert RunConfig(scaling=ScalingSettings("cs", kappa="auto")) == config
    (tmp_path / "run.yaml").write_text("scaling: {kappa: automatic}\n")
    with pytest.raises(ValueError, match=r"scaling.kappa: must be float, got 'automatic'"):
        from_yaml(tmp_path / "run.yaml")
