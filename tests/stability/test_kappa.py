"""recommend_kappa: the interval from the data, its inversion for CS, clamps and refusals."""

import dataclasses

import numpy as np
import pytest
import torch
from diffusers import UNet2DModel

from scalelong.backbones import UViT, UViTConfig
from scalelong.cli.kappa import Kappa, count_skips, summary
from scalelong.cli.main import main
from scalelong.data import MemorySource, load_source
from scalelong.diffusion import DDPM, EDM, VPSDE, Objective, draw_time_and_noise
from scalelong.skips.auto import USUAL_KAPPA, kappa_for_sum, sum_of_squares
from scalelong.stability import Recommendation, recommend_kappa
from scalelong.stability.kappa import _Values, sampled_ratios
from scalelong.training import get_preset


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
    assert found.mean_ratio == pytest.approx(expected, rel=0.05)
    assert 3 < found.tail_ratio < 5
    assert found.ratios == tuple(sorted(found.ratios))
    assert len(found.ratios) == found.samples == 4000


def test_the_tail_is_the_97th_percentile() -> None:
    found = recommend(images(0.5), samples=1000)
    assert found.tail_ratio == pytest.approx(torch.tensor(found.ratios).quantile(0.97).item(), rel=1e-3)


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
    found = sampled_ratios(_Values(data, 0), objective, 200, seed=0)
    torch.testing.assert_close(found, expected.sort().values, rtol=0.15, atol=0)


def test_the_interval_means_what_it_says() -> None:
    found = recommend(images(0.5))
    low, high = found.kappa_interval
    assert low < found.middle < high
    assert sum_of_squares(low, 6) == pytest.approx(found.mean_ratio, abs=1e-6)
    assert sum_of_squares(high, 6) == pytest.approx(found.tail_ratio, abs=1e-6)
    assert sum_of_squares(found.middle, 6) ** 2 == pytest.approx(found.mean_ratio * found.tail_ratio, rel=1e-6)
    assert found.warnings == ()
    assert "N = 6" in found.reasoning
    assert "the sum misses the average sample" in found.reasoning


def test_the_usual_kappa_is_recommended_and_its_place_told() -> None:
    inside, above = recommend(images(0.4), 6), recommend(images(0.9), 6)
    assert inside.kappa == above.kappa == USUAL_KAPPA
    assert inside.kappa_interval[0] < USUAL_KAPPA < inside.kappa_interval[1]
    assert "Recommended 0.7, inside the interval" in inside.reasoning
    assert above.kappa_interval[1] < USUAL_KAPPA
    assert "Recommended 0.7, above the interval" in above.reasoning


def test_more_skips_mean_a_smaller_middle() -> None:
    assert recommend(images(0.5), 12).middle < recommend(images(0.5), 4).middle


def test_same_arguments_same_answer_whatever_the_form_of_the_data() -> None:
    pixels = torch.randint(0, 256, (40, 3, 8, 8), generator=torch.Generator().manual_seed(1)).byte()
    as_source, as_tensor = recommend(MemorySource("mine", pixels)), recommend(pixels)
    as_array, as_float = recommend(pixels.numpy()), recommend(pixels.numpy().astype(np.float32) / 127.5 - 1)
    assert as_source == as_tensor == as_array
    assert as_float.middle == pytest.approx(as_source.middle, rel=1e-5)
    assert recommend(pixels, seed=1) != as_source
    torch.manual_seed(123)
    assert recommend(pixels) == as_source


def test_few_skips_and_small_ratios_are_clamped_and_said() -> None:
    low = recommend(images(0.2), 2)
    assert low.kappa_interval[1] == 1.0
    assert "above N = 2" in low.warnings[0]
    assert low.middle == 1.0
    assert "at 1.000 the sum is as near as CS comes to missing the average" in low.reasoning
    large = recommend(images(0.5), prediction="x0")
    assert large.kappa_interval[0] == 0.0
    assert "below 1" in large.warnings[0]
    assert "does nothing" in recommend(images(0.5), 1).warnings[0]


