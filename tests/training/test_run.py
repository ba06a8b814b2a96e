"""Sampling from a run: images are a function of seed and index, and of nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn

import scalelong
from scalelong.backbones import as_network
from scalelong.data import load_source, to_uint8
from scalelong.diffusion import Network, Objective, get_process, sample
from scalelong.runs.settings import ConditionSettings, SamplingSettings
from scalelong.training import get_preset, load_run, sample_batches, train
from scalelong.training.condition import choose_classes
from tests.training.tiny import tiny

OBJECTIVE = Objective(get_process("vp"))
SHAPE = (1, 4, 4)


class Shrink(nn.Module):
    """Predicts that x is noise up to a factor, pixel by pixel; in training mode it would drop half of them."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.8))
        self.dropout = nn.Dropout(0.5)
        self.batches: list[int] = []

    def forward(self, x: Tensor, time: Tensor, label: Tensor | None = None) -> Tensor:
        self.batches.append(len(x))
        shift = 0.0 if label is None else label.view(-1, 1, 1, 1) * 0.1
        return self.dropout(x * self.factor) + shift


SETTINGS = {field.name for field in dataclasses.fields(SamplingSettings)}


def make(net: Network | None = None, **options: Any) -> Tensor:
    settings = SamplingSettings(
        **{"steps": 4, "clip": False} | {name: options.pop(name) for name in SETTINGS & options.keys()}
    )
    batches = sample_batches(OBJECTIVE, net or Shrink(), SHAPE, settings, **{"seed": 7, "progress": False} | options)
    return torch.cat([torch.empty((0, *SHAPE), dtype=torch.uint8), *batches])


def assert_same_images(one: Tensor, other: Tensor) -> None:
    """Up to the rounding of other batch sizes and memory addresses."""
    assert one.shape == other.shape
    assert (one.int() - other.int()).abs().max() <= 1


@pytest.mark.parametrize("sampler", ["dpm++2m", "ddim", "ddpm", "euler_maruyama"])
def test_image_depends_on_seed_and_index_alone(sampler: str) -> None:
    whole = make(count=13, sampler=sampler)
    assert whole.shape == (13, *SHAPE)
    assert whole.dtype == torch.uint8
    assert len(whole.flatten(1).unique(dim=0)) == 13
    for batch_size in (1, 4, 13, 100):
        assert_same_images(make(count=13, sampler=sampler, batch_size=batch_size), whole)
    assert_same_images(make(indices=[11, 2, 5], sampler=sampler, batch_size=2), whole[[11, 2, 5]])
    assert not torch.equal(make(count=13, sampler=sampler, seed=8), whole)


def test_images_are_those_of_the_sampler() -> None:
    index = torch.arange(5)
    want = sample(OBJECTIVE, Shrink().eval(), (7, index, SHAPE), SamplingSettings("heun", steps=3))
    assert_same_images(make(count=5, sampler="heun", steps=3, clip=True), to_uint8(want))


def test_every_batch_has_one_shape() -> None:
    net = Shrink()
    batches = list(
        sample_batches(OBJECTIVE, net, SHAPE, SamplingSettings(count=10, batch_size=4, steps=2), progress=False)
    )
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert set(net.batches) == {4}


def test_condition_follows_the_index() -> None:
    def labels(index: Tensor) -> Mapping[str, Tensor]:
        return {"label": (index % 3).float()}

    whole = make(count=9, condition=labels)
    assert_same_images(make(count=9, condition=labels, batch_size=2), whole)
    plain = make(count=9)
    same = [int((a.int() - b.int()).abs().max()) <= 1 for a, b in zip(whole, plain, strict=True)]
    assert same == [index % 3 == 0 for index in range(9)]


def test_network_is_left_in_the_mode_it_was_in() -> None:
    net = nn.Sequential(Shrink(), nn.Dropout(0.1).eval())
    inner = net[0]
    batches = sample_batches(OBJECTIVE, inner, SHAPE, SamplingSettings(count=4, batch_size=2, steps=2), progress=False)
    next(iter(batches))
    assert [module.training for module in net.modules()] == [True, True, True, False]
    assert_same_images(make(inner, count=3), make(Shrink().eval(), count=3))


