"""Gaussian data, for which the best possible network is known: what the tests of this folder measure against.

Shapes: images are (B, 1, 2, 2), D = 4 numbers each; `modes` are coordinates along the eigenvectors of the covariance.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from scalelong.diffusion import Objective, Process, sample
from scalelong.runs.settings import SamplingSettings

SHAPE = (1, 2, 2)
VARIANCES = torch.tensor([2.0, 0.5, 0.1, 0.02], dtype=torch.float64)
MODES = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
MEAN = torch.tensor([0.3, -0.5, 0.8, 0.1], dtype=torch.float64)
COVARIANCE = MODES @ torch.diag(VARIANCES) @ MODES.T


def flat(x: Tensor) -> Tensor:
    return x.double().flatten(1)


def image(x: Tensor) -> Tensor:
    return x.float().view(-1, *SHAPE)


def own_time(process: Process, network_time: Tensor) -> Tensor:
    """The process's time, from what the network was fed."""
    match process.name:
        case "vp" | "cosine" | "flow":
            return network_time.double() / 999
        case "ddpm":
            return network_time
        case _:
            return (4 * network_time.double()).exp()


class BestNetwork:
    """E[target | x_t] in closed form, for any process and prediction; written from the papers, not from the package."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def posterior(self, x: Tensor, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """(E[x_0 | x_t], E[eps | x_t]) for x (B, D) and alpha, sigma (B, 1)."""
        total = alpha**2 * VARIANCES + sigma**2
        centred = (x - alpha * MEAN) @ MODES / total
        return MEAN + (alpha * VARIANCES * centred) @ MODES.T, (sigma * centred) @ MODES.T

    def __call__(self, x: Tensor, time: Tensor) -> Tensor:
        process = self.objective.process
        alpha, sigma = process.marginal(own_time(process, time).double())
        alpha, sigma = alpha[:, None], sigma[:, None]
        if process.name == "edm":
            return image(self.edm(flat(x), sigma, process.sigma_data))  # type: ignore[attr-defined]
        x0, noise = self.posterior(flat(x), alpha, sigma)
        targets = {"noise": noise, "x0": x0, "v": alpha * noise - sigma * x0, "flow": noise - x0}
        return image(targets[self.objective.prediction])

    def edm(self, scaled: Tensor, sigma: Tensor, data: float) -> Tensor:
        """F of D(x; sigma) = c_skip x + c_out F(c_in x; c_noise), with EDM's Table 1."""
        c_skip = data**2 / (sigma**2 + data**2)
        c_out = sigma * data / (sigma**2 + data**2).sqrt()
        c_in = 1 / (sigma**2 + data**2).sqrt()
        x = scaled / c_in
        x0, _ = self.posterior(x, torch.ones_like(sigma), sigma)
        return (x0 - c_skip * x) / c_out


def cubature(dims: int) -> Tensor:
    """(2 dims, dims) points whose plain average of any quadratic is its expectation under N(0, I), exactly."""
    points = torch.eye(dims, dtype=torch.float64) * dims**0.5
    return torch.cat([points, -points])


def sampled(objective, net, start, *, null=None, spacing="", **options):
    """`sample` with the settings and the condition as keywords, and without clipping unless asked for."""
    names = {field.name for field in dataclasses.fields(SamplingSettings)}
    settings = SamplingSettings(**{"clip": False} | {name: options.pop(name) for name in names & options.keys()})
    return sample(objective, net, start, settings, null=null, spacing=spacing, **options)
