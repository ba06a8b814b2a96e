"""A conditional network samples what it is asked for, and guidance makes it do so more often."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from scalelong.backbones import as_network
from scalelong.data import load_source
from scalelong.runs.settings import ConditionSettings, SamplingSettings
from scalelong.training import get_preset, load_run, sample_images, train
from scalelong.training.condition import choose_classes


@pytest.mark.slow
def test_the_digit_that_was_asked_for(tmp_path) -> None:
    preset = get_preset("digits-demo")
    config = dataclasses.replace(
        preset,
        model=dataclasses.replace(preset.model, depth=4),
        condition=ConditionSettings("class"),
        training=dataclasses.replace(preset.training, steps=400, checkpoint_every=400, sample_every=0),
    )
    run = load_run(train(config, tmp_path / "run"))
    condition = choose_classes(run.config, run.conditioning, [], torch.device("cpu"))
    digits = load_source("digits")
    judge = KNeighborsClassifier(3).fit(digits.images.flatten(1).numpy(), digits.labels.numpy())

    def share(scale: float) -> float:
        settings = SamplingSettings("dpm++2m", steps=12, count=100, guidance=scale)
        images = sample_images(
            run.objective,
            as_network(run.model),
            run.shape,
            settings,
            condition=condition.for_samples,
            null=condition.null_condition(settings),
        )
        found = torch.from_numpy(judge.predict(images.flatten(1).numpy()))
        return float((found == torch.arange(100) % 10).double().mean())

    alone, guided = share(1.0), share(3.0)
    assert alone > 0.3  # chance is 0.1
    assert guided > max(0.6, alone)
