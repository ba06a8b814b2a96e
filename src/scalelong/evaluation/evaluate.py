"""Feature distances of images, trained runs and runs in training; and the FID self-check."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.data import DataError, Source, load_source
from scalelong.data.latents import original_images
from scalelong.diffusion import resolve_sampling
from scalelong.errors import StoppedError, require
from scalelong.evaluation.extractors import Extractor, InceptionFeatures, metric_name
from scalelong.evaluation.frechet import KernelDistance, check_subsets, checked_features, kernel_distance
from scalelong.evaluation.statistics import (
    FeatureStatistics,
    all_parts,
    collect_statistics,
    extract,
    image_batches,
    own_part,
    reference_statistics,
)
from scalelong.runs.settings import SamplingSettings
from scalelong.training import TrainedRun, Trainer
from scalelong.training.build import build_source
from scalelong.training.condition import Condition, make_condition

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """Result of an evaluation."""

    metric: str  # "FID", or "FD(<extractor>)"
    value: float
    n: int
    n_reference: int
    extractor: str
    extractor_hash: str
    reference: str  # fingerprint of the reference data
    kid: KernelDistance | None = None


def evaluate_images(
    batches: Iterable[Tensor],
    reference: FeatureStatistics,
    extractor: Extractor,
    *,
    kid_reference: Tensor | None = None,  # features (m, D) of the reference: adds KID
    kid_subset_size: int = 1000,
    kid_subsets: int = 100,
    seed: int = 0,  # of KID's subsets
    total: int | None = None,  # number of images of all ranks; lets KID's subsets be checked before any is made
    stopped: Callable[[], bool] = lambda: False,  # called at the end: True if aborted
) -> Result:
    """Distance of uint8 images to the reference; under torch.distributed each rank passes its share.

    >>> from scalelong.evaluation import RandomConvFeatures
    >>> extractor, images = RandomConvFeatures(channels=1), torch.arange(160).to(torch.uint8).view(10, 1, 4, 4)
    >>> reference = FeatureStatistics.from_features(extractor(images), extractor_hash=extractor.hash)
    >>> round(evaluate_images([images], reference, extractor).value, 6)
    0.0
    """
    own = FeatureStatistics(reference.dim, extractor=extractor.name, extractor_hash=extractor.hash)
    own.require_same_features(reference)  # fail early
    if kid_reference is not None:
        kid_reference = checked_features(kid_reference, "evaluation.kid_reference", reference.dim)
        known = len(kid_reference) if total is None else min(total, len(kid_reference))
        check_subsets(kid_subset_size, kid_subsets, known)
    kept, kid = [], None
    for features in extract(batches, extractor, None if total is None else len(own_part(total))):
        own.update(features)
        if kid_reference is not None:
            kept.append(features)
    if torch.cat(all_parts(torch.tensor([stopped()]).float())).any():  # if any rank stopped, all raise
        raise StoppedError("evaluation: given up, the run was asked to stop")
    whole = own.gather()
    if kid_reference is not None:
        rows = torch.cat(all_parts(torch.cat(kept) if kept else torch.empty(0, reference.dim)))
        kid = kernel_distance(rows, kid_reference, subset_size=kid_subset_size, subsets=kid_subsets, seed=seed)
    about = (extractor.name, extractor.hash, reference.data, kid)
    return Result(metric_name(extractor), whole.distance(reference), whole.n, reference.n, *about)


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of one run at one step."""

    result: Result
    seed: int
    sampling: SamplingSettings
    weights: str  # ema or model
    generate_seconds: float  # of sampling alone
    seconds: float

    def record(self) -> dict[str, Any]:
        """The values of an event of kind "evaluation"."""
        result, kid = self.result, self.result.kid
        return {
            "metric": result.metric,
            "value": result.value,
            **({"kid": kid.mean, "kid_sd": kid.sd} if kid else {}),
            "n": result.n,
            "extractor": result.extractor,
            "reference": result.reference,
            "weights": self.weights,
            "sample_seed": self.seed,
            "sampling": dataclasses.asdict(self.sampling),
            "generate_seconds": round(self.generate_seconds, 2),
            "evaluate_seconds": round(self.seconds, 2),
        }


