"""The extra loss: what it trains, that it is a setting, and that a trained run no longer has its head."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from scalelong.backbones import as_network
from scalelong.runs.settings import DistillationSettings
from scalelong.training import Trainer, load_run, train
from scalelong.training.build import check_config
from scalelong.training.distillation import HEAD
from tests.training.tiny import tiny


@pytest.mark.parametrize("backbone", ["uvit", "unet"])
@pytest.mark.parametrize("form", ["infonce", "negative_free"])
def test_trains_the_student_up_to_the_tap(form: str, backbone: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"distillation_weight": 1.0, "distillation_form": form, "model_backbone": backbone}
    if backbone == "unet":
        changes |= {"model_channels": (32, 32), "model_layers_per_block": 1}
    trainer = Trainer(tiny(**changes), tmp_path / "run")
    trainer._start_batches()
    batch = next(iter(trainer._batches))
    distillation = trainer.stepper.distillation
    assert distillation is not None
    torch.manual_seed(0)
    x = torch.randn_like(batch.images)
    trainer.stepper.net(x, torch.full((len(x),), 100.0))
    distillation(batch, {}).backward()
    trained = {name for name, p in trainer.model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert any(name.startswith(HEAD) for name in trained)
    before, behind = ("in_blocks", "out_blocks") if backbone == "uvit" else ("down_blocks", "up_blocks")
    assert any(name.startswith(before) for name in trained)
    assert not any(name.startswith(behind) for name in trained)
    assert all(p.grad is None for p in trainer.ema.model.parameters())


@pytest.mark.slow
def test_compiled_networks_give_the_same_gradients(tmp_path: Path) -> None:
    """The features leave the compiled graph with their gradient, and the teacher is compiled too."""
    found = []
    for kind in ("eager", "compiled"):
        changes = {"distillation_weight": 1.0, "features_conditioning": True}
        trainer = Trainer(tiny(**changes), tmp_path / kind)
        trainer._start_batches()
        stepper = trainer.stepper
        if kind == "compiled":
            options: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True}
            stepper.net = as_network(torch.compile(trainer.model, **options))
            stepper.distillation.network = as_network(torch.compile(trainer.ema.model, **options))
        for step in (1, 2):
            pending = stepper.compute(step, [next(iter(trainer._batches))])
            found.append({name: p.grad.clone() for name, p in trainer.model.named_parameters()})
            stepper.update(pending)
            trainer.ema.update(step)
            stepper.clear()
    for eager, compiled in zip(found[:2], found[2:], strict=True):
        for name, value in eager.items():
            torch.testing.assert_close(compiled[name], value, rtol=1e-3, atol=1e-6)


def test_a_trained_run_has_no_head(tmp_path: Path) -> None:
    plain = load_run(train(tiny(), tmp_path / "plain"))
    distilled = load_run(train(tiny(distillation_weight=0.5), tmp_path / "distilled"))
    names = list(distilled.model.state_dict())
    assert names == list(plain.model.state_dict())
    assert all(not part._forward_hooks for part in distilled.model.modules())
    weight = "in_blocks.0.mlp.fc1.weight"
    assert not torch.equal(distilled.model.state_dict()[weight], plain.model.state_dict()[weight])


def test_settings_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    for changes, message in (
        ({"distillation_temperature": 0.0}, "distillation.temperature: must be at least 1e-06"),
        ({"distillation_t_range": (0.6, 0.5)}, "distillation.t_range: must be two quantiles"),
        ({"distillation_weight": -1.0}, "distillation.weight: must be at least 0"),
        ({"distillation_weight": 1.0, "training_batch_size": 1}, "have no negatives"),
        ({"distillation_weight": 1.0, "training_compile": "reduce-overhead"}, "does not go with distillation.weight"),
    ):
        with pytest.raises(ValueError) as error:
            check_config(tiny(**changes))
        assert message in str(error.value)
    for changes, message in (
        ({"distillation_weight": 1.0, "distillation_tap": "middle"}, "distillation.tap: no module 'middle'"),
        (
            {"features_conditioning": True, "features_tap": "mid_blok"},
            "features.tap: no module 'mid_blok'; did you mean",
        ),
    ):
        with pytest.raises(ValueError) as error:
            Trainer(tiny(**changes), tmp_path / "run")
        assert message in str(error.value)
        assert not (tmp_path / "run").exists()


def test_default_settings_change_nothing() -> None:
    assert dataclasses.replace(tiny(), distillation=DistillationSettings()) == tiny()
    assert check_config(tiny()).distillation.weight == 0
