from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from scalelong.data import load_source
from scalelong.evaluation import (
    FeatureStatistics,
    FewSamplesWarning,
    KernelDistance,
    RandomConvFeatures,
    Result,
    evaluate_images,
    frechet_distance_of_features,
    kernel_distance,
    reference_statistics,
)

from .test_extractors import images

DIGITS = load_source("digits")


def test_result_is_the_distance_of_the_features() -> None:
    extractor = RandomConvFeatures(channels=4)
    reference = reference_statistics(DIGITS, extractor, cache=False)
    made = images(300, channels=1, size=8)
    result = evaluate_images(made.split(70), reference, extractor)
    real = extractor(DIGITS.read_many(range(len(DIGITS))))
    assert result.value == pytest.approx(frechet_distance_of_features(extractor(made), real), rel=1e-9)
    assert (result.metric, result.n, result.n_reference) == ("FD(random-conv-16-seed0)", 300, 1797)
    assert (result.extractor, result.extractor_hash) == (extractor.name, extractor.hash)
    assert result.reference == DIGITS.fingerprint
    assert result.kid is None


def test_real_images_are_nearer_than_noise() -> None:
    extractor = RandomConvFeatures(channels=4)
    reference = reference_statistics(DIGITS, extractor, num_images=900, cache=False)
    rest = evaluate_images([DIGITS.read_many(range(900, 1797))], reference, extractor)
    noise = evaluate_images([images(897, channels=1, size=8)], reference, extractor)
    assert noise.value > 20 * rest.value


def test_kid_on_request() -> None:
    extractor = RandomConvFeatures(channels=4)
    reference = reference_statistics(DIGITS, extractor, cache=False)
    real = extractor(DIGITS.read_many(range(500)))
    made = images(200, channels=1, size=8)
    options = {"kid_subset_size": 50, "kid_subsets": 4, "seed": 3}
    result = evaluate_images(made.split(64), reference, extractor, kid_reference=real, **options)  # type: ignore[arg-type]
    assert result.kid is not None
    want = kernel_distance(extractor(made), real, subset_size=50, subsets=4, seed=3)
    assert result.kid.mean == pytest.approx(want.mean, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kid_subset_size": 60}, r"kid_subset_size: must be in 2 \.\. 50 .*, got 60"),
        ({"kid_subset_size": 40, "total": 30}, r"kid_subset_size: must be in 2 \.\. 30 .*, got 40"),
        ({"kid_subset_size": 20, "kid_subsets": 0}, "kid_subsets: must be at least 1"),
        ({"kid_reference": torch.rand(50, 3)}, r"kid_reference: must be \(n, 16\)"),
    ],
)
def test_what_kid_cannot_do_is_refused_before_any_work(options: dict[str, Any], why: str) -> None:
    extractor = RandomConvFeatures(channels=4)
    reference = FeatureStatistics.from_features(
        torch.rand(40, 16), extractor=extractor.name, extractor_hash=extractor.hash
    )
    drawn: list[torch.Tensor] = []
    batches = (drawn.append(batch) or batch for batch in [images(30, channels=1, size=8)])  # type: ignore[func-returns-value]
    with pytest.raises(ValueError, match=why):
        evaluate_images(batches, reference, extractor, **{"kid_reference": torch.rand(50, 16)} | options)
    assert drawn == []


def test_json_and_frozen() -> None:
    result = Result("FID", 3.5, 10, 20, "net", "abc", "f00d", KernelDistance(0.1, 0.01))
    assert json.loads(result.to_json()) == {
        "metric": "FID",
        "value": 3.5,
        "n": 10,
        "n_reference": 20,
        "extractor": "net",
        "extractor_hash": "abc",
        "reference": "f00d",
        "kid": {"mean": 0.1, "sd": 0.01},
    }
    assert json.loads(dataclasses.replace(result, kid=None).to_json())["kid"] is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.value = 0.0  # type: ignore[misc]


def test_few_images_warn_and_too_few_are_refused() -> None:
    extractor = RandomConvFeatures(channels=4)
    reference = reference_statistics(DIGITS, extractor, cache=False)
    with pytest.warns(FewSamplesWarning, match="16 samples for 16 features"):
        evaluate_images([images(16, channels=1, size=8)], reference, extractor)
    for batches in ([], [images(1, channels=1, size=8)]):
        with pytest.raises(ValueError, match="at least 2 samples"):
            evaluate_images(batches, reference, extractor)


def test_reference_of_another_extractor_is_refused_before_any_work() -> None:
    reference = FeatureStatistics.from_features(torch.rand(40, 16), extractor="other", extractor_hash="1")

    def never() -> torch.Tensor:
        raise AssertionError

    with pytest.raises(ValueError, match=r"evaluation\.reference: made by 'other'"):
        evaluate_images((never() for _ in range(1)), reference, RandomConvFeatures(channels=4))
