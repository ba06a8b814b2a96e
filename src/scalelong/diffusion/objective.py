"""Prediction targets, the loss, and conversion of predictions to denoised images.

Every target is p x_0 + q eps, which is solved for x_0 and eps together with x_t = alpha x_0 + sigma eps.
Shapes: B samples; x_0, x_t, noise are (B, ...); t is (B,); per-sample factors are (B, 1, ..., 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scalelong.diffusion.process import EDM, Process, per_sample
from scalelong.errors import unknown_name
from scalelong.random import normal, uniform

Network = Callable[..., Tensor]  # net(x, time, **condition) -> prediction, shaped like x


@dataclass(frozen=True)
class Objective:
    """A process and its prediction target: "noise", "x0", "v" or "flow"; for EDM always "edm".

    >>> from scalelong.diffusion import VPSDE
    >>> objective = Objective(VPSDE(), "noise")
    >>> t, noise = draw_time_and_noise(objective.process, 0, torch.arange(2), (3, 8, 8))
    >>> objective.loss(lambda x, time: torch.zeros_like(x), torch.zeros(2, 3, 8, 8), noise, t).shape
    torch.Size([2])
    """

    process: Process
    prediction: str = ""  # default: the process's own
    min_snr_gamma: float = 0.0  # gamma of min-SNR loss weighting (Hang et al. 2023 use 5); 0: off

    def __post_init__(self) -> None:
        allowed = self.process.predictions
        if not self.prediction:
            object.__setattr__(self, "prediction", allowed[0])
        if self.prediction not in allowed:
            raise unknown_name(f"diffusion.prediction (process {self.process.name})", self.prediction, allowed)

    def target_weights(self, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """(p, q) of the target p x_0 + q eps."""
        if isinstance(self.process, EDM):  # Karras et al. 2022, Eq. 8: (x_0 - c_skip x_t) / c_out
            data = self.process.sigma_data
            total = (sigma.square() + data**2).sqrt()
            return sigma / (data * total), -data / total
        zero, one = torch.zeros_like(alpha), torch.ones_like(alpha)
        v = (-sigma, alpha)  # Salimans and Ho 2022, App. D
        return {"noise": (zero, one), "x0": (one, zero), "v": v, "flow": (-one, one)}[self.prediction]

    def loss(self, net: Network, x0: Tensor, noise: Tensor, t: Tensor, **condition: Any) -> Tensor:
        """(B,) mean squared error of the prediction; for EDM its weighted loss, since lambda(sigma) c_out(sigma)^2 = 1."""
        x0, noise = x0.float(), noise.float()
        x_t, alpha, sigma = self.process.diffuse(x0, noise, t)
        p, q = self.target_weights(alpha, sigma)
        target = p * x0 + q * noise
        error = (self._predict(net, x_t, t, condition) - target).square().flatten(1).mean(dim=1)
        return error * self.loss_weight(alpha, sigma).flatten() if self.min_snr_gamma else error

    def loss_weight(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Min-SNR: the squared error of x_0 weighted by min(SNR, gamma), as a weight of the target's squared error.

        x0_hat is off by sigma / (alpha q - sigma p) times the target's error: min(1, gamma / SNR) for the noise.
        """
        p, q = self.target_weights(alpha, sigma)
        return torch.minimum(alpha.square(), self.min_snr_gamma * sigma.square()) / (alpha * q - sigma * p).square()

    def denoise(self, net: Network, x_t: Tensor, t: Tensor, **condition: Any) -> tuple[Tensor, Tensor]:
        """Estimates (x0_hat, noise_hat); x0_hat is arbitrary where alpha is 0, and noise_hat where sigma is 0."""
        alpha, sigma = (per_sample(factor.float(), x_t) for factor in self.process.marginal(t))
        sigma = sigma.clamp(min=1e-12)
        x_t = x_t.float()
        p, q = self.target_weights(alpha, sigma)
        output = self._predict(net, x_t, t, condition)
        determinant = alpha * q - sigma * p
        return (q * x_t - sigma * output) / determinant, (alpha * output - p * x_t) / determinant

    def _predict(self, net: Network, x_t: Tensor, t: Tensor, condition: dict[str, Any]) -> Tensor:
        """The network's output in float32; use autocast for lower precision."""
        return net(*self.process.network_input(x_t, t), **condition).float()


def draw_time_and_noise(process: Process, seed: int, index: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(t, noise) of the samples `index` (B,), a function of seed and index only; `shape` is the shape of one sample.

    >>> from scalelong.diffusion import VPSDE
    >>> t, noise = draw_time_and_noise(VPSDE(), seed=0, index=torch.arange(4), shape=(3, 8, 8))
    """
    t = process.time_from_uniform(uniform(seed, "time", index))
    return t, normal(seed, "noise", index, shape)
