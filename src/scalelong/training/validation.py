"""Validation loss of the EMA weights in ten noise-level bins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from scalelong.backbones import as_network
from scalelong.data import DataError
from scalelong.data.loader import caption_rows
from scalelong.errors import require
from scalelong.random import normal, uniform
from scalelong.runs.reader import NOISE_BINS
from scalelong.training.build import build_source
from scalelong.training.condition import make_condition
from scalelong.training.loop import Trainer
from scalelong.training.run import evaluating
from scalelong.training.step import autocast

SEED = 0  # of times and noise; the same for all runs


class ValidationObserver:
    """Trainer observer: EMA loss on the first images of a split, every `every` steps.

    Image i has fixed noise and a fixed time in bin i mod 10 of the training times, from low to high noise; the mean over the
    bins equals the training loss on these images.

    >>> from scalelong.runs.presets import get_preset
    >>> trainer = Trainer(get_preset("digits-demo"), "validated-run")
    >>> observer = ValidationObserver(trainer, "train", every=100, images=20)
    >>> sorted(observer(100, trainer.model))[:3]
    ['bins', 'images', 'loss']
    """

    kind = "validation"

    def __init__(self, trainer: Trainer, split: str = "test", every: int = 1000, images: int = 2000) -> None:
        require(images >= NOISE_BINS, "validate-images", f"at least {NOISE_BINS}, one per bin", images)
        self.trainer, self.every, self.split = trainer, every, split
        try:
            self.source = build_source(trainer.config, split)
        except DataError as error:
            raise DataError(str(error).replace("data.split:", "validate-split:", 1)) from error
        if self.source.shape != trainer.source.shape:
            sizes = f"{self.source.shape}, those of {trainer.config.data.split!r} are {trainer.source.shape}"
            raise ValueError(f"validate-split: images of {split!r} are {sizes}; set data.image_size")
        if trainer.condition.name == "class_labels":
            self.source.require_same_classes(trainer.source, f"validate-split: {split!r}")
        self.condition = make_condition(trainer.config, self.source, trainer.device)
        count = min(images, len(self.source))
        self.index = torch.arange(count - count % NOISE_BINS)

    def __call__(self, step: int, model: nn.Module) -> Mapping[str, Any] | None:  # noqa: ARG002
        """The record of this step, or None. Every rank computes it, the first writes it."""
        if step % self.every and step != self.trainer.config.training.steps:
            return None
        trainer, losses = self.trainer, []
        trainer.ema.gather()
        with torch.no_grad(), evaluating(trainer.ema.model), autocast(trainer.device, trainer.stepper.dtype):
            for index in torch.split(self.index, 500):
                losses.append(self._losses(index).double().cpu())
        bins = torch.cat(losses).view(-1, NOISE_BINS).mean(0).tolist()
        return {"loss": sum(bins) / NOISE_BINS, "bins": bins, "split": self.split, "images": len(self.index)}

    def _losses(self, items: torch.Tensor) -> torch.Tensor:
        trainer, source = self.trainer, self.source
        index = items.to(trainer.device)
        images = source.prepare(source.read_many(items.tolist()).to(trainer.device), SEED, index, None)
        u = (index % NOISE_BINS + uniform(SEED, "validation/time", index)) / NOISE_BINS
        t = trainer.objective.process.time_from_uniform(u)
        noise = normal(SEED, "validation/noise", index, source.shape)
        condition = self.condition.at_rows(caption_rows(SEED, items, items, source.caption_counts))
        return trainer.objective.loss(as_network(trainer.ema.model), images, noise, t, **condition)
