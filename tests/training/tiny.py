"""A run that takes a second, and when two runs are the same."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from scalelong.runs.settings import (
    DataSettings,
    DiffusionSettings,
    ModelSettings,
    OptimizerSettings,
    SamplingSettings,
    ScalingSettings,
    TrainingSettings,
)
from scalelong.training import RunConfig, Trainer

TINY = RunConfig(
    data=DataSettings("digits", workers=0),
    model=ModelSettings("uvit", patch_size=4, dim=16, depth=4, heads=2),
    scaling=ScalingSettings("ls"),
    diffusion=DiffusionSettings("vp"),
    optimizer=OptimizerSettings(lr=1e-3, warmup_steps=5, clip_norm=1.0),
    training=TrainingSettings(steps=12, batch_size=8, log_every=1, checkpoint_every=4, sample_every=0, ema_decay=0.9),
    sampling=SamplingSettings("ddim", steps=2, count=4),
)


def tiny(**changes: Any) -> RunConfig:
    """TINY with dotted changes, for example training_steps=3."""
    config = TINY
    for key, value in changes.items():
        part, _, setting = key.partition("_")
        config = dataclasses.replace(config, **{part: dataclasses.replace(getattr(config, part), **{setting: value})})
    return config


def losses(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of every training record."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"]) for r in records if r["kind"] == "train"]


def newest(folder: Path) -> Path:
    return sorted((folder / "checkpoints").iterdir())[-1]


def assert_same_run(one, other) -> None:
    """Equal loss sequences and bit-equal weights, average and optimizer at the end."""
    assert losses(one) == losses(other)
    assert_same_weights(one, other)


def assert_same_weights(one, other) -> None:
    for name in ("model", "ema", "optimizer"):
        first, second = (load_file(newest(folder) / f"{name}.safetensors") for folder in (one, other))
        assert first.keys() == second.keys()
        assert all(torch.equal(value, second[key]) for key, value in first.items()), name


class Spike:
    """Multiplies the loss of one step by 100, the first time it is reached."""

    def __init__(self, trainer: Trainer, step: int) -> None:
        self.real, self.trainer, self.step, self.left = trainer.objective.loss, trainer, step, 1
        trainer.objective.__dict__["loss"] = self

    def __call__(self, *args: object, **kwargs: object) -> torch.Tensor:
        loss = self.real(*args, **kwargs)
        if self.trainer.step + 1 == self.step and self.left:
            self.left -= 1
            return loss * 100
        return loss
