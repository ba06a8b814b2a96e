"""How noise is added to an image: x_t = alpha(t) x_0 + sigma(t) eps.

A process has its own time t: [0, 1] for the VP-SDE and the cosine schedule, the index 0..T-1 for DDPM, sigma for EDM.
Schedules are computed in float32 (float64 when t is float64), never lower, whatever autocast says.

Shapes: B samples; t, u, alpha, sigma are (B,).
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from scalelong.errors import unknown_name

TIME_SCALE = 999.0  # the network's time input is t * 999 for continuous t
LAST_TIME = 1e-3  # the last time at which samplers in continuous time evaluate the network; then they step to t = 0


def _require(holds: bool, key: str, rule: str, value: object) -> None:
    if not holds:
        raise ValueError(f"diffusion.process.{key}: must be {rule}, got {value!r}")


def _real(t: Tensor) -> Tensor:
    """t as float64 if it is that already, else as float32."""
    return t if t.dtype == torch.float64 else t.float()


def per_sample(value: Tensor, like: Tensor) -> Tensor:
    """(B,) factors as (B, 1, ..., 1), to multiply `like` (B, ...)."""
    return value.view(-1, *[1] * (like.ndim - 1))


class Process(ABC):
    """The forward noising process, and the times at which it is trained and sampled."""

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

        Spacing "time" is even in t, "snr" in log(alpha / sigma); EDM has its own, "karras". Default: the first allowed.
        """

    @property
    def prior_std(self) -> float:
        """Standard deviation of the noise that sampling starts from."""
        return 1.0

    def input_scale(self, t: Tensor) -> Tensor:
        """The network sees input_scale * x_t (EDM's c_in; 1 for the others)."""
        return torch.ones_like(_real(t))

    def diffuse(self, x0: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(x_t, alpha, sigma): the noisy samples, and their factors as (B, 1, ..., 1).

        >>> x_t, alpha, sigma = VPSDE().diffuse(torch.ones(2, 3), torch.zeros(2, 3), torch.tensor([0.0, 1.0]))
        >>> [round(value, 4) for value in x_t[:, 0].tolist()]
        [1.0, 0.0066]
        """
        alpha, sigma = (per_sample(factor, x0) for factor in self.marginal(t))
        return alpha * x0 + sigma * noise, alpha, sigma

    def network_input(self, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """(x, time) as the network takes them, in float32; the index of a discrete process stays an integer."""
        time = self.network_time(t)
        scaled = per_sample(self.input_scale(t), x_t) * x_t
        return scaled.float(), time.float() if time.is_floating_point() else time

    def _check_spacing(self, spacing: str) -> str:
        spacing = spacing or self.spacings[0]
        if spacing not in self.spacings:
            raise unknown_name(f"sampling.spacing (process {self.name})", spacing, self.spacings)
        return spacing

    def _even_in_log_snr(self, times: Tensor, steps: int) -> Tensor:
        """(steps,) real times from times[0] to times[-1], even in log(alpha / sigma), which must rise along `times`."""
        alpha, sigma = self.marginal(times)
        log_snr = (alpha / sigma).log().numpy()
        even = np.linspace(log_snr[0], log_snr[-1], steps)
        return torch.from_numpy(np.interp(even, log_snr, times.numpy()))

    def mean_alpha_bar(self, points: int = 100_000) -> float:
        """E_t[alpha_t^2] over training times (Lemma 3.2), by the midpoint rule."""
        u = (torch.arange(points, dtype=torch.float64) + 0.5) / points
        alpha, _ = self.marginal(self.time_from_uniform(u).double())
        return float(alpha.square().mean())


class ContinuousVP(Process):
    """Variance-preserving processes in continuous time, dx = -beta(t)/2 x dt + sqrt(beta(t)) dw."""

    start_time: ClassVar[float] = 1.0  # where sampling starts

    @abstractmethod
    def beta(self, t: Tensor) -> Tensor:
        """beta(t) = -d log(alpha^2) / dt."""

    def time_from_uniform(self, u: Tensor) -> Tensor:
        return u.float()

    def network_time(self, t: Tensor) -> Tensor:
        return _real(t) * TIME_SCALE

    def sampling_times(self, steps: int, spacing: str = "") -> Tensor:
        by_snr = self._check_spacing(spacing) == "snr"
        times = torch.linspace(self.start_time, LAST_TIME, 10_001 if by_snr else steps, dtype=torch.float64)
        return self._even_in_log_snr(times, steps) if by_snr else times


@dataclass(frozen=True)
class VPSDE(ContinuousVP):
    """Song et al. 2021, Eq. 32-33: beta(t) is linear, so log alpha is a parabola."""

    beta_min: float = 0.1
    beta_max: float = 20.0
    name: ClassVar[str] = "vp"

    def __post_init__(self) -> None:
        _require(self.beta_min > 0, "beta_min", "positive", self.beta_min)
        _require(self.beta_max >= self.beta_min, "beta_max", f"at least beta_min = {self.beta_min}", self.beta_max)

    def beta(self, t: Tensor) -> Tensor:
        return self.beta_min + (self.beta_max - self.beta_min) * _real(t)

    def marginal(self, t: Tensor) -> tuple[Tensor, Tensor]:
        t = _real(t)
        log_alpha = -0.25 * (self.beta_max - self.beta_min) * t.square() - 0.5 * self.beta_min * t
        return log_alpha.exp(), (-torch.expm1(2 * log_alpha)).sqrt()


@dataclass(frozen=True)
class Cosine(ContinuousVP):
    """Nichol and Dhariwal 2021, Eq. 17: alpha = cos(a) / cos(a_0), a = pi/2 (t + offset) / (1 + offset), a_0 = a(t=0).

    alpha is 0 at t = 1, where a predicted noise says nothing about x_0. Sampling therefore starts at t = 0.9946, where
    alpha is 0.0084, near the VP-SDE's last 0.0066; the paper clips beta instead.
    """

    offset: float = 0.008
    name: ClassVar[str] = "cosine"
    start_time: ClassVar[float] = 0.9946

    def __post_init__(self) -> None:
        _require(self.offset >= 0, "offset", "zero or more", self.offset)

    @property
    def _rate(self) -> float:
        return 0.5 * math.pi / (1 + self.offset)

    def beta(self, t: Tensor) -> Tensor:
        return 2 * self._rate * torch.tan(self._rate * (_real(t) + self.offset))

    def marginal(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """cos a = sin(pi/2 - a) keeps the digits near t = 1, cos^2 a_0 - cos^2 a = sin(a - a_0) sin(a + a_0) near t = 0."""
        t = _real(t)
        cos_a0 = math.cos(self._rate * self.offset)
        alpha = torch.sin(self._rate * (1 - t)) / cos_a0
        sigma = (torch.sin(self._rate * t) * torch.sin(self._rate * (t + 2 * self.offset))).sqrt() / cos_a0
        return alpha, sigma


@lru_cache(maxsize=32)
def _ddpm_marginals(num_steps: int, beta_start: float, beta_end: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """(alpha, sigma) at every index, (T,) float64 each, cached on the device."""
    beta = torch.linspace(beta_start, beta_end, num_steps, dtype=torch.float64)
    alpha_bar = torch.cumprod(1 - beta, dim=0)
    return alpha_bar.sqrt().to(device), (1 - alpha_bar).sqrt().to(device)


@dataclass(frozen=True)
class DDPM(Process):
    """Ho et al. 2020: T discrete steps, beta linear. Time is the index 0..T-1; index 0 has been noised once."""

    num_steps: int = 1000
    beta_start: float = 1e-4
    beta_end: float = 0.02
    name: ClassVar[str] = "ddpm"

    def __post_init__(self) -> None:
        _require(self.num_steps >= 1, "num_steps", "at least 1", self.num_steps)
        _require(0 < self.beta_start < 1, "beta_start", "in (0, 1)", self.beta_start)
        _require(self.beta_start <= self.beta_end < 1, "beta_end", "in [beta_start, 1)", self.beta_end)

    def marginal(self, t: Tensor) -> tuple[Tensor, Tensor]:
        alpha, sigma = _ddpm_marginals(self.num_steps, self.beta_start, self.beta_end, t.device)
        dtype, index = _real(t).dtype, t.long()
        return alpha[index].to(dtype), sigma[index].to(dtype)

    def time_from_uniform(self, u: Tensor) -> Tensor:
        return (u * self.num_steps).long().clamp(max=self.num_steps - 1)

    def network_time(self, t: Tensor) -> Tensor:
        return t.long()

    def sampling_times(self, steps: int, spacing: str = "") -> Tensor:
        """Indices are rounded; where that makes two equal, the noisier one moves up."""
        if steps > self.num_steps:
            raise ValueError(
                f"sampling.steps: got {steps}, but the process has only {self.num_steps}; use at most that many"
            )
        by_snr = self._check_spacing(spacing) == "snr"
        times = torch.linspace(self.num_steps - 1, 0, self.num_steps if by_snr else steps, dtype=torch.float64)
        if by_snr:
            times = self._even_in_log_snr(times, steps)
        rank = torch.arange(steps)
        distinct = (times.round().long().flip(0) - rank).cummax(0).values.clamp(max=self.num_steps - steps) + rank
        return distinct.flip(0)


@dataclass(frozen=True)
class EDM(Process):
    """Karras et al. 2022: alpha = 1 and time is sigma, log-normal in training. Network and loss are preconditioned."""

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
            _require(getattr(self, key) > 0, key, "positive", getattr(self, key))
        _require(self.sigma_max > self.sigma_min, "sigma_max", f"above sigma_min = {self.sigma_min}", self.sigma_max)

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
        """Table 1: c_noise = ln(sigma) / 4."""
        return _real(t).log() / 4

    def input_scale(self, t: Tensor) -> Tensor:
        """Table 1: c_in = 1 / sqrt(sigma^2 + sigma_data^2)."""
        return (_real(t).square() + self.sigma_data**2).rsqrt()

    def sampling_times(self, steps: int, spacing: str = "") -> Tensor:
        """Eq. 5."""
        self._check_spacing(spacing)
        ramp = torch.linspace(0, 1, steps, dtype=torch.float64)
        high, low = self.sigma_max ** (1 / self.rho), self.sigma_min ** (1 / self.rho)
        return torch.pow(high + ramp * (low - high), self.rho)


PROCESSES: dict[str, type[Process]] = {cls.name: cls for cls in (VPSDE, DDPM, Cosine, EDM)}


def get_process(name: str, **options: Any) -> Process:
    """The process called `name` ("vp", "ddpm", "cosine" or "edm"), with its own options.

    >>> get_process("vp", beta_max=10.0)
    VPSDE(beta_min=0.1, beta_max=10.0)
    """
    if name not in PROCESSES:
        raise unknown_name("diffusion.process", name, PROCESSES)
    cls = PROCESSES[name]
    allowed = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for option in options:
        if option not in allowed:
            raise unknown_name(f"diffusion.process ({name}) option", option, allowed)
    return cls(**options)
