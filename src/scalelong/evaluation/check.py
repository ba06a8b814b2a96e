"""Is the FID of this machine the FID of the literature? Two numbers that everyone can measure say so."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from scalelong.data import load_source
from scalelong.evaluation.extractors import metric_name
from scalelong.evaluation.inception import InceptionFeatures
from scalelong.evaluation.reference import collect_statistics, image_batches

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SelfCheck:
    """FID of CIFAR-10's halves (first and last 25,000 training images) and of its training and test images."""

    metric: str
    halves: float
    train_test: float
    seconds: float  # for the features of 60,000 images and both distances
    images_per_second: float
    expected_halves: float = 2.08  # measured with this network
    expected_train_test: float = 3.15  # well known
    tolerance_halves: float = 0.03
    tolerance_train_test: float = 0.02

    @property
    def ok(self) -> bool:
        """Both are within their tolerance of what is expected."""
        halves = abs(self.halves - self.expected_halves) <= self.tolerance_halves
        return halves and abs(self.train_test - self.expected_train_test) <= self.tolerance_train_test


def self_check(
    device: str | torch.device = "cuda",
    weights: str | Path | None = None,
    *,
    batch_size: int = 0,
    precision: str = "fp32",
    root: str | Path | None = None,  # the cache folder, for CIFAR-10 and the weights
) -> SelfCheck:
    """Measure both, afresh; quick on a GPU, hours on a CPU."""
    if torch.device(device).type == "cpu":
        logger.warning("60,000 images take hours on a CPU (a few images a second); use a GPU for this check")
    extractor = InceptionFeatures(device, weights, batch_size, precision=precision, root=root)
    train, test = load_source("cifar10", root=root), load_source("cifar10", root=root, split="test")
    start = time.perf_counter()
    middle = len(train) // 2
    first, last, unseen = (
        collect_statistics(image_batches(source, begin, end, extractor.batch_size), extractor, total=end - begin)
        for source, begin, end in ((train, 0, middle), (train, middle, len(train)), (test, 0, len(test)))
    )
    features_seconds = time.perf_counter() - start
    halves, train_test = first.distance(last), first.merge(last).distance(unseen)
    return SelfCheck(
        metric=metric_name(extractor),
        halves=halves,
        train_test=train_test,
        seconds=time.perf_counter() - start,
        images_per_second=(len(train) + len(test)) / features_seconds,
    )
