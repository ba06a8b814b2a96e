from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
import torch

from scalelong.data import MemorySource
from scalelong.evaluation import SelfCheck, check, frechet_distance_of_features, self_check
from scalelong.evaluation.inception import InceptionFeatures

from .test_extractors import images


def test_check_compares_halves_and_splits(
    small_network: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The arithmetic of the check, on a small network and a small data set."""

    def small(device: str, weights: Path | None, batch_size: int, **options: object) -> InceptionFeatures:
        return InceptionFeatures(device, weights, batch_size, name="colour")

    sources = {"train": images(60, size=8), "test": images(20, size=8, seed=1) // 2}
    monkeypatch.setattr(check, "InceptionFeatures", small)
    monkeypatch.setattr(check, "load_source", lambda name, root, split="train": MemorySource(split, sources[split]))
    with caplog.at_level(logging.WARNING):
        found = self_check("cpu", small_network, batch_size=16)
    assert "hours on a CPU" in caplog.text
    features = small("cpu", small_network, 60)
    train, test = features(sources["train"]), features(sources["test"])
    assert found.halves == pytest.approx(frechet_distance_of_features(train[:30], train[30:]), rel=1e-6)
    assert found.train_test == pytest.approx(frechet_distance_of_features(train, test), rel=1e-6)
    assert found.metric.startswith("FD(colour")
    assert found.images_per_second > 0
    assert not found.ok


def test_ok_is_within_the_tolerance() -> None:
    right = SelfCheck("FID", 2.09, 3.14, 10.0, 6000.0)
    assert right.ok
    assert not dataclasses.replace(right, halves=2.2).ok
    assert dataclasses.replace(right, halves=2.055).ok
    assert not dataclasses.replace(right, train_test=3.125).ok
    assert not dataclasses.replace(right, halves=float("nan")).ok


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_known_values() -> None:
    assert self_check("cuda").ok