def evaluate_run(
    run: TrainedRun,
    extractor: Extractor,
    reference: FeatureStatistics,
    sampling: SamplingSettings,
    seed: int = 0,
    *,
    condition: Condition | None = None,  # default: from the run's data
    kid_reference: Tensor | None = None,
    rank: int = 0,
    world_size: int = 1,
    stop: Callable[[], bool] = lambda: False,  # asked before each batch; a StoppedError on every rank if it is True
) -> Evaluation:
    """Sample `sampling.count` images, distributed over ranks, and measure their distance to the reference.

    >>> evaluate_run(load_run("runs/cs"), extractor, reference, SamplingSettings(count=10_000))  # doctest: +SKIP
    """
    check_count(sampling)
    sampling = resolve_sampling(sampling, run.objective.process)
    condition = condition or load_condition(run, load_training_data(run))
    started, n = time.perf_counter(), sampling.count
    part = range(n * rank // world_size, n * (rank + 1) // world_size)
    batches = run.sample_batches(sampling, condition, from_data=True, indices=part, seed=seed, progress=rank == 0)
    sample_seconds, stopped = 0.0, False

    def timed() -> Iterator[Tensor]:
        nonlocal sample_seconds, stopped
        before = time.perf_counter()
        for images in batches:
            if stopped := stop():
                return
            sample_seconds += time.perf_counter() - before
            yield images
            before = time.perf_counter()

    options: dict[str, Any] = {"total": n, "stopped": lambda: stopped}
    if kid_reference is not None:
        options |= {"kid_reference": kid_reference, "kid_subset_size": min(1000, n, len(kid_reference))}
    result = evaluate_images(timed(), reference, extractor, **options)
    return Evaluation(result, seed, sampling, run.weights, sample_seconds, time.perf_counter() - started)


def check_count(sampling: SamplingSettings) -> None:
    """Raise a ValueError for too few images."""
    require(sampling.count >= 2, "sampling.count", "at least 2 for a distance", sampling.count)


def load_training_data(run: TrainedRun) -> Source:
    """Load the run's training data; raise if its fingerprint has changed."""
    source = build_source(run.config)
    if run.data and run.data != source.fingerprint:
        raise DataError(f"data.name: {run.folder} was trained on other data than {source.name} is now; put it back")
    return source


def load_condition(run: TrainedRun, source: Source) -> Condition:
    """The run's conditioning; raise if classes or text encoder have changed."""
    condition = make_condition(run.config, source, next(run.model.parameters()).device)
    if condition.conditioning != run.conditioning:
        raise ValueError(f"condition: {source.name} or the text encoder is not what {run.folder} was trained with")
    return condition


def reference_features(source: Source, extractor: Extractor, root: str | Path | None = None) -> Tensor:
    """(n, D) features of a dataset (for latents: of the encoded images), for KID."""
    source = original_images(source, root)
    own = own_part(len(source))
    batches = image_batches(source, own.start, own.stop)
    features = torch.cat([features.cpu() for features in extract(batches, extractor, len(own))])
    return torch.cat([part.cpu() for part in all_parts(features)])


class EvaluationObserver:
    """Trainer observer that evaluates the EMA weights every `every` steps; recorded as kind "evaluation"."""

    kind = "evaluation"

    def __init__(self, trainer: Trainer, extractor: Extractor, sampling: SamplingSettings, every: int) -> None:
        self.trainer, self.extractor, self.sampling, self.every = trainer, extractor, sampling, every
        self.reference = reference_statistics(trainer.source, extractor, root=trainer.config.data.root)

    def __call__(self, step: int, _model: nn.Module) -> dict[str, Any] | None:
        if step % self.every:
            return None
        trainer = self.trainer
        ranks = {"rank": trainer.ranks.process_index, "world_size": trainer.ranks.num_processes}
        about = (trainer.trained(), self.extractor, self.reference, self.sampling)
        try:
            evaluation = evaluate_run(*about, condition=trainer.condition, stop=trainer.is_stopping, **ranks)
        except StoppedError as stopped:  # the checkpoint comes first
            logger.warning("step %d: %s", step, stopped)
            return None
        return evaluation.record() | {"seconds": round(trainer.seconds, 3)}


@dataclass(frozen=True)
class SelfCheck:
    """FID of CIFAR-10's halves (first and last 25,000 training images) and of its training and test images."""

    metric: str
    halves: float  # expected: 2.08, measured with this network
    train_test: float  # expected: 3.15, well known
    seconds: float  # for the features of 60,000 images and both distances
    images_per_second: float

    @property
    def ok(self) -> bool:
        return abs(self.halves - 2.08) <= 0.03 and abs(self.train_test - 3.15) <= 0.02


def self_check(device: str = "cuda", weights: str | Path | None = None, root: str | Path | None = None) -> SelfCheck:
    """Reproduce two known FID values on CIFAR-10; data and weights from the cache folder `root`.

    >>> self_check("cuda").ok  # doctest: +SKIP
    True
    """
    if torch.device(device).type == "cpu":
        logger.warning("60,000 images take hours on a CPU (a few images a second); use a GPU for this check")
    extractor = InceptionFeatures(device, weights, root=root)
    train, test = load_source("cifar10", root=root), load_source("cifar10", root=root, split="test")
    start = time.perf_counter()
    middle = len(train) // 2
    first, last, unseen = (
        collect_statistics(image_batches(source, begin, end, extractor.batch_size), extractor, total=end - begin)
        for source, begin, end in ((train, 0, middle), (train, middle, len(train)), (test, 0, len(test)))
    )
    features_seconds = time.perf_counter() - start
    halves, train_test = first.distance(last), first.merge(last).distance(unseen)
    rate = (len(train) + len(test)) / features_seconds
    return SelfCheck(metric_name(extractor), halves, train_test, time.perf_counter() - start, rate)
