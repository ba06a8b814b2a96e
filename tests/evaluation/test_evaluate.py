"""Distances of images and of runs, and the self-check."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from scalelong.data import DataError, MemorySource, load_source
from scalelong.evaluation import (
    FeatureStatistics,
    FewSamplesWarning,
    InceptionFeatures,
    RandomConvFeatures,
    evaluate,
    evaluate_images,
    evaluate_run,
    kernel_distance,
    reference_statistics,
    self_check,
)
from scalelong.evaluation.evaluate import EvaluationObserver, SelfCheck, load_training_data, reference_features
from scalelong.evaluation.statistics import collect_statistics, image_batches
from scalelong.runs.settings import SamplingSettings
from scalelong.training import TrainedRun, Trainer, load_run, read_events, train
from tests.evaluation.distance import frechet_distance_of_features
from tests.training.tiny import newest, tiny

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
    reference = collect_statistics(image_batches(DIGITS, 0, 900), extractor)
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


def test_few_images_warn_and_too_few_are_refused() -> None:
    extractor = RandomConvFeatures(channels=4)
    reference = reference_statistics(DIGITS, extractor, cache=False)
    with pytest.warns(FewSamplesWarning, match="cov1: rank 15 of 16 features"):
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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """A run that leaves its sampler to the defaults."""
    folder = tmp_path_factory.mktemp("run") / "run"
    train(tiny(training_steps=1, sampling_sampler="", sampling_steps=0), folder)
    return load_run(folder)


def test_the_record_holds_what_was_used(run: TrainedRun) -> None:
    extractor, source = RandomConvFeatures(channels=4), load_source("digits")
    reference = reference_statistics(source, extractor, cache=False)
    for sampling, expected in (
        (SamplingSettings(count=20), ("dpm++2m", 50)),
        (SamplingSettings("heun", count=20), ("heun", 18)),
        (SamplingSettings(count=20, steps=3), ("dpm++2m", 3)),
    ):
        record = evaluate_run(run, extractor, reference, sampling).record()
        used = SamplingSettings(**record["sampling"])
        assert used == dataclasses.replace(sampling, sampler=expected[0], steps=expected[1])
        assert (record["n"], record["reference"], record["weights"]) == (20, source.fingerprint, "ema")
        assert "kid" not in record
    as_trained = load_run(run.folder, weights="model")
    features = reference_features(source, extractor)
    evaluation = evaluate_run(as_trained, extractor, reference, sampling, kid_reference=features)
    assert evaluation.record()["weights"] == "model"
    assert evaluation.record().keys() >= {"kid", "kid_sd"}


def test_ranks_share_the_images(run: TrainedRun) -> None:
    extractor = RandomConvFeatures(channels=1)
    reference = reference_statistics(load_source("digits"), extractor, cache=False)
    sampling = SamplingSettings(count=20, steps=1, batch_size=3)
    parts = [evaluate_run(run, extractor, reference, sampling, rank=rank, world_size=3) for rank in range(3)]
    assert [part.result.n for part in parts] == [6, 7, 7]


def test_a_run_that_is_asked_to_stop_gives_up_its_evaluation_and_saves(tmp_path) -> None:
    sampling = SamplingSettings("ddim", count=12, steps=1, batch_size=4)
    trainer = Trainer(tiny(training_checkpoint_every=100), tmp_path / "run")
    batches: list[int] = []

    class Extractor(RandomConvFeatures):
        def __call__(self, images: torch.Tensor) -> torch.Tensor:
            if trainer.step:
                batches.append(len(images))
                os.kill(os.getpid(), signal.SIGTERM)
            return super().__call__(images)

    trainer.observers.append(EvaluationObserver(trainer, Extractor(channels=1), sampling, every=3))
    trainer.run()
    assert batches == [4]
    assert [record["kind"] for record in read_events(trainer.folder)[0]].count("evaluation") == 0
    assert newest(trainer.folder).name == "step-00000004"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"count": 1}, "sampling.count: must be at least 2 for a distance, got 1"),
        ({"sampler": "dimm"}, "sampling.sampler: unknown 'dimm'"),
        ({"steps": -1}, "sampling.steps: must be at least 0"),
        ({"batch_size": 0}, "sampling.batch_size: must be at least 1"),
        ({"precision": "fp8"}, "sampling.precision: unknown 'fp8'"),
    ],
)
def test_impossible_settings_are_refused_before_any_work(run: TrainedRun, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        evaluate_run(run, RandomConvFeatures(channels=4), FeatureStatistics(16), SamplingSettings(**options))


def test_a_run_is_not_measured_against_other_data_than_its_own(run: TrainedRun) -> None:
    assert run.data == load_training_data(run).fingerprint
    assert len(load_training_data(dataclasses.replace(run, data=""))) == 1797  # older exports lack the fingerprint
    with pytest.raises(DataError, match=r"run was trained on other data than digits is now; put it back"):
        load_training_data(dataclasses.replace(run, data="0" * 64))


def test_check_compares_halves_and_splits(
    small_network: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The arithmetic of the check, on a small network and a small data set."""

    def small(device: str, weights: Path | None, **options: object) -> InceptionFeatures:
        return InceptionFeatures(device, weights, batch_size=16, name="colour")

    sources = {"train": images(60, size=8), "test": images(20, size=8, seed=1) // 2}
    monkeypatch.setattr(evaluate, "InceptionFeatures", small)
    monkeypatch.setattr(evaluate, "load_source", lambda name, root, split="train": MemorySource(split, sources[split]))
    with caplog.at_level(logging.WARNING):
        found = self_check("cpu", small_network)
    assert "hours on a CPU" in caplog.text
    features = small("cpu", small_network)
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
