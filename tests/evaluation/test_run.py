"""The measurement of a run: what is recorded of how it was made, and of which data."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from scalelong.data import DataError, load_source
from scalelong.evaluation import RandomConvFeatures, reference_statistics
from scalelong.evaluation.run import Protocol, evaluate_run, source_of
from scalelong.training import TrainedRun, load_run, train
from tests.training.tiny import tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """A run that leaves its sampler to the defaults."""
    folder = tmp_path_factory.mktemp("run") / "run"
    train(tiny(training_steps=1, sampling_sampler="", sampling_steps=0), folder)
    return load_run(folder)


def test_the_record_holds_what_was_used(run: TrainedRun) -> None:
    extractor, source = RandomConvFeatures(channels=4), load_source("digits")
    reference = reference_statistics(source, extractor, cache=False)
    for protocol, expected in (
        (Protocol(20), ("dpm++2m", 50)),
        (Protocol(20, sampler="heun"), ("heun", 18)),
        (Protocol(20, steps=3), ("dpm++2m", 3)),
    ):
        record = evaluate_run(run, extractor, reference, protocol, 0).record()
        assert (record["sampler"], record["sampler_steps"]) == expected
        assert (record["precision"], record["reference"]) == ("fp32", source.fingerprint)
        assert record["weights"] == "ema"
    as_trained = evaluate_run(load_run(run.folder, weights="model"), extractor, reference, Protocol(20, steps=1), 0)
    assert as_trained.record()["weights"] == "model"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_images": 1}, "evaluation.num_images: a distance needs at least 2 images, got 1"),
        ({"sampler": "dimm"}, "evaluation.sampler: unknown 'dimm'"),
        ({"steps": -1}, "evaluation.steps: must be at least 1"),
        ({"batch_size": 0}, "evaluation.batch_size: must be at least 1"),
        ({"precision": "fp8"}, "evaluation.precision: must be one of fp32"),
    ],
)
def test_a_protocol_that_cannot_be_is_refused_when_it_is_made(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        Protocol(**options)


def test_a_run_is_not_measured_against_other_data_than_its_own(run: TrainedRun) -> None:
    assert run.data == source_of(run).fingerprint
    assert len(source_of(dataclasses.replace(run, data=""))) == 1797  # an export of before it was remembered
    with pytest.raises(DataError, match=r"run was trained on other data than digits holds now; put the old data back"):
        source_of(dataclasses.replace(run, data="0" * 64))
