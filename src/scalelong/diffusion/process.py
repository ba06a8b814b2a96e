"""Forward processes: x_t = alpha(t) x_0 + sigma(t) eps.

A process has its own time t: the index 0..T-1 for DDPM, sigma for EDM, [0, 1] for the others.
Schedules are computed in float32 (float64 when t is float64), never lower. Shapes: t, u, alpha, sigma are (B,).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from scalelong.errors import require, unknown_name

TIME_SCALE = 999.0  # the network's time input is t * 999 for continuous t
LAST_TIME = 1e-3  # last network evaluation of continuous-time samplers before the step to t = 0


def _real(t: Tensor) -> Tensor:
    """Convert t to float32 unless it is float64."""
    return t if t.dtype == torch.float64 else t.float()


def per_sample(value: Tensor, like: Tensor) -> Tensor:
    """(B,) factors as (B, 1, ..., 1), to multiply `like` (B, ...)."""
    return value.view(-1, *[1] * (like.ndim - 1))


class Process(ABC):
    """The forward noising process, and the times at which it is trained and sampled.

    >>> x_t, alpha, sigma = VPSDE().diffuse(torch.ones(2, 3), torch.zeros(2, 3), torch.tensor([0.0, 1.0]))
    >>> [round(value, 4) for value in x_t[:, 0].tolist()]
    [1.0, 0.0066]
    """

    name: ClassVar[str]
    predictions: ClassVar[tuple[str, ...]] = ("noise", "x0", "v")  # of the network; the first is the default
    spacings: ClassVar[tuple[str, ...]] = ("time", "snr")  # of the sampling times; the first is the default

    @abstractmethod
    def marginal(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """(alpha, sigma) of x_t = alpha x_0 + sigma eps."""

    @abstractmethod
    def time_from_uniform(self, u: Tensor) -> Tensor:
        """The training time at quantile u in [0, 1)."""

    @abstractmethod
    def network_time(self, t: Tensor) -> Tensor:
        """The time input of the network."""

    @abstractmethod
    def sampling_times(self, steps: int, spacing: str = "") -> Tensor:
        """(steps,) times, noisiest first, at which a sampler evaluates the network; the last step ends at the image.

        Spacing "time" is even in t, "snr" in log(alpha / sigma), "karras" as in EDM. Default: the first of `spacings`.
        """

    @property
    def prior_std(self) -> float:
        """Standard deviation of the noise that sampling starts from."""
        return 1.0

    def input_scale(self, t: Tensor) -> Tensor:
        """The network sees input_scale * x_t (EDM's c_in; 1 for the others)."""
        return torch.ones_like(_real(t))

    def diffuse(self, x0: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(x_t, alpha, sigma): the noisy samples, and their factors as (B, 1, ..., 1)."""
        alpha, sigma = (per_sample(factor, x0) for factor in self.marginal(t))
        return alpha * x0 + sigma * noise, alpha, sigma

    def network_input(self, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Network inputs (x, time) in float32; the index of a discrete process stays an integer."""
        time = self.network_time(t)
        scaled = per_sample(self.input_scale(t), x_t) * x_t
        return scaled.float(), time.float() if time.is_floating_point() else time

    def _check_spacing(self, spacing: str) -> str:
        spacing = spacing or self.spacings[0]
        if spacing not in self.spacings:
            raise unknown_name(f"sampling.spacing (process {self.name})", spacing, self.spacings)
        return spacing

    def _spaced(self, start: float, stop: float, steps: int, spacing: str, fine: int) -> Tensor:
        """(steps,) real times from `start` to `stop`; "snr" is interpolated on a grid of `fine` times."""
        by_snr = self._check_spacing(spacing) == "snr"
        times = torch.linspace(start, stop, fine if by_snr else steps, dtype=torch.float64)
        if not by_snr:
            return times
        alpha, sigma = self.marginal(times)
        log_snr = (alpha / sigma).log().numpy()
        even = np.linspace(log_snr[0], log_snr[-1], steps)
        return torch.from_numpy(np.interp(even, log_snr, times.numpy()))

    def mean_alpha_bar(self) -> float:
        """E_t[alpha_t^2] over training times (Lemma 3.2), by the midpoint rule."""
        u = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
        alpha, _ = self.marginal(self.time_from_uniform(u).double())
        return float(alpha.square().mean())


class Continuous(Process):
    """Processes in continuous time t in [0, 1], uniform in training."""

    start_time: ClassVar[float] = 1.0  # where sampling starts

    def time_from_uniform(self, u: Tensor) -> Tensor:
        return u.clamp(max=1 - 2.0**-24).float()  # the largest float32 below 1; at 1, flow and cosine have no signal

    def network_time(self, t: Tensor) -> Tensor:
        return _real(t) * TIME_SCALE

    def sampling_times(self, steps: int, spacing: str = "") -> Tensor:
        return self._spaced(self.start_time, LAST_TIME, steps, spacing, fine=10_001)


class ContinuousVP(Continuous):
    """Variance-preserving processes in continuous time, dx = -beta(t)/2 x dt + sqrt(beta(t)) dw."""

    @abstractmethod
    def beta(self, t: Tensor) -> Tensor:
        """beta(t) = -d log(alpha^2) / dt."""


@dataclass(frozen=True)
class VPSDE(ContinuousVP):
    """Song et al. 2021, Eq. 32-33: beta(t) is linear, so log alpha is a parabola.

    >>> alpha, sigma = VPSDE(beta_max=10.0).marginal(torch.tensor([0.5]))
    """

    beta_min: float = 0.1
    beta_max: float = 20.0
    name: ClassVar[str] = "vp"

    def __post_init__(self) -> None:
        require(self.beta_min > 0, "diffusion.process.beta_min", "positive", self.beta_min)
        require(self.beta_max >= self.beta_min, "diffusion.process.beta_max", "at least beta_min", self.beta_max)

    def beta(self, t: Tensor) -> Tensor:
        return self.beta_min + (self.beta_max - self.beta_min) * _real(t)

    def marginal(self, t: Tensor) -> tuple[Tensor, Tensor]:
        t = _real(t)
        log_alpha = -0.25 * (self.beta_max - self.beta_min) * t.square() - 0.5 * self.beta_min * t
        return log_alpha.exp(), (-torch.expm1(2 * log_alpha)).sqrt()


@dataclass(frozen=True)
class Cosine(ContinuousVP):
    """Nichol and Dhariwal 2021, Eq. 17: alpha = cos(a) / cos(a_0), a = pi/2 (t + offset) / (1 + offset), a_0 = a(t=0).

    >>> alpha, sigma = Cosine().marginal(torch.tensor([0.5]))
    """

    offset: float = 0.008
    name: ClassVar[str] = "cosine"
    start_time: ClassVar[float] = 0.9946  # alpha is 0.0084; at t = 1 it is 0, and the noise does not determine x_0

    def __post_init__(self) -> None:
        require(self.offset >= 0, "diffusion.process.offset", "zero or more", self.offset)

    @property
    def _rate(self) -> float:
        return 0.5 * math.pi / (1 + self.offset)

    def beta(self, t: Tensor) -> Tensor:
        return 2 * self._rate * torch.tan(self._rate * (_real(t) + self.offset))

    def marginal(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """cos a = sin(pi/2 - a) keeps the digits near t = 1, cos^2 a_0 - cos^2 a = sin(a - a_0) sin(a + a_0) near t = 0."""
        t, cos_a0 = _real(t), math.cos(self._rate * self.offset)
        sigma = (torch.sin(self._rate * t) * torch.sin(self._rate * (t + 2 * self.offset))).sqrt()
        return torch.sin(self._rate * (1 - t)) / cos_a0, sigma / cos_a0


@lru_cache(maxsize=32)
def _ddpm_marginals(num_steps: int, beta_start: float, beta_end: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """(alpha, sigma) at every index, (T,) float64 each, cached on the device."""
    beta = torch.linspace(beta_start, beta_end, num_steps, dtype=torch.float64)
    alpha_bar = torch.cumprod(1 - beta, dim=0)
    return alpha_bar.sqrt().to(device), (1 - alpha_bar).sqrt().to(device)


@dataclass(frozen=True)
class DDPM(Process):
    """Ho et al. 2020: T discrete steps, beta linear. Time is the index 0..T-1; index 0 has been noised once.

    >>> alpha, sigma = DDPM(num_steps=100).marginal(torch.tensor([0, 99]))
    """

    num_steps: int = 1000
    beta_start: float = 1e-4
    beta_end: float = 0.02
    name: ClassVar[str] = "ddpm"

    def __post_init__(self) -> None:
        require(self.num_steps >= 1, "diffusion.process.num_steps", "at least 1", self.num_steps)
        require(0 < self.beta_start < 1, "diffusion.process.beta_start", "in (0, 1)", self.beta_start)
        require(self.beta_start <= self.beta_end < 1, "diffusion.process.beta_end", "in [beta_start, 1)", self.beta_end)

    def marginal(self, t: Tensor) -> tuple[Tensor, Tensor]:
        alpha, sigma = _ddpm_marginals(self.num_steps, self.beta_start, self.beta_end, t.device)
        dtype, index = _real(t).dtype, t.long()
        return alpha[index].to(dtype), sigma[index].to(dtype)

    def time_from_uniform(self, u: Tensor) -> Tensor:
        return (u * self.num_steps).long().clamp(max=self.num_steps - 1)

    def network_time(self, t: Tensor) -> Tensor:
        return t.long()

    def sampling_times(self, steps: int, spacing: str = "") -> Tensor:
        """Rounded indices; duplicates are resolved by moving the noisier one up."""
        require(steps <= self.num_steps, "sampling.steps", f"at most {self.num_steps}, the steps of the process", steps)
        times, rank = self._spaced(self.num_steps - 1, 0, steps, spacing, fine=self.num_steps), torch.arange(steps)
        distinct = (times.round().long().flip(0) - rank).cummax(0).values.clamp(max=self.num_steps - steps) + rank
        return distinct.flip(0)


@dataclass(frozen=True)
class EDM(Process):
    """Karras et al. 2022: alpha = 1 and time is sigma, log-normal in training. Network and loss are preconditioned.

    >>> EDM(sigma_max=40.0).prior_std
    40.0
    """

    sigma_data: float = 0.5
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0
    p_mean: float = -1.2
    p_std: float = 1.2
    name: ClassVar[str] = "edm"
    predictions: ClassVar[tuple[str, ...]] = ("edm",)
    spacings: ClassVar[tuple[str, ...]] = ("karras",)

    def __post_init__(self) -> None:
        for key in ("sigma_data", "sigma_min", "rho", "p_std"):
            require(getattr(self, key) > 0, f"diffusion.process.{key}", "positive", getattr(self, key))
        require(self.sigma_max > self.sigma_min, "diffusion.process.sigma_max", "above sigma_min", self.sigma_max)

    @property
    def prior_std(self) -> float:
        return self.sigma_max

    def marginal(self, t: Tensor) -> tuple[Tensor, Tensor]:
        sigma = _real(t)
        return torch.ones_like(sigma), sigma

    def time_from_uniform(self, u: Tensor) -> Tensor:
        """Table 1: ln sigma ~ N(p_mean, p_std^2), by the inverse of the normal distribution function."""
        inside = u.double().clamp(2.0**-54, 1 - 2.0**-53)  # ndtri is infinite at 0 and at 1
        return torch.exp(self.p_mean + self.p_std * torch.special.ndtri(inside)).float()

    def network_time(self, t: Tensor) -> Tensor:
        return _real(t).log() / 4  # Table 1: c_noise

    def input_scale(self, t: Tensor) -> Tensor:
        return (_real(t).square() + self.sigma_data**2).rsqrt()  # Table 1: c_in

    def sampling_times(self, steps: int, spacing: str = "") -> Tensor:
        self._check_spacing(spacing)
        ramp = torch.linspace(0, 1, steps, dtype=torch.float64)
        high, low = self.sigma_max ** (1 / self.rho), self.sigma_min ** (1 / self.rho)
        return torch.pow(high + ramp * (low - high), self.rho)  # Eq. 5


@dataclass(frozen=True)
class Flow(Continuous):
    """Flow matching on straight lines (Lipman et al. 2023; Liu et al. 2023): x_t = (1 - t) x_0 + t eps, target eps - x_0.

    >>> alpha, sigma = Flow().marginal(torch.tensor([0.25]))
    """

    name: ClassVar[str] = "flow"
    predictions: ClassVar[tuple[str, ...]] = ("flow", "noise", "x0")
    start_time: ClassVar[float] = 1 - LAST_TIME  # at t = 1 the noise level sigma / alpha is infinite

    def marginal(self, t: Tensor) -> tuple[Tensor, Tensor]:
        t = _real(t)
        return 1 - t, t


PROCESSES: dict[str, type[Process]] = {cls.name: cls for cls in (VPSDE, DDPM, Cosine, EDM, Flow)}


def get_process(name: str) -> Process:
    """The process called `name` ("vp", "ddpm", "cosine", "edm" or "flow"); for other constants call its class.

    >>> get_process("vp")
    VPSDE(beta_min=0.1, beta_max=20.0)
    """
    if name not in PROCESSES:
        raise unknown_name("diffusion.process", name, PROCESSES)
    return PROCESSES[name]()
