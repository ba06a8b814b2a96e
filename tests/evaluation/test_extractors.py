from __future__ import annotations

import pytest
import torch

from scalelong.evaluation import RandomConvFeatures, frechet_distance_of_features, metric_name
from scalelong.evaluation.weights import HALF_SHA256, INCEPTION_SHA256


class Named:
    def __init__(self, name: str, hash: str) -> None:
        self.name, self.hash = name, hash

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1).float()


def images(n: int, channels: int = 3, size: int = 16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, channels, size, size), generator=generator, dtype=torch.uint8)


def test_only_the_true_network_may_be_called_fid() -> None:
    assert metric_name(Named("inception-v3-fid-7ff4a85c", INCEPTION_SHA256)) == "FID"
    for hash in (HALF_SHA256, INCEPTION_SHA256 + "-bf16", "0" * 64):
        assert metric_name(Named("inception-v3-fid", hash)) == "FD(inception-v3-fid)"
    assert metric_name(RandomConvFeatures()) == "FD(random-conv-64-seed0)"


def test_random_features_are_a_function_of_seed_and_image() -> None:
    x = images(6)
    first = RandomConvFeatures(seed=3)(x)
    assert first.shape == (6, 64)
    assert first.dtype == torch.float32
    assert torch.equal(first, RandomConvFeatures(seed=3)(x))
    torch.testing.assert_close(first[4:5], RandomConvFeatures(seed=3)(x[4:5]))
    assert not torch.allclose(first, RandomConvFeatures(seed=4)(x))
    assert len({RandomConvFeatures(seed=seed, channels=c).hash for seed in (3, 4) for c in (8, 16)}) == 4
    assert (first.std(0) > 0).all()


def test_grey_is_three_equal_channels() -> None:
    grey = images(4, channels=1, size=8)
    extractor = RandomConvFeatures()
    assert torch.equal(extractor(grey), extractor(grey.repeat(1, 3, 1, 1)))


def test_random_features_tell_distributions_apart() -> None:
    extractor = RandomConvFeatures(channels=4)
    a, b = extractor(images(200, seed=1)), extractor(images(200, seed=2))
    darker = extractor(images(200, seed=3) // 2)
    assert frechet_distance_of_features(a, darker) > 20 * frechet_distance_of_features(a, b)


def test_what_is_no_image_is_refused() -> None:
    extractor = RandomConvFeatures()
    for bad in (images(2).float(), images(2)[0], images(2, channels=4)):
        with pytest.raises(ValueError, match=r"evaluation\.images: must be uint8 \(B, 1 or 3, H, W\), got"):
            extractor(bad)
    with pytest.raises(ValueError, match=r"evaluation\.extractor\.channels"):
        RandomConvFeatures(channels=0)