def test_a_method_without_a_kappa_is_not_told_to_have_one() -> None:
    found, config = recommend(images(0.5)), get_preset("digits-demo")
    assert "kappa in the settings     0.7 (cs)" in summary(found, config)
    gated = dataclasses.replace(config, scaling=dataclasses.replace(config.scaling, method="ls"))
    assert "in the settings" not in summary(found, gated)


def test_data_outside_the_range_are_said_with_the_effect_on_the_interval() -> None:
    found = recommend(images(0.5) * 100)
    assert "outside [-1, 1]" in found.warnings[0]
    assert f"{found.mean_ratio:.3f} .. {found.tail_ratio:.3f} as given" in found.warnings[1]
    rescaled = recommend(images(1.0))  # what +-50 becomes
    assert f"{rescaled.mean_ratio:.3f} .. {rescaled.tail_ratio:.3f} with the data scaled" in found.warnings[1]
    assert any("no value is below 0" in warning for warning in recommend(images(0.5).abs()).warnings)


@pytest.mark.parametrize("num_skips", [0, -3, 2.5, True])
def test_number_of_skips_must_be_positive(num_skips: object) -> None:
    with pytest.raises(ValueError, match="num_skips"):
        recommend(images(0.5), num_skips)  # type: ignore[arg-type]


def test_bad_data_are_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        recommend(images(0.5) / 0)
    with pytest.raises(ValueError, match="needs images"):
        recommend(torch.zeros(0, 4))
    with pytest.raises(TypeError, match="data"):
        recommend([1, 2, 3])
    with pytest.raises(ValueError, match="samples"):
        recommend(images(0.5), samples=3)


def test_heavy_tail_is_said() -> None:
    found = recommend_kappa(torch.zeros(10, 4), VPSDE(), 6, samples=3000)
    assert any("1% of the samples" in warning for warning in found.warnings)


def test_every_process_serves() -> None:
    source = load_source("digits")
    for process in (DDPM(), EDM()):
        found = recommend_kappa(source, process, 6, samples=200)
        assert 0 <= found.kappa_interval[0] <= found.kappa_interval[1] <= 1


@pytest.mark.parametrize(
    ("preset", "shape", "skips"), [("digits-demo", (1, 8, 8), 6), ("fashion-mnist-unet", (1, 28, 28), 9)]
)
def test_skips_of_a_preset_are_counted_without_weights(preset: str, shape: tuple[int, int, int], skips: int) -> None:
    assert count_skips(Kappa(preset), get_preset(preset), shape) == skips


def plain_uvit() -> torch.nn.Module:
    """What module:callable names in the test below."""
    return UViT(UViTConfig(image_size=8, patch_size=4, in_channels=1, dim=16, depth=8, heads=2))


def test_the_command_serves_any_model_with_data(tmp_path, capsys) -> None:
    name = f"{__name__}:plain_uvit"
    assert main(["kappa", name, "--data", "digits", "--samples", "200", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "skips N                   4" in out
    assert "recommended  0.7" in out
    assert [path.suffix for path in tmp_path.iterdir()] == [".png"]
    assert main(["kappa", name, "--out", str(tmp_path)]) == 1
    assert "brings no data along; say which it is trained on" in capsys.readouterr().err
    assert main(["kappa", "digit-demo"]) == 1
    assert "did you mean 'digits-demo'?" in capsys.readouterr().err
    assert main(["kappa", "digits-demo", "--skips", "0", "--out", str(tmp_path)]) == 1
    assert "num_skips: must be a whole number of at least 1, got 0" in capsys.readouterr().err


def test_the_command_reads_a_diffusers_folder(tmp_path, capsys) -> None:
    UNet2DModel(
        sample_size=16, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1,
        down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2, add_attention=False,
    ).save_pretrained(tmp_path / "unet")  # fmt: skip
    arguments = [
        "kappa",
        str(tmp_path / "unet"),
        "--data",
        "digits",
        "--samples",
        "200",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(arguments) == 0
    assert "skips N                   4" in capsys.readouterr().out
