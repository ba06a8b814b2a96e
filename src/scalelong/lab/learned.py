"""What LS learnt (Fig. 7): its coefficients on pure noise, and how near they come to the curve of CS.

Shapes: n noises, N skips.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scalelong.evaluation.generate import evaluating
from scalelong.random import normal
from scalelong.scaling.constant import constant_coefficients
from scalelong.skips import coefficients

COUNT = 30  # "we randomly sample 30 Gaussian noises"


@dataclass(frozen=True)
class CSFit:
    """The curve of CS nearest to some coefficients: kappa_i = scale * kappa^(i-1), with scale = 1 in Eq. 8."""

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
    time: float,  # as the network is fed: 999 for pure noise of the VP-SDE
    count: int = COUNT,
    seed: int = 0,
) -> Tensor:
    """(n, N): the mean coefficient of each skip on each of `count` noises from N(0, I); a function of the seed."""
    if count < 1:
        raise ValueError(f"count: must be at least 1, got {count}; the paper draws {COUNT}")
    device = next(model.parameters()).device
    noises = normal(seed, "learned", torch.arange(count, device=device), shape)
    rows = []
    with evaluating(model):
        for noise in noises:
            network(noise[None], torch.full((1,), time, device=device))
            rows.append(coefficients(model))
    return torch.tensor(rows)


def fit_cs(kappas: Sequence[float], free_scale: bool = False) -> CSFit:
    """The kappa in (0, 1.5] whose curve is nearest in squares; `free_scale` lets kappa_1 differ from 1."""
    if len(kappas) < 2:
        raise ValueError(f"kappas: a curve needs at least 2 skips, got {len(kappas)}")
    values = torch.tensor(kappas, dtype=torch.float64)
    if not values.isfinite().all():
        raise ValueError(f"kappas: must be finite, got {list(kappas)}; run the model once first")
    powers = torch.arange(len(kappas), dtype=torch.float64)

    def error(kappa: float) -> tuple[float, float]:
        curve = torch.tensor(kappa, dtype=torch.float64) ** powers
        scale = float(values @ curve / (curve @ curve)) if free_scale else 1.0
        return float((values - scale * curve).square().sum()), scale

    kappa = _minimise(lambda k: error(k)[0], 1e-6, 1.5)
    residual, scale = error(kappa)
    total = float((values - values.mean()).square().sum())
    return CSFit(kappa, scale, 1 - residual / total if total > 0 else (1.0 if residual < 1e-18 else -math.inf))


def _minimise(function: Callable[[float], float], low: float, high: float, points: int = 200) -> float:
    """The least value's place: a grid, then again and again around its best point."""
    while high - low > 1e-10:
        grid = torch.linspace(low, high, points, dtype=torch.float64).tolist()
        best = min(range(points), key=lambda i: function(grid[i]))
        low, high = grid[max(0, best - 1)], grid[min(points - 1, best + 1)]
    return (low + high) / 2
