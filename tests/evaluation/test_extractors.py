"""Feature extractors, and what a distance of their features is called."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from scalelong.data import load_source
from scalelong.evaluation import (
    FewSamplesWarning,
    InceptionFeatures,
    RandomConvFeatures,
    extractors,
)
from scalelong.evaluation.extractors import _exact_convolutions, check_extractor, get_extractor, metric_name
from scalelong.evaluation.weights import INCEPTION_SHA256, fetch_weights, find_weights
from tests.evaluation.distance import frechet_distance_of_features


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
    for hash in (INCEPTION_SHA256 + "-bf16", "0" * 64):
        assert metric_name(Named("inception-v3-fid", hash)) == "FD(inception-v3-fid)"
    assert metric_name(RandomConvFeatures()) == "FD(random-conv-64-seed0)"


def test_random_features_are_a_function_of_seed_and_image() -> None:
    x = images(6)
    first = RandomConvFeatures(seed=3)(x)
    assert first.shape == (6, 64)
    assert first.dtype == torch.float32
    torch.testing.assert_close(first, RandomConvFeatures(seed=3)(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(first[4:5], RandomConvFeatures(seed=3)(x[4:5]))
    assert not torch.allclose(first, RandomConvFeatures(seed=4)(x))
    assert len({RandomConvFeatures(seed=seed, channels=c).hash for seed in (3, 4) for c in (8, 16)}) == 4
    assert (first.std(0) > 0).all()


def test_grey_is_three_equal_channels() -> None:
    grey = images(4, channels=1, size=8)
    extractor = RandomConvFeatures()
    torch.testing.assert_close(extractor(grey), extractor(grey.repeat(1, 3, 1, 1)), rtol=1e-5, atol=1e-5)


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


def test_input_is_resized_and_scaled(small_network: Path) -> None:
    extractor = InceptionFeatures(weights=small_network, name="colour", batch_size=2)
    x = images(5)
    resized = F.interpolate(x.double(), size=(299, 299), mode="bilinear", align_corners=False) / 127.5 - 1
    found = extractor(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[:, :3].double(), resized.mean((2, 3)), rtol=0, atol=2e-6)
    torch.testing.assert_close(found[:, 3].double(), x[:, 0, 0, 0].double() / 127.5 - 1, rtol=0, atol=1e-6)
    ends = extractor(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 1, 8, 8))
    torch.testing.assert_close(ends[:, 3], torch.tensor([-1.0, 1.0]))


def test_grey_images_batches_and_empty_input(small_network: Path) -> None:
    extractor = InceptionFeatures(weights=small_network, name="colour", batch_size=2)
    grey = images(5, channels=1)
    torch.testing.assert_close(extractor(grey), extractor(grey.repeat(1, 3, 1, 1)), rtol=1e-5, atol=1e-5)
    parts = torch.cat([extractor(grey[:3]), extractor(grey[3:])])
    torch.testing.assert_close(extractor(grey), parts, rtol=1e-5, atol=1e-5)
    assert len(extractor(grey[:0])) == 0
    with pytest.raises(ValueError, match=r"evaluation\.images"):
        extractor(grey.float())


def test_precision_is_part_of_name_and_hash(small_network: Path) -> None:
    full = InceptionFeatures(weights=small_network, name="colour")
    half = InceptionFeatures(weights=small_network, name="colour", precision="bf16")
    assert half.name == f"{full.name}-bf16"
    assert half.hash == f"{full.hash}-bf16"
    assert metric_name(full) == f"FD({full.name})"
    torch.testing.assert_close(half(images(3)), full(images(3)), rtol=0, atol=1e-2)
    assert not torch.equal(half(images(3)), full(images(3)))
    with pytest.raises(ValueError, match=r"evaluation\.precision: unknown 'int8'.*fp32"):
        InceptionFeatures(weights=small_network, name="colour", precision="int8")
    with pytest.raises(ValueError, match=r"evaluation\.batch_size"):
        InceptionFeatures(weights=small_network, name="colour", batch_size=-1)


def test_tf32_is_off_inside_and_as_it_was_outside() -> None:
    cudnn = torch.backends.cudnn

    def state() -> tuple[object, bool]:
        return cudnn.conv.fp32_precision if hasattr(cudnn, "conv") else cudnn.allow_tf32, cudnn.deterministic

    before = state()
    with pytest.raises(KeyError), _exact_convolutions(True):
        assert state() in (("ieee", True), (False, True))
        raise KeyError
    assert state() == before


@pytest.mark.slow
def test_the_true_network_on_cifar10() -> None:
    """About 100 images through the network."""
    path = fetch_weights()
    found = find_weights(path)
    assert (found.sha256, found.name) == (INCEPTION_SHA256, "inception-v3-fid-7ff4a85c")
    extractor = InceptionFeatures(batch_size=16)
    assert metric_name(extractor) == "FID"
    real = load_source("cifar10").images
    assert real is not None
    features = extractor(real[:16])
    assert features.shape == (16, 2048)
    assert features.dtype == torch.float32
    assert (features >= 0).all()
    assert torch.equal(features, extractor(real[:16]))
    torch.testing.assert_close(InceptionFeatures(batch_size=3)(real[:7]), features[:7], rtol=0, atol=1e-4)

    with pytest.warns(FewSamplesWarning):
        near = frechet_distance_of_features(features, extractor(real[16:32]))
    with pytest.warns(FewSamplesWarning):
        far = frechet_distance_of_features(features, extractor(images(16, size=32)))
    assert far > 1.5 * near


def test_an_extractor_is_one_entry_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extractors.EXTRACTORS, "pixels", lambda _device: Named("pixels", "1"))
    found = get_extractor("pixels")
    assert metric_name(found) == "FD(pixels)"
    assert found(images(2)).shape == (2, 768)
    with pytest.raises(ValueError, match=r"extractor: unknown 'pixel'; did you mean 'pixels'\?"):
        check_extractor("pixel")
    with pytest.raises(ValueError, match="leave it out with --extractor pixels"):
        check_extractor("pixels", "file.pt")
