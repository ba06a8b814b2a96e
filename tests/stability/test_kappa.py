"""recommend_kappa: the interval from the data, its inversion for CS, clamps and refusals."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from scalelong.data import MemorySource, load_source
from scalelong.diffusion import DDPM, EDM, VPSDE, Objective, draw_time_and_noise
from scalelong.runs.settings import ScalingSettings
from scalelong.stability import Recommendation, recommend_kappa
from scalelong.stability.kappa import (
    CROSSOVER,
    USUAL_KAPPA,
    _Values,
    kappa_for_sum,
    plot,
    squared_norms,
    sum_of_squares,
    training_note,
)


def images(level: float, count: int = 50) -> torch.Tensor:
    """Images of +level and -level: ||x_0||^2 = level^2 m exactly."""
    signs = torch.randint(0, 2, (count, 1, 16, 16), generator=torch.Generator().manual_seed(0)) * 2 - 1
    return level * signs.float()


def recommend(data: object, num_skips: int = 6, **options: object) -> Recommendation:
    return recommend_kappa(data, VPSDE(), num_skips, **{"samples": 500, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("num_skips", [2, 6, 20])
@pytest.mark.parametrize("kappa", [0.05, 0.5, 0.7, 0.99])
def test_bisection_inverts_the_sum(num_skips: int, kappa: float) -> None:
    assert kappa_for_sum(sum_of_squares(kappa, num_skips), num_skips) == pytest.approx(kappa, abs=1e-9)


def test_sums_out_of_reach_are_clamped() -> None:
    assert sum_of_squares(0.5, 3) == pytest.approx(1 + 0.25 + 0.0625)
    assert (kappa_for_sum(0.8, 6), kappa_for_sum(1.0, 6)) == (0.0, 0.0)
    assert (kappa_for_sum(6.0, 6), kappa_for_sum(9.0, 6)) == (1.0, 1.0)
    assert kappa_for_sum(1.22, 6) == pytest.approx(0.4244, abs=2e-3)


def test_ratio_is_that_of_the_formula() -> None:
    """With ||x_0||^2 = v m the ratio is near 1 / (1 - (1 - v) abar): its mean, and at most 1 / v."""
    found = recommend(images(0.5), samples=4000)
    t = torch.linspace(0, 1, 20_001, dtype=torch.float64)
    expected = float((1 / (1 - 0.75 * VPSDE().marginal(t)[0].square())).mean())
    assert found.sum_interval[0] == pytest.approx(expected, rel=0.05)
    assert 3 < found.sum_interval[1] < 5
    assert found.ratios == tuple(sorted(found.ratios))
    assert len(found.ratios) == found.samples == 4000


def test_the_tail_is_the_97th_percentile() -> None:
    found = recommend(images(0.5), samples=1000)
    assert found.sum_interval[1] == pytest.approx(torch.tensor(found.ratios).quantile(0.97).item(), rel=1e-3)


def test_inputs_are_scaled_as_the_network_gets_them() -> None:
    """EDM feeds x_t / sqrt(sigma^2 + sigma_data^2): of data with that deviation its norm is about sqrt(m) at every sigma."""
    process = EDM()
    data = process.sigma_data * torch.randn(64, 2000, generator=torch.Generator().manual_seed(0))
    objective = Objective(process)
    t, noise = draw_time_and_noise(process, 0, torch.arange(200), (2000,))
    alpha, sigma = (value.double()[:, None] for value in process.marginal(t))
    x0 = _Values(data, 0).rows(torch.arange(200))
    p, q = objective.target_weights(alpha, sigma)
    expected = (p * x0 + q * noise.double()).square().sum(1) / 2000
    targets, inputs = squared_norms(_Values(data, 0).rows, objective, 200, seed=0)
    torch.testing.assert_close(targets / inputs, expected, rtol=0.15, atol=0)


def test_the_interval_means_what_it_says() -> None:
    found = recommend(images(0.5))
    low, high = found.kappa_interval
    assert low < found.middle < high
    assert sum_of_squares(low, 6) == pytest.approx(found.sum_interval[0], abs=1e-6)
    assert sum_of_squares(high, 6) == pytest.approx(found.sum_interval[1], abs=1e-6)
    assert sum_of_squares(found.middle, 6) ** 2 == pytest.approx(
        found.sum_interval[0] * found.sum_interval[1], rel=1e-6
    )
    assert found.warnings == ()
    assert "N = 6" in found.reasoning
    assert f"(geometric middle {found.middle:.3f})" in found.reasoning


def test_the_usual_kappa_is_recommended_with_its_place() -> None:
    inside, above = recommend(images(0.4), 6), recommend(images(0.9), 6)
    assert inside.kappa == above.kappa == USUAL_KAPPA
    assert inside.kappa_interval[0] < USUAL_KAPPA < inside.kappa_interval[1]
    assert "0.7 is inside the interval" in inside.reasoning
    assert above.kappa_interval[1] < USUAL_KAPPA
    assert "0.7 is above the interval" in above.reasoning


def test_the_length_of_training_decides() -> None:
    short, long = (recommend(images(0.4), 6, steps=steps) for steps in (CROSSOVER - 1, CROSSOVER))
    assert (short.kappa, long.kappa) == (1.0, USUAL_KAPPA)
    assert "no scaling (kappa = 1) is recommended" in short.reasoning
    assert "For 40,000 steps 0.7 or no scaling (kappa = 1): in our long runs CS trails" in long.reasoning


def test_a_training_is_told_what_the_recommendation_says() -> None:
    """By the same text, with how to change it; what the study has not compared, and what it recommends, has no note."""
    for steps in (600, CROSSOVER):
        said = recommend(images(0.4), 6, steps=steps).advice.removeprefix("But ").rstrip(".")
        for scaling in (ScalingSettings("cs", kappa=0.5), ScalingSettings("ls")):
            assert training_note(scaling, steps).startswith(f"{scaling.label}: {said} (")
    assert training_note(ScalingSettings("cs", kappa=0.5), 600).endswith("(--method none; docs/should-i-use-it.md)")
    assert "(--kappa 0.7, or --method none;" in training_note(ScalingSettings("cs", kappa=0.5), CROSSOVER)
    assert "(--method none;" in training_note(ScalingSettings("cs", kappa=0.7), CROSSOVER)
    assert "(--method cs --kappa 0.7, or --method none;" in training_note(ScalingSettings("ls"), CROSSOVER)
    for scaling in (ScalingSettings("none"), ScalingSettings("ls", start=0.95), ScalingSettings("rezero")):
        assert training_note(scaling, 600) == ""


def test_more_skips_mean_a_smaller_middle() -> None:
    assert recommend(images(0.5), 12).middle < recommend(images(0.5), 4).middle


def test_same_arguments_same_answer_whatever_the_form_of_the_data() -> None:
    pixels = torch.randint(0, 256, (40, 3, 8, 8), generator=torch.Generator().manual_seed(1)).byte()
    as_source, as_tensor = recommend(MemorySource("mine", pixels)), recommend(pixels)
    as_array, as_float = recommend(pixels.numpy()), recommend(pixels.numpy().astype(np.float32) / 127.5 - 1)
    assert as_source.ratios == pytest.approx(as_tensor.ratios) == as_array.ratios
    assert as_float.middle == pytest.approx(as_source.middle, rel=1e-5)
    assert recommend(pixels, seed=1).ratios != pytest.approx(as_source.ratios)
    torch.manual_seed(123)
    assert recommend(pixels).ratios == pytest.approx(as_source.ratios)


def test_few_skips_and_small_ratios_are_clamped_with_a_warning() -> None:
    low = recommend(images(0.2), 2)
    assert low.kappa_interval[1] == 1.0
    assert "above N = 2" in low.warnings[0]
    assert low.middle == 1.0
    assert "geometric middle 1.000, clamped" in low.reasoning
    large = recommend(images(0.5), prediction="x0")
    assert large.kappa_interval[0] == 0.0
    assert "below 1" in large.warnings[0]
    assert "does nothing" in recommend(images(0.5), 1).warnings[0]


def test_data_outside_the_range_are_reported_with_the_effect_on_the_interval() -> None:
    found = recommend(images(0.5) * 100)
    assert "outside [-1, 1]" in found.warnings[0]
    assert f"{found.sum_interval[0]:.3f} .. {found.sum_interval[1]:.3f} as given" in found.warnings[1]
    rescaled = recommend(images(1.0))  # what +-50 becomes
    assert f"{rescaled.sum_interval[0]:.3f} .. {rescaled.sum_interval[1]:.3f} with the data scaled" in found.warnings[1]
    assert any("no value is below 0" in warning for warning in recommend(images(0.5).abs()).warnings)


@pytest.mark.parametrize("num_skips", [0, -3, 2.5, True])
def test_number_of_skips_must_be_positive(num_skips: object) -> None:
    with pytest.raises(ValueError, match="num_skips"):
        recommend(images(0.5), num_skips)  # type: ignore[arg-type]


def test_bad_data_are_rejected() -> None:
    with pytest.raises(ValueError, match="not finite"):
        recommend(images(0.5) / 0)
    with pytest.raises(ValueError, match="needs images"):
        recommend(torch.zeros(0, 4))
    with pytest.raises(TypeError, match="data"):
        recommend([1, 2, 3])
    with pytest.raises(ValueError, match="samples"):
        recommend(images(0.5), samples=3)


def test_heavy_tail_is_reported() -> None:
    found = recommend_kappa(torch.zeros(10, 4), VPSDE(), 6, samples=3000)
    assert any("1% of the samples" in warning for warning in found.warnings)


def test_every_process_serves() -> None:
    source = load_source("digits")
    for process in (DDPM(), EDM()):
        found = recommend_kappa(source, process, 6, samples=200)
        assert 0 <= found.kappa_interval[0] <= found.kappa_interval[1] <= 1


def test_readings_are_the_mean_of_ratios_the_ratio_of_means_and_the_lemma() -> None:
    """For x_0 uniform in [-1, 1] the ratio of means is the lemma's 1 / (1 - 2 E[abar] / 3) = 1.22."""
    data = torch.rand(256, 1, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    found = recommend(data, samples=4000)
    mean_of_ratios, ratio_of_means, lemma = found.readings
    assert (mean_of_ratios.ratio, mean_of_ratios.kappa_interval) == (found.sum_interval[0], found.kappa_interval)
    assert lemma.ratio == pytest.approx(1.225, abs=1e-3)
    assert ratio_of_means.ratio == pytest.approx(lemma.ratio, rel=0.03)
    assert mean_of_ratios.ratio > 1.05 * ratio_of_means.ratio
    assert sum_of_squares(lemma.kappa_interval[0], 6) == pytest.approx(lemma.ratio, abs=1e-6)
    assert {reading.kappa_interval[1] for reading in found.readings} == {found.kappa_interval[1]}
    assert len(recommend(data, prediction="v").readings) == 2  # the lemma is about the noise


def test_plot_is_written(tmp_path) -> None:
    plot(recommend(images(0.5)), "title", tmp_path / "kappa.png")
    assert (tmp_path / "kappa.png").stat().st_size > 10_000


def test_the_package_imports_its_modules_on_first_use() -> None:
    code = """
import sys
import scalelong.stability
assert not {"scalelong.stability.kappa", "scalelong.stability.probes"} & set(sys.modules)
assert all(hasattr(scalelong.stability, name) for name in scalelong.stability.__all__)
assert not hasattr(scalelong.stability, "missing")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
