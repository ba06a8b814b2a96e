"""Evaluate a trained run: draw images with its averaged weights and measure their distance to its data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scalelong.backbones import as_network
from scalelong.data import load_source
from scalelong.evaluation.evaluate import Result, evaluate_images
from scalelong.evaluation.extractors import Extractor
from scalelong.evaluation.generate import generate_batches
from scalelong.evaluation.reference import reference_statistics
from scalelong.evaluation.statistics import FeatureStatistics
from scalelong.training import TrainedRun


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


def reference_of(run: TrainedRun, extractor: Extractor) -> FeatureStatistics:
    """The statistics of the data that the run was trained on."""
    data = run.config.data
    source = load_source(data.name, image_size=data.image_size, split=data.split, root=data.root)
    return reference_statistics(source, extractor, root=data.root)


def evaluate_run(
    run: TrainedRun, extractor: Extractor, reference: FeatureStatistics, protocol: Protocol, seed: int
) -> Evaluation:
    """Draw `num_images` images of this seed and measure them."""
    sampler = protocol.sampler or run.config.sampling.sampler
    steps = protocol.steps or (0 if protocol.sampler else run.config.sampling.steps)
    model = torch.compile(run.model) if protocol.compile else run.model
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
        device=next(run.model.parameters()).device,
        precision=protocol.precision,
    )
    result = evaluate_images(clock.watch(batches), reference, extractor, total=protocol.num_images)
    return Evaluation(result, seed, sampler, steps, clock.inside, clock.since_start())


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
