"""How much extra noise on the input a denoiser bears (Fig. 3c): the change of its output, and its loss.

The network sees x_t + sigma * delta with delta ~ N(0, I) instead of x_t, and should still predict what it was trained to.

Shapes: B images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scalelong.diffusion import Objective, draw_time_and_noise
from scalelong.diffusion.objective import Network
from scalelong.random import normal

SIGMAS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


@dataclass(frozen=True)
class RobustnessPoint:
    """What extra noise of one size did, as means over the images."""

    sigma: float
    output_change: float  # ||f(x + sigma delta) - f(x)|| / ||f(x)||
    gain: float  # ||f(x + sigma delta) - f(x)|| / ||sigma delta||; Theorem 3.4 bounds it; nan at sigma = 0
    loss: float


@torch.no_grad()
def robustness_curve(
    network: Network,  # (x, time) -> prediction, as from scalelong.backbones.as_network
    objective: Objective,
    images: Tensor,  # (B, C, H, W) in [-1, 1], on the network's device
    sigmas: Sequence[float] = SIGMAS,
    *,
    seed: int = 0,
    chunk: int = 256,
) -> list[RobustnessPoint]:
    """A point for each sigma; times, noises and extra noises are functions of the seed, so methods can be compared."""
    _check(images, sigmas)
    parts = [
        _measure(network, objective, images[start : start + chunk], start, sigmas, seed)
        for start in range(0, len(images), chunk)
    ]
    found = torch.cat(parts, dim=1).double().mean(1).tolist()  # (sigmas, B, 3) -> means
    return [RobustnessPoint(float(sigma), *row) for sigma, row in zip(sigmas, found, strict=True)]


def _measure(
    network: Network, objective: Objective, images: Tensor, start: int, sigmas: Sequence[float], seed: int
) -> Tensor:
    """(sigmas, B, 3): relative change, gain and loss of each image."""
    index = torch.arange(start, start + len(images), device=images.device)
    process, shape = objective.process, images.shape[1:]
    t, noise = draw_time_and_noise(process, seed, index, shape)
    extra = normal(seed, "extra noise", index, shape)
    shaken = _Shaken(network, torch.zeros_like(extra))
    objective.loss(shaken, images, noise, t)
    plain, rows = shaken.output, []
    for sigma in sigmas:
        shaken.extra = sigma * extra
        loss = objective.loss(shaken, images, noise, t)
        change = (shaken.output - plain).flatten(1).norm(dim=1)
        relative = change / plain.flatten(1).norm(dim=1)
        gain = change / (sigma * extra.flatten(1).norm(dim=1)) if sigma else torch.full_like(change, math.nan)
        rows.append(torch.stack([relative, gain, loss], dim=1))
    return torch.stack(rows)


class _Shaken:
    """The network with something added to its input; remembers its output."""

    def __init__(self, network: Network, extra: Tensor) -> None:
        self.network, self.extra = network, extra
        self.output = extra

    def __call__(self, x: Tensor, time: Tensor) -> Tensor:
        self.output = self.network(x + self.extra, time).float()
        return self.output


def _check(images: Tensor, sigmas: Sequence[float]) -> None:
    if images.ndim < 2 or len(images) == 0:
        raise ValueError(f"images: needs at least one, (B, ...), got shape {tuple(images.shape)}")
    if not images.is_floating_point():
        raise TypeError(
            f"images: must be floats in [-1, 1], got {images.dtype}; scalelong.data.to_float converts pixels"
        )
    wrong = [sigma for sigma in sigmas if not (math.isfinite(sigma) and sigma >= 0)]
    if wrong or not sigmas:
        raise ValueError(f"sigmas: must be numbers of at least 0, got {wrong or 'none'}; for example {SIGMAS}")
