"""Measurements on trained models: robustness to extra input noise (Fig. 3c) and the coefficients that LS learned (Fig. 7).

Shapes: B images, n noises, N skips.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from scalelong.diffusion import Objective, draw_time_and_noise
from scalelong.diffusion.objective import Network
from scalelong.random import normal
from scalelong.scaling.constant import constant_coefficients
from scalelong.skips import coefficients
from scalelong.training.run import evaluating

SIGMAS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
NOISES = 30  # "we randomly sample 30 Gaussian noises"


@dataclass(frozen=True)
class RobustnessPoint:
    """The effect of extra noise of one size, as means over the images."""

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
    """Output change and loss when the network sees x_t + sigma * delta, delta ~ N(0, I), instead of x_t.

    Times, noises and extra noises are functions of the seed, so methods can be compared.

    >>> from scalelong.diffusion import VPSDE
    >>> points = robustness_curve(lambda x, time: 3 * x, Objective(VPSDE()), torch.zeros(8, 1, 4, 4), (0.1,))
    >>> round(points[0].gain, 3)
    3.0
    """
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

    def run(sigma: float) -> tuple[Tensor, Tensor]:
        """Prediction and loss at x_t + sigma * extra."""
        outputs: list[Tensor] = []

        def perturbed(x: Tensor, time: Tensor) -> Tensor:
            outputs.append(network(x + sigma * extra, time).float())
            return outputs[-1]

        loss = objective.loss(perturbed, images, noise, t)
        return outputs[-1], loss

    plain, rows = run(0.0)[0], []
    for sigma in sigmas:
        output, loss = run(sigma)
        change = (output - plain).flatten(1).norm(dim=1)
        relative = change / plain.flatten(1).norm(dim=1)
        gain = change / (sigma * extra.flatten(1).norm(dim=1)) if sigma else torch.full_like(change, math.nan)
        rows.append(torch.stack([relative, gain, loss], dim=1))
    return torch.stack(rows)


def _check(images: Tensor, sigmas: Sequence[float]) -> None:
    if images.ndim < 2 or len(images) == 0:
        raise ValueError(f"images: at least one is needed, (B, ...), got shape {tuple(images.shape)}")
    if not images.is_floating_point():
        raise TypeError(f"images: must be floats in [-1, 1], got {images.dtype}; convert with scalelong.data.to_float")
    wrong = [sigma for sigma in sigmas if not (math.isfinite(sigma) and sigma >= 0)]
    if wrong or not sigmas:
        raise ValueError(f"sigmas: must be numbers of at least 0, got {wrong or 'none'}; for example {SIGMAS}")


@dataclass(frozen=True)
class CSFit:
    """kappa_i = scale * kappa^(i-1) fitted to coefficients; scale = 1 is CS (Eq. 8)."""

    kappa: float
    scale: float
    r_squared: float  # share of the variance over i that the curve explains; below 0: worse than a constant

    def curve(self, num_skips: int) -> list[float]:
        """kappa_1 .. kappa_N of the fit."""
        return [self.scale * k for k in constant_coefficients(num_skips, self.kappa)]


@torch.no_grad()
def learned_coefficients(
    network: Callable[..., Tensor],  # as_network(model): (x, time) -> prediction
    model: nn.Module,  # the scaled model inside it
    shape: Sequence[int],  # of one image
    time: float,  # the network's time input: 999 for pure noise of the VP-SDE
    count: int = NOISES,
    seed: int = 0,
) -> Tensor:
    """(n, N): the mean coefficient of each skip on each of `count` noises from N(0, I); a function of the seed."""
    if count < 1:
        raise ValueError(f"count: must be at least 1, got {count}; the paper uses {NOISES}")
    device = next(model.parameters()).device
    noises = normal(seed, "learned", torch.arange(count, device=device), shape)
    rows = []
    with evaluating(model):
        for noise in noises:
            network(noise[None], torch.full((1,), time, device=device))
            rows.append(coefficients(model))
    return torch.tensor(rows)


def fit_cs(kappas: Sequence[float], free_scale: bool = False) -> CSFit:
    """The least-squares fit with kappa in (0, 1.5]; `free_scale` lets kappa_1 differ from 1.

    >>> round(fit_cs([1.0, 0.7, 0.49]).kappa, 6)
    0.7
    """
    if len(kappas) < 2:
        raise ValueError(f"kappas: a curve needs at least 2 skips, got {len(kappas)}")
    values = np.array(kappas, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"kappas: must be finite, got {list(kappas)}; run the model once first")
    low, high, points = 1e-6, 1.5, 200
    while True:  # a grid, then a finer one around its best point
        grid = np.linspace(low, high, points)
        curves = grid[:, None] ** np.arange(len(kappas))  # (points, N)
        scales = curves @ values / (curves**2).sum(1) if free_scale else np.ones(points)
        errors = ((values - scales[:, None] * curves) ** 2).sum(1)
        best = int(errors.argmin())
        if high - low < 1e-10:
            break
        low, high = grid[max(0, best - 1)], grid[min(points - 1, best + 1)]
    residual, total = float(errors[best]), float(((values - values.mean()) ** 2).sum())
    r_squared = 1 - residual / total if total > 0 else (1.0 if residual < 1e-18 else -math.inf)
    return CSFit(float(grid[best]), float(scales[best]), r_squared)
