"""Samplers: functions from noise to images; DDIM, DDPM and DPM-Solver++ use diffusers' schedulers.

Image i depends only on (seed, i): the starting noise and the noise of every step are read from the counter-based
streams "sample/start" and "sample/<step>" at the image's own index, so neither batch size nor ranks change it.

Shapes: B images; x is (B, ...); n steps; alpha and sigma are (n + 1,), noisiest first, the clean image (1, 0) last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from scalelong.diffusion.objective import Network, Objective
from scalelong.diffusion.process import DDPM, ContinuousVP, Process
from scalelong.errors import require, unknown_name
from scalelong.random import normal
from scalelong.runs.settings import SamplingSettings
from scalelong.runs.validation import check_values

Start = tuple[int, Tensor, Sequence[int]]  # (seed, index (B,), shape of one image)


@dataclass(frozen=True)
class Trajectory:
    """The input of a sampler: the grid of times, the denoiser at grid point i, and the noise of step i."""

    process: Process
    times: Tensor
    alpha: Tensor  # float64 on the CPU: used as scalars, without device syncs
    sigma: Tensor
    denoise: Callable[[Tensor, int], tuple[Tensor, Tensor]]  # (x, i) -> (x0_hat, noise_hat)
    noise: Callable[[int], Tensor]


def ddim(x: Tensor, path: Trajectory, eta: float = 0.0) -> Tensor:
    """Song et al. 2021 (DDIM), Eq. 12 and 16; eta = 1 is DDPM's ancestral sampling with the posterior variance."""
    return _run_scheduler("DDIMScheduler", x, path, eta, clip_sample=False, set_alpha_to_one=True)


def dpm_solver(x: Tensor, path: Trajectory, order: int) -> Tensor:
    """DPM-Solver++ (Lu et al. 2022), multistep, of order 2 or 3; the step to the clean image is of order 1.

    In diffusers' order 3 the second difference has half of its Taylor weight, so it too converges with order 2, at about
    0.4 times the error.
    """
    name = "DPMSolverMultistepScheduler"
    return _run_scheduler(name, x, path, algorithm_type="dpmsolver++", solver_order=order)


def heun(x: Tensor, path: Trajectory) -> Tensor:
    """Karras et al. 2022, Algorithm 1: d(x / alpha) = noise_hat d(sigma / alpha); order 2, the last step of order 1."""
    level, steps = path.sigma / path.alpha, len(path.times)
    for i in range(steps):
        y, step = x / path.alpha[i], level[i + 1] - level[i]
        _, noise = path.denoise(x, i)
        x = path.alpha[i + 1] * (y + step * noise)
        if i + 1 < steps:
            _, noise_next = path.denoise(x, i + 1)
            x = path.alpha[i + 1] * (y + step * 0.5 * (noise + noise_next))
    return x


def euler_maruyama(x: Tensor, path: Trajectory) -> Tensor:
    """The reverse SDE (Song et al. 2021, Eq. 6) with score = -noise_hat / sigma; the last step adds no noise."""
    beta = cast(ContinuousVP, path.process).beta(path.times)
    step = path.times - torch.cat([path.times[1:], path.times.new_zeros(1)])
    for i in range(len(step)):
        _, noise = path.denoise(x, i)
        x = x + step[i] * beta[i] * (0.5 * x - noise / path.sigma[i])
        if i + 1 < len(step):
            x = x + (step[i] * beta[i]).sqrt() * path.noise(i)
    return x


def _run_scheduler(name: str, x: Tensor, path: Trajectory, eta: float = 0.0, **options: Any) -> Tensor:
    """Sample with a diffusers scheduler whose n "training" steps are our n times, so no time is rounded.

    It is fed x0_hat, and works on x_t / sqrt(alpha^2 + sigma^2), which preserves variance for every process. From betas
    it computes alpha-bar in float32, where a sigma of 1e-4 becomes 0, so the float64 table is put back.
    """
    import diffusers  # slow to import, and not needed by the other samplers

    steps, scale = len(path.times), torch.hypot(path.alpha, path.sigma)
    alpha_bar = (path.alpha / scale).square().flip(0)  # from the clean image on
    scheduler = getattr(diffusers, name)(
        num_train_timesteps=steps,
        trained_betas=(1 - alpha_bar[1:] / alpha_bar[:-1]).tolist(),
        prediction_type="sample",
        timestep_spacing="trailing",
        **options,
    )
    scheduler.alphas_cumprod = alpha_bar[1:]
    scheduler.set_timesteps(steps)
    for i, t in enumerate(scheduler.timesteps):
        x0, _ = path.denoise(x, i)
        noise = {"eta": eta, "variance_noise": path.noise(i)} if eta else {}
        x = scale[i + 1] * scheduler.step(x0, t, x / scale[i], **noise).prev_sample
    return x


@dataclass(frozen=True)
class Sampler:
    """A sampler and its defaults."""

    run: Callable[[Tensor, Trajectory], Tensor]
    steps: int
    spacing: str = "time"  # if the process supports it
    stochastic: bool = False


# Spacing: on Gaussian data with variances 0.02 to 2, 50 steps of dpm++2m in the VP-SDE are off by at most 0.5% in
# variance with "snr" and by 35% with "time"; heun by 1.0% and 4.6%.
SAMPLERS = {
    "ddpm": Sampler(lambda x, path: ddim(x, path, eta=1.0), steps=1000, stochastic=True),
    "ddim": Sampler(ddim, steps=50),
    "dpm++2m": Sampler(lambda x, path: dpm_solver(x, path, order=2), steps=50, spacing="snr"),
    "dpm++3m": Sampler(lambda x, path: dpm_solver(x, path, order=3), steps=50, spacing="snr"),
    "heun": Sampler(heun, steps=18, spacing="snr"),
    "euler_maruyama": Sampler(euler_maruyama, steps=1000, stochastic=True),
}


