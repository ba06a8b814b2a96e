"""muP in the trainer: `mup.base_width`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from scalelong import mup
from scalelong.pipelines import export_pipeline
from scalelong.runs.settings import SamplingSettings
from scalelong.training import Trainer, load_run, train
from scalelong.training.build import at_width, build_model
from tests.training.tiny import assert_same_run, losses, tiny

WIDE = tiny(model_dim=32, mup_base_width=16)


def test_it_trains_resumes_and_exports(tmp_path) -> None:
    whole = train(WIDE, tmp_path / "whole")
    train(replace(WIDE, training=replace(WIDE.training, steps=6)), tmp_path / "parts")
    assert_same_run(whole, train(WIDE, tmp_path / "parts"))
    run = load_run(whole)
    assert mup.roles(run.model)["decoder_pred.weight"].multiplier == 0.5
    settings = SamplingSettings("ddim", steps=2, count=2)
    images = run.sample(settings).int()
    export_pipeline(run, tmp_path / "pipeline")
    assert (load_run(tmp_path / "pipeline").sample(settings).int() - images).abs().max() <= 1


def test_the_rates_are_those_of_the_groups(tmp_path) -> None:
    trainer = Trainer(WIDE, tmp_path / "run")
    trainer.run()
    rates = {group["lr_multiplier"]: group["lr"] for group in trainer.stepper.optimizers[0].param_groups}
    assert rates == {1.0: 1e-3, 0.5: 5e-4}


def test_at_base_width_it_is_the_standard_run(tmp_path) -> None:
    standard, same = train(tiny(), tmp_path / "standard"), train(tiny(mup_base_width=16), tmp_path / "same")
    assert losses(standard) == losses(same)


def test_the_network_at_another_width() -> None:
    settings = replace(WIDE.model, dim=64, heads=4)
    assert (at_width(settings, 32).heads, at_width(settings, 24).heads) == (2, 4)  # heads of 16, then 4 smaller ones
    unet = replace(settings, backbone="unet", channels=(64, 128))
    assert at_width(unet, 32).channels == (32, 64)
    with pytest.raises(ValueError, match=r"mup.base_width: must be even and a multiple of 4 heads, got 18"):
        build_model(replace(WIDE, model=settings, mup=replace(WIDE.mup, base_width=18)), (1, 8, 8))
    with pytest.raises(ValueError, match=r"mup.base_width: must be a multiple of 32"):
        build_model(replace(WIDE, model=unet, mup=replace(WIDE.mup, base_width=48)), (1, 8, 8))
    config = replace(WIDE, model=unet, mup=replace(WIDE.mup, base_width=32))
    found = mup.roles(build_model(config, (1, 8, 8)))
    assert (found["conv_in.weight"].role, found["conv_out.weight"].role) == ("input", "output")
    assert found["up_blocks.0.resnets.0.conv1.weight"].lr == 0.5


def test_weights_do_not_depend_on_the_base() -> None:
    wide, standard = (build_model(config, (1, 8, 8)) for config in (WIDE, tiny(model_dim=32)))
    torch.testing.assert_close(standard.mid_block.mlp.fc1.weight / 2**0.5, wide.mid_block.mlp.fc1.weight)
