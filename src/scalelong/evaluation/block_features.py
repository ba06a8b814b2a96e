"""Pooled features of a denoiser's blocks at a noise level, cached on disk.

Noise levels are sigma / alpha, the same for every process. Shapes: n images, D channels of a block.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scalelong.diffusion import Process
from scalelong.files import atomic_write
from scalelong.random import normal
from scalelong.skips.feature_layout import as_tokens, channels_of, extra_tokens, named_output, split_item
from scalelong.training.run import evaluating

logger = logging.getLogger(__name__)


@dataclass
class BlockFeatures:
    """Pooled features of all blocks in one pass over images."""

    model: nn.Module
    net: Callable[..., Any]
    process: Process
    blocks: list[str]
    condition: dict[str, Tensor]
    seed: int
    batch_size: int
    cache: str | Path | None
    _digest: str = ""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def __call__(
        self, images: Tensor, index: Tensor, t: float, blocks: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """(n, D) features per block of images (n, C, H, W); the noise is a function of the seed and `index`."""
        blocks = self.blocks if blocks is None else blocks
        path = self._path(images, index, t, blocks) if self.cache is not None else None
        if path is not None and path.is_file():
            try:
                return {name: value.to(self.device).float() for name, value in load_file(path).items()}
            except (SafetensorError, OSError) as error:
                logger.warning("%s: is damaged (%s); computing it again", path, error)
        parts: dict[str, list[Tensor]] = {name: [] for name in blocks}
        for rows in torch.split(torch.arange(len(images)), self.batch_size):
            for name, value in self.of_batch(images[rows].to(self.device), index[rows], t, blocks).items():
                parts[name].append(value)
        found = {name: _stored(torch.cat(values)) for name, values in parts.items()}
        if path is not None:
            with atomic_write(path) as file:
                save_file({name: value.cpu().contiguous() for name, value in found.items()}, file.name)
        return {name: value.float() for name, value in found.items()}

    @torch.no_grad()
    def of_batch(self, images: Tensor, index: Tensor, t: float, blocks: Sequence[str]) -> dict[str, Tensor]:
        index = index.to(self.device)
        times = torch.full((len(images),), t, device=self.device)
        times = times.long() if self.process.name == "ddpm" else times
        noise = normal(self.seed, "linear-probe", index, images.shape[1:])
        x, time_input = self.process.network_input(self.process.diffuse(images, noise, times)[0], times)
        dtype = next(self.model.parameters()).dtype
        x = x.to(dtype) if dtype in (torch.bfloat16, torch.float16) else x
        given = {
            name: value.to(self.device).expand(len(images), *value.shape[1:]) for name, value in self.condition.items()
        }
        with evaluating(self.model), _outputs(self.model, blocks) as found:
            self.net(x, time_input, **given)
        if missing := [name for name in blocks if name not in found]:
            raise ValueError(f"blocks: {missing[0]} returns no tensor or does not run; choose others")
        if wrong := [name for name, value in found.items() if len(value) != len(images)]:
            rows = f"{wrong[0]} returns {len(found[wrong[0]])} samples for {len(images)} images"
            raise ValueError(f"blocks: {rows}; choose others")
        return found

    def _path(self, images: Tensor, index: Tensor, t: float, blocks: Sequence[str]) -> Path:
        if not self._digest:
            digest = hashlib.sha256(f"{self.model}{getattr(self.model, 'config', '')}".encode())
            for name, value in self.model.state_dict().items():
                digest.update(f"{name} {value.dtype}".encode())
                digest.update(value.detach().float().cpu().contiguous().numpy().tobytes())
            self._digest = digest.hexdigest()
        about = [self._digest, repr(self.process), sorted(blocks), self.seed, t, sorted(self.condition)]
        digest = hashlib.sha256(json.dumps(about).encode())
        for value in (images, index, *self.condition.values()):
            digest.update(value.cpu().contiguous().numpy().tobytes())
        return Path(str(self.cache)) / f"features-{digest.hexdigest()[:20]}.safetensors"


@contextmanager
def _outputs(model: nn.Module, blocks: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Context that captures the outputs of these blocks, averaged over positions: (B, D)."""
    found: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, _args: Any, output: Any) -> None:
        if (tensor := named_output(output, name, "blocks")) is not None:
            patches = as_tokens(tensor, channels_of(module, tensor))[:, extra_tokens(model, tensor) :]
            found[name] = patches.float().mean(1)

    modules = {name: model.get_submodule(split_item(name)[0]) for name in blocks}
    handles = [module.register_forward_hook(partial(keep, name)) for name, module in modules.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _stored(features: Tensor) -> Tensor:
    """Round to half precision if the values fit, so computed and cached features are identical."""
    if not bool(features.isfinite().all()):
        raise ValueError("features: are not finite; the network has diverged")
    return features.half() if float(features.abs().max()) < 6e4 else features


def times_at(process: Process, levels: Sequence[float]) -> tuple[list[float], list[float]]:
    """The nearest noise levels sigma / alpha of the process, and their times."""
    times = process.sampling_times(min(1000, getattr(process, "num_steps", 1000))).flip(0)
    alpha, sigma = process.marginal(times)
    known = (sigma / alpha).double()
    nearest = [int((known.log() - np.log(level)).abs().argmin()) for level in levels]
    kept = sorted(set(nearest))
    return [float(known[i]) for i in kept], [float(times[i]) for i in kept]
