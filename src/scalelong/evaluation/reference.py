"""Statistics of a data set: the fixed side of every evaluation, computed once and kept."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from scalelong.data import Source, cache_dir
from scalelong.data.images import threaded
from scalelong.data.latents import original_images
from scalelong.evaluation.extractors import Extractor
from scalelong.evaluation.statistics import FeatureStatistics

logger = logging.getLogger(__name__)


def image_batches(source: Source, start: int = 0, stop: int | None = None, batch_size: int = 500) -> Iterator[Tensor]:
    """uint8 (B, C, H, W) batches of the items start .. stop - 1, in order."""
    items = range(len(source))[start:stop]
    for first in range(0, len(items), batch_size):
        chosen = items[first : first + batch_size]
        if source.images is not None:
            yield source.read_many(chosen)
        else:
            yield torch.stack(list(threaded(source.read, chosen)))


def collect_statistics(
    batches: Iterable[Tensor], extractor: Extractor, *, data: str = "", total: int | None = None
) -> FeatureStatistics:
    """Statistics of the features of all batches; `data` is their fingerprint, `total` is for the progress bar."""
    statistics: FeatureStatistics | None = None
    for features in extract(batches, extractor, total):
        if statistics is None:
            statistics = FeatureStatistics(
                features.shape[1], extractor=extractor.name, extractor_hash=extractor.hash, data=data
            )
        statistics.update(features)
    if statistics is None:
        raise ValueError("evaluation.images: there are none; check the source or num_images")
    return statistics


def extract(batches: Iterable[Tensor], extractor: Extractor, total: int | None) -> Iterator[Tensor]:
    """The features of each batch, with a progress bar."""
    with tqdm(total=total, desc=extractor.name, unit="img", disable=None) as bar:
        for images in batches:
            yield extractor(images)
            bar.update(len(images))


def reference_statistics(
    source: Source,
    extractor: Extractor,
    *,
    num_images: int | None = None,  # the first so many; None: all
    cache: bool = True,
    root: str | Path | None = None,  # the cache folder
) -> FeatureStatistics:
    """Statistics of a data set (of latents: of their images), computed once and kept in the cache.

    What is kept is found by (data fingerprint, extractor hash, n).
    """
    source = original_images(source, root)
    n = len(source) if num_images is None else num_images
    if not 2 <= n <= len(source):
        raise ValueError(
            f"evaluation.num_images: must be in 2 .. {len(source)} (the images of {source.name}), got {num_images}"
        )
    path = cache_dir(root) / "statistics" / _file_name(source, extractor, n)
    found = _cached(path, source, extractor, n) if cache else None
    if found is not None:
        return found
    statistics = collect_statistics(image_batches(source, 0, n), extractor, data=source.fingerprint, total=n)
    if cache:
        logger.info("kept the statistics of %s in %s", source.name, statistics.save(path))
    return statistics


def _file_name(source: Source, extractor: Extractor, n: int) -> str:
    key = hashlib.sha256(f"{source.fingerprint} {extractor.hash} {n}".encode()).hexdigest()[:16]
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", f"{source.name}-{extractor.name}").strip("-.")[-80:]
    return f"{readable}-n{n}-{key}.safetensors"


def _cached(path: Path, source: Source, extractor: Extractor, n: int) -> FeatureStatistics | None:
    """What is in the cache, if it is whole and of exactly this; else None, with a word on why."""
    if not path.exists():
        return None
    try:
        found = FeatureStatistics.load(path)
    except ValueError as error:
        logger.warning("%s; computing it again", error)
        return None
    if (found.data, found.extractor_hash, found.n) == (source.fingerprint, extractor.hash, n):
        return found
    logger.warning("%s: holds other statistics than its name says; computing them again", path)
    return None
