"""Evaluate a trained run: draw images with its averaged weights and measure their distance to its data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.backbones import as_network
from scalelong.data import DataError, Source, load_source
from scalelong.diffusion.process import unknown
from scalelong.diffusion.sampling import SAMPLERS, sampler_in_use
from scalelong.evaluation.evaluate import Result, evaluate_images
from scalelong.evaluation.extractors import Extractor, RandomConvFeatures
from scalelong.evaluation.generate import check_drawing, generate_batches
from scalelong.evaluation.inception import InceptionFeatures
from scalelong.evaluation.reference import reference_statistics
from scalelong.evaluation.statistics import FeatureStatistics
from scalelong.training import TrainedRun, Trainer
from scalelong.training.condition import Condition, make_condition
from scalelong.training.run import pixels_of


@dataclass(frozen=True)
class Protocol:
    """How images are drawn for an evaluation; empty values are the run's own."""

    num_images: int = 10_000
    sampler: str = ""
    steps: int = 0
    batch_size: int = 500
    precision: str = "fp32"  # of the denoiser: fp32, bf16, fp16
    compile: bool = False
    guidance: float | None = None  # None: the run's own

    def __post_init__(self) -> None:
        if self.num_images < 2:
            raise ValueError(f"evaluation.num_images: a distance needs at least 2 images, got {self.num_images}")
        if self.sampler and self.sampler not in SAMPLERS:
            raise unknown("evaluation.sampler", self.sampler, SAMPLERS)
        if self.steps < 0:
            raise ValueError(f"evaluation.steps: must be at least 1, or 0 for the run's own, got {self.steps}")
        check_drawing(self.batch_size, self.precision)


@dataclass(frozen=True)
class Evaluation:
    """One measurement of one run at one step."""

    result: Result
    seed: int
    sampler: str
    sampler_steps: int
    guidance: float
    precision: str
    weights: str  # ema or model
    generate_seconds: float
    seconds: float

    def record(self) -> dict[str, Any]:
        """What goes into metrics.jsonl."""
        result = self.result
        guidance = {"guidance": self.guidance} if self.guidance != 1 else {}
        return guidance | {
            "metric": result.metric,
            "value": result.value,
            "n": result.n,
            "extractor": result.extractor,
            "sample_seed": self.seed,
            "sampler": self.sampler,
            "sampler_steps": self.sampler_steps,
            "precision": self.precision,
            "weights": self.weights,
            "reference": result.reference,
            "generate_seconds": round(self.generate_seconds, 2),
            "evaluate_seconds": round(self.seconds, 2),
        }


def get_extractor(name: str, device: str | torch.device, weights: str | None = None) -> Extractor:
    """ "inception", the network of FID, or "random-conv", which is light and not FID."""
    check_extractor(name, weights)
    return InceptionFeatures(device, weights) if name == "inception" else RandomConvFeatures(device=device)


def check_extractor(name: str, weights: str | None = None) -> None:
    """Raise if there is none of this name; for callers with work before it is used."""
    if name not in ("inception", "random-conv"):
        raise ValueError(f"extractor: must be inception or random-conv, got {name!r}")
    if name != "inception" and weights is not None:
        raise ValueError(f"weights: is the file of the Inception; {name} has none, leave it out")


def source_of(run: TrainedRun) -> Source:
    """The data that the run was trained on; refused if it is other data by now."""
    data = run.config.data
    source = load_source(data.name, image_size=data.image_size, split=data.split, root=data.root)
    if run.data and run.data != source.fingerprint:
        raise DataError(
            f"data.name: {run.folder} was trained on other data than {source.name} holds now; put the old data back"
        )
    return source


def condition_of(run: TrainedRun, source: Source) -> Condition:
    """What the run's network is told, as often as in its data; refused if the data has other classes by now."""
    condition = make_condition(run.config, source, next(run.model.parameters()).device)
    if condition.sizes != run.sizes:
        raise ValueError(f"condition: {source.name} or the text encoder is not what {run.folder} was trained with")
    return condition


def evaluate_run(
    run: TrainedRun,
    extractor: Extractor,
    reference: FeatureStatistics,
    protocol: Protocol,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    condition: Condition | None = None,
) -> Evaluation:
    """Draw `num_images` images of this seed, each rank its part, and measure them."""
    settings = run.config.sampling
    steps = protocol.steps or (0 if protocol.sampler else settings.steps)
    sampler, steps = sampler_in_use(run.objective.process, protocol.sampler or settings.sampler, steps)
    model = torch.compile(run.model) if protocol.compile else run.model
    device = next(run.model.parameters()).device
    condition = condition or condition_of(run, source_of(run))
    guidance = settings.guidance if protocol.guidance is None else protocol.guidance
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
        clip=settings.clip,
        condition=condition.like_data,
        guidance=condition.guidance(guidance, settings.guidance_interval),
        device=device,
        precision=protocol.precision,
        to_pixels=pixels_of(run, device),
        rank=rank,
        world_size=world_size,
    )
    result = evaluate_images(clock.watch(batches), reference, extractor, total=protocol.num_images)
    how = (sampler, steps, guidance, protocol.precision, run.weights)
    return Evaluation(result, seed, *how, clock.inside, clock.since_start())


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
        model, shape, sizes = trainer.ema.model, trainer.source.shape, trainer.condition.sizes
        run = TrainedRun(trainer.folder, trainer.config, model, trainer.objective, shape, step, sizes)
        ranks = trainer.ranks
        evaluation = evaluate_run(
            run,
            self.extractor,
            self.reference,
            self.protocol,
            0,
            ranks.process_index,
            ranks.num_processes,
            trainer.condition,
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
