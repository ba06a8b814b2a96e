from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from scalelong.data import load_source
from scalelong.evaluation import (
    FewSamplesWarning,
    InceptionFeatures,
    frechet_distance_of_features,
    half_precision_copy,
    metric_name,
)
from scalelong.evaluation.inception import _exact_convolutions
from scalelong.evaluation.weights import HALF_SHA256, INCEPTION_SHA256, fetch_weights, find_weights

from .test_extractors import images


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


def test_grey_batches_and_nothing(small_network: Path) -> None:
    extractor = InceptionFeatures(weights=small_network, name="colour", batch_size=2)
    grey = images(5, channels=1)
    assert torch.equal(extractor(grey), extractor(grey.repeat(1, 3, 1, 1)))
    assert torch.equal(extractor(grey), torch.cat([extractor(grey[:3]), extractor(grey[3:])]))
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
    with pytest.raises(ValueError, match=r"evaluation\.precision: must be one of fp32.*got 'int8'"):
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
def test_the_true_network_on_cifar10(tmp_path: Path) -> None:
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

    half = InceptionFeatures(weights=half_precision_copy(tmp_path / "half.pt"), batch_size=16)
    assert half.hash == HALF_SHA256
    assert metric_name(half) == "FD(inception-v3-fid-fp16-weights-2129e16b)"
    off = (half(real[:16]) - features).square().sum() / features.var(0).sum() / 16
    assert 0 < off < 1e-4  # of the variance between images

    with pytest.warns(FewSamplesWarning):
        near = frechet_distance_of_features(features, extractor(real[16:32]))
    with pytest.warns(FewSamplesWarning):
        far = frechet_distance_of_features(features, extractor(images(16, size=32)))
    assert far > 1.5 * near
