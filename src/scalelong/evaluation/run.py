"""Evaluate a trained run: draw images with its averaged weights and measure their distance to its data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.backbones import as_network
from scalelong.data import load_source
from scalelong.evaluation.evaluate import Result, evaluate_images
from scalelong.evaluation.extractors import Extractor, RandomConvFeatures
from scalelong.evaluation.generate import generate_batches
from scalelong.evaluation.inception import InceptionFeatures
from scalelong.evaluation.reference import reference_statistics
from scalelong.evaluation.statistics import FeatureStatistics
from scalelong.training import TrainedRun, Trainer
from scalelong.training.build import build_pixels


@dataclass(frozen=True)
class Protocol:
    """How images are drawn for an evaluation; empty values are the run's own."""

    num_images: int = 10_000
    sampler: str = ""
    steps: int = 0
    batch_size: int = 500
    precision: str = "fp32"  # of the denoiser: fp32, bf16, fp16
    compile: bool = False


@dataclass(frozen=True)
class Evaluation:
    """One measurement of one run at one step."""

    result: Result
    seed: int
    sampler: str
    sampler_steps: int
    generate_seconds: float
    seconds: float

    def record(self) -> dict[str, Any]:
        """What goes into metrics.jsonl."""
        result = self.result
        return {
            "metric": result.metric,
            "value": result.value,
            "n": result.n,
            "extractor": result.extractor,
            "sample_seed": self.seed,
            "sampler": self.sampler,
            "sampler_steps": self.sampler_steps,
            "generate_seconds": round(self.generate_seconds, 2),
            "evaluate_seconds": round(self.seconds, 2),
        }


def get_extractor(name: str, device: str | torch.device, weights: str | None = None) -> Extractor:
    """ "inception", the network of FID, or "random-conv", which is light and not FID."""
    if name == "inception":
        return InceptionFeatures(device, weights)
    if name == "random-conv":
        return RandomConvFeatures(device=device)
    raise ValueError(f"extractor: must be inception or random-conv, got {name!r}")


def reference_of(run: TrainedRun, extractor: Extractor) -> FeatureStatistics:
    """The statistics of the data that the run was trained on."""
    data = run.config.data
    source = load_source(data.name, image_size=data.image_size, split=data.split, root=data.root)
    return reference_statistics(source, extractor, root=data.root)


def evaluate_run(
    run: TrainedRun,
    extractor: Extractor,
    reference: FeatureStatistics,
    protocol: Protocol,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
) -> Evaluation:
    """Draw `num_images` images of this seed, each rank its part, and measure them."""
    sampler = protocol.sampler or run.config.sampling.sampler
    steps = protocol.steps or (0 if protocol.sampler else run.config.sampling.steps)
    model = torch.compile(run.model) if protocol.compile else run.model
    device = next(run.model.parameters()).device
    clock = _Clock()
    batches = generate_batches(
        run.objective,
        as_network(model),  # type: ignore[arg-type]
        shape=run.shape,
        num_images=protocol.num_images,
        seed=seed,
        batch_size=protocol.batch_size,
        sampler=sampler,
        steps=steps,
        clip=run.config.sampling.clip,
        device=device,
        precision=protocol.precision,
        to_pixels=build_pixels(run.config, device),
        rank=rank,
        world_size=world_size,
    )
    result = evaluate_images(clock.watch(batches), reference, extractor, total=protocol.num_images)
    return Evaluation(result, seed, sampler, steps, clock.inside, clock.since_start())


class EvaluationObserver:
    """Measures a run every so many steps while it trains; what it gives is recorded as kind "evaluation"."""

    kind = "evaluation"

    def __init__(self, trainer: Trainer, extractor: Extractor, protocol: Protocol, every: int) -> None:
        self.trainer, self.extractor, self.protocol, self.every = trainer, extractor, protocol, every
        self.reference = reference_statistics(trainer.source, extractor, root=trainer.config.data.root)

    def __call__(self, step: int, _model: nn.Module) -> dict[str, Any] | None:
        trainer = self.trainer
        if step % self.every:
            return None
        run = TrainedRun(
            trainer.folder, trainer.config, trainer.ema.model, trainer.objective, trainer.source.shape, step
        )
        ranks = trainer.ranks
        evaluation = evaluate_run(
            run, self.extractor, self.reference, self.protocol, 0, ranks.process_index, ranks.num_processes
        )
        return evaluation.record() | {"seconds": round(trainer.seconds, 3)}


class _Clock:
    """How long an iterator takes to give its items, apart from what is done with them."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.inside = 0.0

    def watch(self, items: Iterator[Tensor]) -> Iterator[Tensor]:
        while True:
            before = time.perf_counter()
            item = next(items, None)
            self.inside += time.perf_counter() - before
            if item is None:
                return
            yield item

    def since_start(self) -> float:
        return time.perf_counter() - self.start
