"""Mean and covariance of features, gathered batch by batch, kept with what they were made from. Legend: D features."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from scalelong.evaluation.frechet import (
    Array,
    checked_features,
    checked_gaussian,
    gaussian_distance,
    square_root,
    warn_of_few_samples,
)
from scalelong.evaluation.ranks import all_parts

_FORMAT = "scalelong.statistics.1"


class FeatureStatistics:
    """n, mean and covariance in float64; batches are added one at a time, parts of ranks are merged."""

    def __init__(self, dim: int, *, extractor: str = "", extractor_hash: str = "", data: str = "") -> None:
        if dim < 1:
            raise ValueError(f"evaluation.statistics.dim: must be at least 1, got {dim}")
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
        """(D, D), with n - 1 in the denominator."""
        if self.n < 2:
            raise ValueError(f"evaluation.n: a covariance needs at least 2 samples, got {self.n}; add images")
        return self.scatter / (self.n - 1)

    def update(self, features: Array) -> None:
        """Add a batch (n, D); it is summed on its own device."""
        x = checked_features(features, "evaluation.features", self.dim)
        if len(x) == 0:
            return
        mean = x.mean(0)
        centred = x - mean
        self._add(len(x), mean, centred.T @ centred)

    def _add(self, n: int, mean: Tensor, scatter: Tensor) -> None:
        """Chan, Golub and LeVeque 1983: two parts make a whole without a difference of large sums."""
        total = self.n + n
        if total == 0:
            return
        self.mean, self.scatter = self.mean.to(mean.device), self.scatter.to(mean.device)
        shift = mean - self.mean
        self.scatter = self.scatter + scatter + torch.outer(shift, shift) * (self.n * n / total)
        self.mean = self.mean + shift * (n / total)
        self.n = total

    def merge(self, other: FeatureStatistics) -> FeatureStatistics:
        """The statistics of both sets together, as a new object; the fingerprint stays if it is the same."""
        self.require_same_features(other)
        data = self.data if self.data == other.data else ""
        whole = FeatureStatistics(self.dim, extractor=self.extractor, extractor_hash=self.extractor_hash, data=data)
        for part in (self, other):
            whole._add(part.n, part.mean, part.scatter)
        return whole

    def gather(self) -> FeatureStatistics:
        """The statistics over all ranks of torch.distributed, on every rank."""
        own = torch.cat([self.mean.new_tensor([self.n]), self.mean, self.scatter.flatten()])
        whole = FeatureStatistics(
            self.dim, extractor=self.extractor, extractor_hash=self.extractor_hash, data=self.data
        )
        for part in torch.cat(all_parts(own[None])):
            whole._add(int(part[0]), part[1 : 1 + self.dim], part[1 + self.dim :].view(self.dim, self.dim))
        return whole

    def distance(self, other: FeatureStatistics) -> float:
        """The Frechet distance; warns where either has no more samples than features."""
        self.require_same_features(other)
        (mean1, cov1), (mean2, cov2) = (checked_gaussian(part.mean, part.cov, "") for part in (self, other))
        fewest = min(self.n, other.n)
        if fewest <= self.dim:
            warn_of_few_samples(f"evaluation.n: {fewest} samples for {self.dim} features")
        return gaussian_distance(mean1, square_root(cov1), mean2, square_root(cov2))

    def require_same_features(self, other: FeatureStatistics) -> None:
        """A ValueError unless both are statistics of the same extractor."""
        mine, theirs = (self.dim, self.extractor_hash), (other.dim, other.extractor_hash)
        if mine != theirs:
            raise ValueError(
                f"evaluation.reference: made by {other.extractor!r} ({other.dim} features), not by {self.extractor!r} "
                f"({self.dim} features); compute both with the same extractor"
            )

    def save(self, path: str | Path) -> Path:
        """Write a safetensors file with n, extractor and fingerprint in its metadata; it appears whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {
            "format": _FORMAT,
            "n": str(self.n),
            "extractor": self.extractor,
            "extractor_hash": self.extractor_hash,
            "data": self.data,
        }
        tensors = {"mean": self.mean.cpu().contiguous(), "scatter": self.scatter.cpu().contiguous()}
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
            staged = Path(folder) / path.name
            save_file(tensors, str(staged), metadata=about)
            with staged.open("rb") as file:
                os.fsync(file.fileno())
            staged.replace(path)
        return path

    @classmethod
    def load(cls, path: str | Path) -> FeatureStatistics:
        """What `save` wrote; anything else is a ValueError that names the file."""
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"evaluation.statistics: {path} is not there; check the path")
        try:
            with safe_open(str(path), framework="pt") as file:
                about, tensors = file.metadata() or {}, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"evaluation.statistics: {path} cannot be read ({error}); delete it") from error
        if about.get("format") != _FORMAT or tensors.keys() != {"mean", "scatter"}:
            raise ValueError(f"evaluation.statistics: {path} is no file of statistics (format {about.get('format')!r})")
        mean, scatter = checked_gaussian(tensors["mean"], tensors["scatter"], "")
        loaded = cls(
            len(mean), extractor=about["extractor"], extractor_hash=about["extractor_hash"], data=about["data"]
        )
        loaded.n, loaded.mean, loaded.scatter = int(about["n"]), mean, scatter
        return loaded