def test_the_module_inside_a_network_is_found() -> None:
    """Its dropout is off while it samples, and samples live where its weights are."""
    inner = Shrink()
    assert_same_images(make(as_network(inner), count=3), make(Shrink().eval(), count=3))
    assert all(module.training for module in inner.modules())
    with pytest.raises(RuntimeError, match="unsupported autocast device_type 'meta'"):
        make(as_network(Shrink().to("meta")), count=1, precision="bf16")


def test_low_precision_reaches_the_network() -> None:
    seen = []

    def net(x: Tensor, time: Tensor) -> Tensor:
        seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32)
        return x

    for precision in ("bf16", "fp16", "fp32"):
        make(net, count=1, steps=1, precision=precision)  # type: ignore[arg-type]
    assert seen == [torch.bfloat16, torch.float16, torch.float32]
    with pytest.raises(ValueError, match=r"sampling\.precision"):
        make(count=2, precision="fp8")


def test_diverged_networks_are_named_not_painted_black() -> None:
    class Diverged(Shrink):
        def forward(self, x: Tensor, time: Tensor, label: Tensor | None = None) -> Tensor:
            return super().forward(x, time) * torch.where(torch.arange(len(x)) == 1, torch.nan, 1.0).view(-1, 1, 1, 1)

    with pytest.raises(ValueError, match="1 of 4 images are not finite, the first is image 6"):
        make(Diverged(), indices=[5, 6, 7, 8])


def test_errors_come_before_the_first_batch() -> None:
    for settings, indices, message in (
        (SamplingSettings(count=0), None, r"sampling\.count: must be at least 1, got 0"),
        (SamplingSettings(), [-1], "indices: must be a list of numbers >= 0"),
        (SamplingSettings(batch_size=0), None, r"sampling\.batch_size"),
    ):
        with pytest.raises(ValueError, match=message):
            sample_batches(OBJECTIVE, Shrink(), SHAPE, settings, indices=indices)


def test_plain_functions_and_no_images() -> None:
    assert make(lambda x, time: x, count=2).shape == (2, *SHAPE)  # type: ignore[arg-type]
    assert make(indices=[]).shape == (0, *SHAPE)


@pytest.mark.slow
def test_a_conditional_network_samples_the_digit_that_was_asked_for(tmp_path) -> None:
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
        images = run.sample(settings, condition)
        found = torch.from_numpy(judge.predict(images.flatten(1).numpy()))
        return float((found == torch.arange(100) % 10).double().mean())

    alone, guided = share(1.0), share(3.0)
    assert alone > 0.3  # chance is 0.1
    assert guided > max(0.6, alone)


def test_skip_tuning_shrinks_the_skips_while_sampling_alone(tmp_path) -> None:
    """A tuned sample equals that of a model whose coefficients are multiplied; afterwards the model is as before."""
    run = load_run(train(tiny(training_steps=2, scaling_method="cs", scaling_kappa=0.5), tmp_path / "run"))
    settings = SamplingSettings("ddim", steps=3, count=4, skip_tuning=0.6)
    plain, tuned = run.sample(replace(settings, skip_tuning=1.0)), run.sample(settings)
    assert not torch.equal(plain, tuned)
    assert scalelong.coefficients(run.model) == [1.0, 0.5]
    assert torch.equal(run.sample(replace(settings, skip_tuning=1.0)), plain)
    scalelong.remove(run.model)
    scalelong.apply(run.model, "cs", kappa=0.3)
    assert torch.equal(run.sample(replace(settings, skip_tuning=1.0)), tuned)
    with pytest.raises(ValueError, match=r"sampling\.skip_tuning: must be in \(0, 2\]"):
        run.sample(replace(settings, skip_tuning=0.0))
