"""Mean and covariance of features, accumulated in batches and cached for datasets. Shapes: D features."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from scalelong.data import Source, cache_dir
from scalelong.data.base import threaded
from scalelong.data.latents import original_images
from scalelong.errors import require
from scalelong.evaluation.extractors import Extractor
from scalelong.evaluation.frechet import Array, checked_features, checked_gaussian, frechet_distance
from scalelong.files import atomic_write
from scalelong.progress import Progress

logger = logging.getLogger(__name__)

_FORMAT = "scalelong.statistics.1"


class FeatureStatistics:
    """Running n, mean and covariance in float64; can be merged across ranks.

    >>> statistics = FeatureStatistics.from_features(torch.randn(100, 4))
    >>> statistics.update(torch.randn(50, 4))
    >>> statistics.n, statistics.cov.shape
    (150, torch.Size([4, 4]))
    """

    def __init__(self, dim: int, *, extractor: str = "", extractor_hash: str = "", data: str = "") -> None:
        require(dim >= 1, "evaluation.statistics.dim", "at least 1", dim)
        self.extractor, self.extractor_hash, self.data = extractor, extractor_hash, data  # data: its fingerprint
        self.n = 0
        self.mean = torch.zeros(dim, dtype=torch.float64)
        self.scatter = torch.zeros(dim, dim, dtype=torch.float64)  # sum of (x - mean) (x - mean)^T

    @classmethod
    def from_features(cls, features: Array, **about: str) -> FeatureStatistics:
        """The statistics of all rows of (n, D)."""
        statistics = cls(checked_features(features, "evaluation.features").shape[1], **about)
        statistics.update(features)
        return statistics

    @property
    def dim(self) -> int:
        return len(self.mean)

    @property
    def cov(self) -> Tensor:
        require(self.n >= 2, "evaluation.n", "at least 2 samples for a covariance", self.n)
        return self.scatter / (self.n - 1)

    def update(self, features: Array) -> None:
        """Add a batch (n, D), reduced on its own device."""
        x = checked_features(features, "evaluation.features", self.dim)
        if len(x):
            centred = x - x.mean(0)
            self._add(len(x), x.mean(0), centred.T @ centred)

    def _add(self, n: int, mean: Tensor, scatter: Tensor) -> None:
        """Numerically stable merge (Chan, Golub and LeVeque 1983)."""
        total = self.n + n
        if total == 0:
            return
        self.mean, self.scatter = self.mean.to(mean.device), self.scatter.to(mean.device)
        shift = mean - self.mean
        self.scatter = self.scatter + scatter + torch.outer(shift, shift) * (self.n * n / total)
        self.mean = self.mean + shift * (n / total)
        self.n = total

    def merge(self, other: FeatureStatistics) -> FeatureStatistics:
        """Combined statistics as a new object; keeps the fingerprint if both are equal."""
        self.require_same_features(other)
        whole = self._empty(self.data if self.data == other.data else "")
        for part in (self, other):
            whole._add(part.n, part.mean, part.scatter)
        return whole

    def gather(self) -> FeatureStatistics:
        """The statistics over all ranks of torch.distributed, on every rank."""
        own = torch.cat([self.mean.new_tensor([self.n]), self.mean, self.scatter.flatten()])
        whole = self._empty(self.data)
        for part in torch.cat(all_parts(own[None])):
            whole._add(int(part[0]), part[1 : 1 + self.dim], part[1 + self.dim :].view(self.dim, self.dim))
        return whole

    def _empty(self, data: str) -> FeatureStatistics:
        return FeatureStatistics(self.dim, extractor=self.extractor, extractor_hash=self.extractor_hash, data=data)

    def distance(self, other: FeatureStatistics) -> float:
        """The Frechet distance; warns of too few samples."""
        self.require_same_features(other)
        return frechet_distance(self.mean, self.cov, other.mean, other.cov)

    def require_same_features(self, other: FeatureStatistics) -> None:
        if (self.dim, self.extractor_hash) != (other.dim, other.extractor_hash):
            made = (
                f"made by {other.extractor!r} ({other.dim} features), not by {self.extractor!r} ({self.dim} features)"
            )
            raise ValueError(f"evaluation.reference: {made}; compute both with the same extractor")

    def save(self, path: str | Path) -> Path:
        """Write a safetensors file, atomically, with n, extractor and fingerprint in its metadata."""
        path = Path(path)
        about = {"extractor": self.extractor, "extractor_hash": self.extractor_hash, "data": self.data}
        tensors = {"mean": self.mean.cpu().contiguous(), "scatter": self.scatter.cpu().contiguous()}
        with atomic_write(path) as file:
            file.write(save(tensors, metadata={"format": _FORMAT, "n": str(self.n), **about}))
        return path

    @classmethod
    def load(cls, path: str | Path) -> FeatureStatistics:
        """Inverse of `save`; raises a ValueError for other files."""
        try:
            with safe_open(str(path), framework="pt") as file:
                about, tensors = file.metadata() or {}, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"evaluation.statistics: {path} cannot be read ({error}); delete it") from error
        if about.get("format") != _FORMAT or tensors.keys() != {"mean", "scatter"}:
            raise ValueError(f"evaluation.statistics: {path} is not a file of statistics ({about.get('format')!r})")
        mean, scatter = checked_gaussian(tensors["mean"], tensors["scatter"], "")
        loaded = cls(len(mean), **{key: about[key] for key in ("extractor", "extractor_hash", "data")})
        loaded.n, loaded.mean, loaded.scatter = int(about["n"]), mean, scatter
        return loaded


def image_batches(source: Source, start: int = 0, stop: int | None = None, batch_size: int = 500) -> Iterator[Tensor]:
    """uint8 (B, C, H, W) batches of the items start .. stop - 1, in order."""
    items = range(len(source))[start:stop]
    for first in range(0, len(items), batch_size):
        chosen = items[first : first + batch_size]
        in_memory = source.images is not None
        yield source.read_many(chosen) if in_memory else torch.stack(list(threaded(source.read, chosen)))


def collect_statistics(
    batches: Iterable[Tensor], extractor: Extractor, *, data: str = "", total: int | None = None
) -> FeatureStatistics:
    """Statistics of the features of all batches; `data` is their fingerprint, `total` is for the progress bar."""
    statistics: FeatureStatistics | None = None
    for features in extract(batches, extractor, total):
        if statistics is None:
            about = {"extractor": extractor.name, "extractor_hash": extractor.hash, "data": data}
            statistics = FeatureStatistics(features.shape[1], **about)
        statistics.update(features)
    if statistics is None:
        raise ValueError("evaluation.images: got none; check the source")
    return statistics


def extract(batches: Iterable[Tensor], extractor: Extractor, total: int | None) -> Iterator[Tensor]:
    """The features of all images, in batches of the extractor's size."""
    with Progress(total=total, desc=extractor.name, unit="img") as bar:
        for images in batches:
            for part in torch.split(images, getattr(extractor, "batch_size", max(1, len(images)))):
                yield extractor(part)
                bar.update(len(part))


