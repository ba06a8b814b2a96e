"""What the network predicts, the loss, and how a prediction becomes a denoised image.

Every prediction is one line: the target is p x_0 + q eps, with (p, q) a function of the noise level. Together with
x_t = alpha x_0 + sigma eps it is solved for x_0 and eps. EDM's preconditioning is one more row of the table.

Shapes: B samples; x_0, x_t, noise are (B, ...); t is (B,); per-sample factors are (B, 1, ..., 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scalelong.diffusion.process import EDM, Process, unknown
from scalelong.random import normal, uniform

Network = Callable[..., Tensor]  # net(x, time, **condition) -> prediction, shaped like x


def _edm_weights(process: Process, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Karras et al. 2022, Eq. 8: the target (x_0 - c_skip x_t) / c_out, written as p x_0 + q eps."""
    if not isinstance(process, EDM):
        raise TypeError(f"EDM's preconditioning needs the edm process, got {process!r}")
    total = (sigma.square() + process.sigma_data**2).sqrt()
    return sigma / (process.sigma_data * total), -process.sigma_data / total


@dataclass(frozen=True)
class Objective:
    """A process and what the network predicts in it: "noise", "x0" or "v"; EDM fixes it to "edm"."""

    process: Process
    prediction: str = ""  # empty: the process's default

    def __post_init__(self) -> None:
        allowed = self.process.predictions
        if not self.prediction:
            object.__setattr__(self, "prediction", allowed[0])
        if self.prediction not in allowed:
            raise unknown(f"diffusion.prediction (process {self.process.name})", self.prediction, allowed)

    def target_weights(self, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """(p, q) of the target p x_0 + q eps."""
        zero, one = torch.zeros_like(alpha), torch.ones_like(alpha)
        match self.prediction:
            case "noise":
                return zero, one
            case "x0":
                return one, zero
            case "v":
                return -sigma, alpha  # Salimans and Ho 2022, App. D
            case _:
                return _edm_weights(self.process, sigma)

    def loss(self, net: Network, x0: Tensor, noise: Tensor, t: Tensor, **condition: Any) -> Tensor:
        """(B,) mean squared error of the prediction.

        For EDM this is its weighted loss: lambda(sigma) c_out(sigma)^2 = 1, so no weight is left in the network's units.
        """
        alpha, sigma = self._marginal(t, x0)
        x0, noise = x0.float(), noise.float()
        p, q = self.target_weights(alpha, sigma)
        output = self._predict(net, alpha * x0 + sigma * noise, t, condition)
        return (output - (p * x0 + q * noise)).square().flatten(1).mean(dim=1)

    def denoise(self, net: Network, x_t: Tensor, t: Tensor, **condition: Any) -> tuple[Tensor, Tensor]:
        """(x0_hat, noise_hat), the network's guess at what x_t was made of.

        Where sigma is 0 the noise cannot be known, and where alpha is 0 the image cannot: that half is then no guess.
        """
        alpha, sigma = self._marginal(t, x_t)
        sigma = sigma.clamp(min=1e-12)
        x_t = x_t.float()
        p, q = self.target_weights(alpha, sigma)
        output = self._predict(net, x_t, t, condition)
        determinant = alpha * q - sigma * p
        return (q * x_t - sigma * output) / determinant, (alpha * output - p * x_t) / determinant

    def _marginal(self, t: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        alpha, sigma = self.process.marginal(t)
        return _per_sample(alpha, like), _per_sample(sigma, like)

    def _predict(self, net: Network, x_t: Tensor, t: Tensor, condition: dict[str, Any]) -> Tensor:
        """The network's output in float32; it is fed float32, and lower precision is left to autocast."""
        scale = _per_sample(self.process.input_scale(t), x_t)
        time = self.process.network_time(t)
        if time.is_floating_point():
            time = time.float()
        return net(scale * x_t, time, **condition).float()


def _per_sample(value: Tensor, like: Tensor) -> Tensor:
    return value.float().view(-1, *[1] * (like.ndim - 1))


def draw_time_and_noise(process: Process, seed: int, index: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(t, noise) of the samples `index` (B,): a function of seed and index alone. `shape` is that of one sample."""
    t = process.time_from_uniform(uniform(seed, "time", index))
    return t, normal(seed, "noise", index, shape)
