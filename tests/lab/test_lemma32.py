"""Lemma 3.2: the means of the schedules, Monte Carlo, and what the proof prints."""

import math

import pytest
import torch

from scalelong.diffusion import DDPM, VPSDE
from scalelong.lab import judge
from scalelong.lab.lemma32 import (
    expected_squared_norm,
    input_norms,
    printed_alpha_bar,
    study,
)


def test_values_of_the_two_schedules() -> None:
    direct = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0).mean()
    assert DDPM().mean_alpha_bar() == pytest.approx(float(direct), rel=1e-12)
    assert round(DDPM().mean_alpha_bar(), 4) == 0.2755
    assert round(VPSDE().mean_alpha_bar(), 4) == 0.2760


def test_the_printed_product_has_a_root_too_many() -> None:
    assert round(printed_alpha_bar(square_root=True), 3) == 0.394
    assert round(printed_alpha_bar(square_root=False), 3) == 0.279


def test_uniform_second_moment_gives_equation_5() -> None:
    assert expected_squared_norm(0.3) == pytest.approx(1 - 2 * 0.3 / 3)
    assert expected_squared_norm(0.3, 1.0) == 1.0  # data of unit variance stay so


def test_monte_carlo_tells_uniform_data_from_others() -> None:
    _, values = input_norms(VPSDE(), None, 4000, 64, seed=3)
    error = float(values.std()) / math.sqrt(4000)
    mean = VPSDE().mean_alpha_bar()
    assert abs(float(values.mean()) - expected_squared_norm(mean)) < 3 * error
    assert abs(float(values.mean()) - expected_squared_norm(mean, 0.5)) > 3 * error
    ones = torch.full((5, 1, 8, 8), 255, dtype=torch.uint8)  # v = 1: the size does not change with t
    _, values = input_norms(VPSDE(), ones, 4000, 0, seed=3)
    assert abs(float(values.mean()) - 1) < 4 * float(values.std()) / math.sqrt(4000)


def test_study_is_deterministic_and_reports_what_fails() -> None:
    found = study(quick=True)
    assert found.findings == study(quick=True).findings
    assert [f.verdict.split(":")[0] for f in found.findings] == [
        "holds",
        "holds",
        "fails as printed",
        "fails as printed",
    ]
    assert judge("", "", "", False).verdict == "contradicted by this measurement"
