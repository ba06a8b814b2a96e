"""What turns images into features, and what a distance of such features may be called.

Shapes: B images, uint8 (B, C, H, W) with C 1 or 3; features float32 (B, D).
"""

from __future__ import annotations

import hashlib
import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from scalelong.evaluation.weights import INCEPTION_SHA256
from scalelong.random import normal


class Extractor(Protocol):
    """Anything with a name, a hash that changes when its features do, and images -> features."""

    @property
    def name(self) -> str: ...

    @property
    def hash(self) -> str: ...

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 (B, 1 or 3, H, W) -> float32 (B, D)."""


def metric_name(extractor: Extractor) -> str:
    """ "FID" for the Inception network of the literature in float32 alone; for everything else "FD(<name>)"."""
    return "FID" if extractor.hash == INCEPTION_SHA256 else f"FD({extractor.name})"


def as_rgb(images: Tensor) -> Tensor:
    """uint8 (B, 3, H, W); grey is repeated. Anything else is a ValueError."""
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(
            f"evaluation.images: must be uint8 (B, 1 or 3, H, W), got {images.dtype} {tuple(images.shape)}; "
            "scalelong.data.to_uint8 converts from [-1, 1]"
        )
    return images.expand(-1, 3, -1, -1)


class RandomConvFeatures:
    """Two convolutions with fixed random weights, averaged over the four quarters of the image.

    For tests and tiny runs on a CPU. It is not FID: its distances compare only with each other.
    """

    def __init__(self, channels: int = 16, seed: int = 0, device: str | torch.device = "cpu") -> None:
        if channels < 1:
            raise ValueError(f"evaluation.extractor.channels: must be at least 1, got {channels}")
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