def reference_statistics(
    source: Source, extractor: Extractor, *, cache: bool = True, root: str | Path | None = None
) -> FeatureStatistics:
    """Statistics of a dataset (for latents: of the encoded images), cached under `root` by (fingerprint, extractor hash, n).

    Under torch.distributed, every rank extracts its share.

    >>> from scalelong.evaluation import RandomConvFeatures
    >>> from scalelong.data import load_source
    >>> reference_statistics(load_source("digits"), RandomConvFeatures(), cache=False).n
    1797
    """
    source = original_images(source, root)
    n, about = len(source), f"{source.fingerprint} {extractor.hash} {len(source)}"
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", f"{source.name}-{extractor.name}").strip("-.")[-80:]
    name = f"{readable}-n{n}-{hashlib.sha256(about.encode()).hexdigest()[:16]}.safetensors"
    path = cache_dir(root) / "statistics" / name
    found = _cached(path, about) if cache else None
    if all(bool(part) for part in torch.cat(all_parts(torch.tensor([found is not None])))) and found is not None:
        return found
    own = own_part(n)
    batches = image_batches(source, own.start, own.stop)
    statistics = collect_statistics(batches, extractor, data=source.fingerprint, total=len(own)).gather()
    if cache and own.start == 0:
        try:
            logger.info("statistics of %s cached in %s", source.name, statistics.save(path))
        except OSError as error:  # do not lose an hour of features
            logger.warning("%s: the statistics could not be cached there (%s)", path, error.strerror or error)
    return statistics


def _cached(path: Path, about: str) -> FeatureStatistics | None:
    if not path.exists():
        return None
    try:
        found = FeatureStatistics.load(path)
        if f"{found.data} {found.extractor_hash} {found.n}" == about:
            return found
        logger.warning("%s: holds other statistics than its name says; computing them again", path)
    except ValueError as error:
        logger.warning("%s; computing it again", error)
    return None


def own_part(n: int) -> range:
    """This rank's share of n items; all of them without torch.distributed."""
    several = dist.is_available() and dist.is_initialized()
    rank, size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    return range(n * rank // size, n * (rank + 1) // size)


def all_parts(own: Tensor) -> list[Tensor]:
    """Every rank's (n, ...) tensor, in the order of ranks, on every rank; n may differ, the rest may not."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [own]
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    counts = [int(part) for part in _all_gather(torch.tensor(len(own), device=device))]
    padded = own.new_zeros((max(counts), *own.shape[1:]), device=device)
    padded[: len(own)] = own
    return [part[:count] for part, count in zip(_all_gather(padded), counts, strict=True)]


def _all_gather(own: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return parts
