"""What others do to skips, against their formulas written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from diffusers.utils.torch_utils import fourier_filter

from scalelong.scaling.baselines import damp_low_frequencies, magnitude_preserving
from scalelong.scaling.constant import SkipSize
from scalelong.scaling.registry import ScalingConfig

TOKENS = SkipSize(channels=12, tokens=32, channels_last=True, main=12)
IMAGES = [SkipSize(channels=16, main=32, stage=2), SkipSize(channels=32, main=16, stage=1)]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(("main", "skip", "t"), [(64, 64, 0.5), (96, 32, 0.3), (16, 200, 0.8)])
def test_joined_operands_of_unit_magnitude_have_unit_magnitude(main: int, skip: int, t: float) -> None:
    a, b = magnitude_preserving(main, skip, t)
    joined = torch.cat([a * torch.ones(main), b * torch.ones(skip)])
    assert joined.square().mean().item() == pytest.approx(1.0)
    shares = (b * torch.ones(skip)).norm() / (a * torch.ones(main)).norm()
    assert shares.item() == pytest.approx(t / (1 - t))


def test_layernorm_normalises_the_channels_of_tokens_and_of_images() -> None:
    scaling = ScalingConfig.create("layernorm", affine=False).build([TOKENS, IMAGES[0]])
    tokens, images = 5 * randn(2, 32, 12) + 3, 5 * randn(2, 16, 4, 4) + 3
    torch.testing.assert_close(scaling(1, tokens), F.layer_norm(tokens, (12,), eps=1e-6))
    expected = F.layer_norm(images.permute(0, 2, 3, 1), (16,), eps=1e-6).permute(0, 3, 1, 2)
    torch.testing.assert_close(scaling(2, images), expected)
    assert scaling.current()[1] == pytest.approx((expected.norm() / images.norm()).item())


def test_the_weights_of_layernorm_act_per_channel() -> None:
    scaling = ScalingConfig.create("layernorm").build([TOKENS])
    with torch.no_grad():
        scaling.weights[0][3] = 0
        scaling.biases[0][3] = 7
    assert torch.equal(scaling(1, randn(2, 32, 12))[..., 3], torch.full((2, 32), 7.0))
    assert sorted(scaling.state_dict()) == ["biases.0", "eps", "weights.0"]


@pytest.mark.parametrize(
    ("size", "threshold"), [((1, 1), 1), ((2, 2), 1), ((4, 4), 1), ((8, 6), 1), ((7, 5), 1), ((8, 6), 2), ((7, 5), 2)]
)
def test_the_filter_is_that_of_diffusers(size: tuple[int, int], threshold: int) -> None:
    images = randn(2, 3, *size)
    expected = fourier_filter(images, threshold=threshold, scale=0.2)
    torch.testing.assert_close(damp_low_frequencies(images, 0.2, threshold), expected, rtol=1e-5, atol=1e-6)


def test_freeu_filters_two_stages_and_refuses_training() -> None:
    scaling = ScalingConfig.create("freeu", s1=0.5, s2=0.2).build([SkipSize(4, stage=3), *IMAGES]).eval()
    images = randn(2, 4, 8, 8)
    assert torch.equal(scaling(1, images), images)
    torch.testing.assert_close(scaling(2, images), fourier_filter(images, 1, 0.2), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scaling(3, images), fourier_filter(images, 1, 0.5), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="'freeu' is for sampling from a trained model"):
        scaling.train()(2, images)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("mp_cat", {"t": 1.0}, r"scaling\.t: must be a number between 0 and 1, got 1\.0; EDM2 uses 0\.5"),
        ("mp_cat", {"t": True}, r"scaling\.t: must be a number"),
        ("layernorm", {"eps": 0}, r"scaling\.eps: must be a number between 0 and 1, got 0"),
        ("freeu", {"s1": -1}, r"scaling\.s1: must be a number between 0 and 10"),
        ("freeu", {"threshold": 0}, r"scaling\.threshold: must be an integer of at least 1, got 0"),
        ("skip_tuning", {"inner": -0.1}, r"scaling\.inner: must be a number between 0 and 2, got -0\.1"),
        ("stable_tau", {"tau": 0}, r"scaling\.tau: must be a number between 0 and 10, got 0"),
    ],
)
def test_bad_values_are_refused(method: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScalingConfig.create(method, **options)


def test_freeu_refuses_tokens() -> None:
    with pytest.raises(ValueError, match="'freeu' filters images"):
        ScalingConfig.create("freeu").build([TOKENS])


def test_skip_tuning_shrinks_inner_skips_and_refuses_training() -> None:
    scaling = ScalingConfig.create("skip_tuning", inner=0.6).build([TOKENS] * 3).eval()
    skip = randn(2, 5, 4)
    assert [scaling.coefficient(i, skip) for i in (1, 2, 3)] == pytest.approx([1.0, 0.8, 0.6])
    with pytest.raises(ValueError, match="'skip_tuning' is for sampling from a trained model"):
        scaling.train()(3, skip)