def resolve_sampling(settings: SamplingSettings, process: Process) -> SamplingSettings:
    """Fill in the sampler and its number of steps; raise a ValueError that names the key if they are invalid.

    The default is Heun for EDM, as in its paper, and DPM-Solver++ of order 2 for the others.

    >>> from scalelong.diffusion import VPSDE
    >>> resolve_sampling(SamplingSettings("heun"), VPSDE()).steps
    18
    """
    check_values("sampling", settings)
    name = settings.sampler or ("heun" if process.name == "edm" else "dpm++2m")
    low, high = settings.guidance_interval
    if name not in SAMPLERS:
        raise unknown_name("sampling.sampler", name, SAMPLERS)
    if name == "euler_maruyama" and not isinstance(process, ContinuousVP):
        raise ValueError(f"sampling.sampler: {name} needs continuous time (vp, cosine), got {process.name!r}; use ddpm")
    require(settings.skip_tuning > 0, "sampling.skip_tuning", "in (0, 2] (1: none)", settings.skip_tuning)
    require(low < high, "sampling.guidance_interval", "0 <= low < high", (low, high))
    usual = min(SAMPLERS[name].steps, process.num_steps) if isinstance(process, DDPM) else SAMPLERS[name].steps
    return dataclasses.replace(settings, sampler=name, steps=settings.steps or usual)


def sample(
    objective: Objective,
    net: Network,
    start: Tensor | Start,  # N(0, 1) noise (B, ...), or (seed, index, shape) to draw it
    settings: SamplingSettings | None = None,
    *,
    null: Mapping[str, Tensor] | None = None,  # the null condition of one sample (1, ...), for guidance
    step_noise: Callable[[int], Tensor] | None = None,  # (step) -> N(0, 1); default: drawn by seed and index
    spacing: str = "",  # of the times; default: "snr" for DPM-Solver++ and Heun, else the process's own
    **condition: Any,
) -> Tensor:
    """Sample images (B, ...) in float32. With (seed, index, shape), image i is a function of (seed, i) only.

    >>> from scalelong.diffusion import VPSDE
    >>> settings = SamplingSettings("ddim", steps=10)
    >>> sample(Objective(VPSDE(), "x0"), lambda x, time: 0 * x, (0, torch.arange(4), (1, 8, 8)), settings).shape
    torch.Size([4, 1, 8, 8])
    """
    process = objective.process
    settings = resolve_sampling(settings or SamplingSettings(), process)
    sampler = SAMPLERS[settings.sampler]
    if not spacing and sampler.spacing in process.spacings:
        spacing = sampler.spacing
    if not isinstance(start, Tensor):
        seed, index, shape = start
        x = normal(seed, "sample/start", index, shape)
    elif sampler.stochastic and step_noise is None:
        raise ValueError(f"start: {settings.sampler} draws noise at every step; pass (seed, index, shape)")
    else:
        x = start.float()
    times = process.sampling_times(settings.steps, spacing)
    alpha, sigma = process.marginal(times.double())
    if settings.guidance != 1 and null is None:
        raise ValueError(f"sampling.guidance: {settings.guidance} needs a null condition; pass null=, or leave it at 1")
    guided_net = guided(net, null or {}, settings.guidance)
    low, high = settings.guidance_interval  # of noise levels (Kynkaanniemi et al. 2024)
    nets = [guided_net if low <= level <= high else net for level in (sigma / alpha).tolist()]
    times_on_device = times.to(x.device, torch.float32)

    def denoise(x: Tensor, i: int) -> tuple[Tensor, Tensor]:
        t = times_on_device[i].expand(x.shape[0])
        x0, noise = objective.denoise(nets[i], x, t, **condition)
        if settings.clip:
            alpha, sigma = process.marginal(t[:1])
            x0 = x0.clamp(-1, 1)
            noise = (x - alpha * x0) / sigma
        return x0, noise

    grid = times, torch.cat([alpha, alpha.new_ones(1)]), torch.cat([sigma, sigma.new_zeros(1)])
    noise = step_noise or (lambda i: normal(seed, f"sample/{i}", index, shape))
    path = Trajectory(process, *grid, denoise, noise)
    with torch.no_grad():
        return sampler.run(x * process.prior_std, path)


def guided(net: Network, null: Mapping[str, Tensor], scale: float) -> Network:
    """Classifier-free guidance (Ho and Salimans 2022): null + scale * (conditional - null) in one doubled batch.

    Returns `net` itself for scale 1. `null` is the null condition of one sample, tensors of (1, ...).

    >>> net = guided(lambda x, time, label: x * label, {"label": torch.zeros(1)}, scale=2.0)
    >>> net(torch.ones(1), torch.ones(1), label=torch.ones(1))
    tensor([2.])
    """
    if scale == 1:
        return net

    def call(x: Tensor, time: Tensor, **condition: Tensor) -> Tensor:
        both = {name: torch.cat([value, null[name].to(value).expand_as(value)]) for name, value in condition.items()}
        conditional, unconditional = net(torch.cat([x, x]), torch.cat([time, time]), **both).float().chunk(2)
        return unconditional + scale * (conditional - unconditional)

    return call
