"""From noise to images: samplers as plain functions, with diffusers' schedulers for DDIM, DDPM and DPM-Solver++.

Image i depends only on (seed, i): the starting noise and the noise of every step are read from the counter-based
streams "sample/start" and "sample/<step>" at the image's own index, so neither batch size nor ranks change it.

Shapes: B images; x is (B, ...); n steps; alpha and sigma are (n + 1,), noisiest first, the clean image (1, 0) last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler
from torch import Tensor

from scalelong.diffusion.guidance import Guidance
from scalelong.diffusion.objective import Network, Objective
from scalelong.diffusion.process import DDPM, ContinuousVP, Process, unknown
from scalelong.random import normal

Draw = tuple[int, Tensor, Sequence[int]]  # (seed, index (B,), shape of one image)
Progress = Callable[[int, int], None]  # progress(steps done, steps in all)


@dataclass(frozen=True)
class Run:
    """What every sampler is given: the grid, the denoiser at grid point i, and the noise of step i."""

    process: Process
    times: Tensor
    alpha: Tensor  # float64 on the CPU: its entries act as scalars, so no step waits for the device
    sigma: Tensor
    eta: float
    denoise: Callable[[Tensor, int], tuple[Tensor, Tensor]]  # (x, i) -> (x0_hat, noise_hat)
    noise: Callable[[int], Tensor]
    done: Callable[[int], None]

    @property
    def steps(self) -> int:
        return len(self.times)


def ddim(x: Tensor, run: Run, eta: float) -> Tensor:
    """Song et al. 2021 (DDIM), Eq. 12 and 16; eta = 1 is DDPM's ancestral sampling with the posterior variance."""
    scheduler, scale = _scheduler(DDIMScheduler, run, clip_sample=False, set_alpha_to_one=True)
    for i, t in enumerate(scheduler.timesteps):
        x0, _ = run.denoise(x, i)
        noise = run.noise(i) if eta > 0 else None
        x = scale[i + 1] * scheduler.step(x0, t, x / scale[i], eta=eta, variance_noise=noise).prev_sample
        run.done(i)
    return x


def dpm_solver(x: Tensor, run: Run, order: int) -> Tensor:
    """DPM-Solver++ (Lu et al. 2022), multistep, of order 2 or 3; the step to the clean image is of order 1.

    Order 3 as diffusers has it gives the second difference half of its Taylor weight, so it too converges with order 2,
    at about 0.4 times the error.
    """
    scheduler, scale = _scheduler(DPMSolverMultistepScheduler, run, algorithm_type="dpmsolver++", solver_order=order)
    for i, t in enumerate(scheduler.timesteps):
        x0, _ = run.denoise(x, i)
        x = scale[i + 1] * scheduler.step(x0, t, x / scale[i]).prev_sample
        run.done(i)
    return x


def heun(x: Tensor, run: Run) -> Tensor:
    """Karras et al. 2022, Algorithm 1: d(x / alpha) = noise_hat d(sigma / alpha); order 2, the last step of order 1."""
    level = run.sigma / run.alpha
    for i in range(run.steps):
        y, step = x / run.alpha[i], level[i + 1] - level[i]
        _, noise = run.denoise(x, i)
        x = run.alpha[i + 1] * (y + step * noise)
        if i + 1 < run.steps:
            _, noise_next = run.denoise(x, i + 1)
            x = run.alpha[i + 1] * (y + step * 0.5 * (noise + noise_next))
        run.done(i)
    return x


def euler_maruyama(x: Tensor, run: Run) -> Tensor:
    """The reverse SDE (Song et al. 2021, Eq. 6) with score = -noise_hat / sigma; the last step adds no noise."""
    beta = cast(ContinuousVP, run.process).beta(run.times)
    step = run.times - torch.cat([run.times[1:], run.times.new_zeros(1)])
    for i in range(run.steps):
        _, noise = run.denoise(x, i)
        x = x + step[i] * beta[i] * (0.5 * x - noise / run.sigma[i])
        if i + 1 < run.steps:
            x = x + (step[i] * beta[i]).sqrt() * run.noise(i)
        run.done(i)
    return x


def _scheduler(cls: type, run: Run, **options: Any) -> tuple[Any, Tensor]:
    """A diffusers scheduler whose training grid is the sampling grid, and (n + 1,) factors from its images to ours.

    Its n "training" steps are exactly our n times, so no time is rounded and any n works. It is fed x0_hat, and works
    on x_t / sqrt(alpha^2 + sigma^2), which preserves variance for every process. From betas it forms alpha-bar in
    float32, where a sigma of 0.01 keeps four digits and one of 1e-4 becomes 0; the float64 table is put back, and then
    the rounding of the images to float32 is the only error.
    """
    scale = torch.hypot(run.alpha, run.sigma)
    alpha_bar = (run.alpha / scale).square().flip(0)  # from the clean image on
    scheduler = cls(
        num_train_timesteps=run.steps,
        trained_betas=(1 - alpha_bar[1:] / alpha_bar[:-1]).tolist(),
        prediction_type="sample",
        timestep_spacing="trailing",
        **options,
    )
    scheduler.alphas_cumprod = alpha_bar[1:]
    scheduler.set_timesteps(run.steps)
    return scheduler, scale


@dataclass(frozen=True)
class _Sampler:
    run: Callable[[Tensor, Run], Tensor]
    steps: int  # by default
    spacing: str = "time"  # preferred, where the process has it
    stochastic: bool = False


# Spacing: on Gaussian data with variances 0.02 to 2, 50 steps of dpm++2m in the VP-SDE are off by at most 0.5% in
# variance with "snr" and by 35% with "time"; heun by 1.0% and 4.6%.
_SAMPLERS = {
    "ddpm": _Sampler(lambda x, run: ddim(x, run, eta=1.0), steps=1000, stochastic=True),
    "ddim": _Sampler(lambda x, run: ddim(x, run, eta=run.eta), steps=50),
    "dpm++2m": _Sampler(lambda x, run: dpm_solver(x, run, order=2), steps=50, spacing="snr"),
    "dpm++3m": _Sampler(lambda x, run: dpm_solver(x, run, order=3), steps=50, spacing="snr"),
    "heun": _Sampler(heun, steps=18, spacing="snr"),
    "euler_maruyama": _Sampler(euler_maruyama, steps=1000, stochastic=True),
}
SAMPLERS = tuple(_SAMPLERS)


def default_sampler(process: Process) -> str:
    """Heun for EDM, as its authors do; DPM-Solver++ of order 2 for the others."""
    return "heun" if process.name == "edm" else "dpm++2m"


def sampler_in_use(process: Process, sampler: str = "", steps: int = 0) -> tuple[str, int]:
    """The sampler and its number of steps, where nothing was said of one of them."""
    sampler = sampler or default_sampler(process)
    if sampler not in _SAMPLERS:
        raise unknown("diffusion.sampler", sampler, SAMPLERS)
    usual = _SAMPLERS[sampler].steps
    return sampler, steps or (min(usual, process.num_steps) if isinstance(process, DDPM) else usual)


def sample(
    objective: Objective,
    net: Network,
    start: Tensor | Draw,  # N(0, 1) noise (B, ...), or (seed, index, shape) to draw it
    *,
    sampler: str = "",  # one of SAMPLERS; empty: default_sampler(process)
    steps: int = 0,  # 0: the sampler's default
    spacing: str = "",  # how times are spread; empty: "snr" for DPM-Solver++ and Heun, else the process's default
    eta: float = 0.0,  # for "ddim" only: the share of DDPM's noise
    clip: bool = False,  # clamp every x0_hat to [-1, 1]
    progress: Progress | None = None,
    guidance: Guidance | None = None,  # classifier-free guidance; None: the condition acts alone
    **condition: Any,
) -> Tensor:
    """(B, ...) images in float32. With (seed, index, shape), image i is a function of (seed, i) alone."""
    process = objective.process
    sampler, steps = sampler_in_use(process, sampler, steps)
    _check(process, sampler, steps, eta)
    kind = _SAMPLERS[sampler]
    if not spacing and kind.spacing in process.spacings:
        spacing = kind.spacing
    x, noise = _start(start, sampler, kind.stochastic or eta > 0)
    times = process.sampling_times(steps, spacing)
    alpha, sigma = process.marginal(times.double())
    nets = [guidance.network(net, level) if guidance else net for level in (sigma / alpha).tolist()]
    run = Run(
        process=process,
        times=times,
        alpha=torch.cat([alpha, alpha.new_ones(1)]),
        sigma=torch.cat([sigma, sigma.new_zeros(1)]),
        eta=eta,
        denoise=_denoiser(objective, nets, times.to(x.device, torch.float32), clip, condition),
        noise=noise,
        done=lambda i: progress(i + 1, steps) if progress else None,
    )
    with torch.no_grad():
        return kind.run(x * process.prior_std, run)


def _check(process: Process, sampler: str, steps: int, eta: float) -> None:
    if sampler == "euler_maruyama" and not isinstance(process, ContinuousVP):
        raise ValueError(
            f"diffusion.sampler: 'euler_maruyama' needs beta(t) in continuous time (vp, cosine), got the process "
            f"{process.name!r}; use 'ddpm' for a stochastic sampler"
        )
    if steps < 0:
        raise ValueError(f"diffusion.steps: must be at least 1, or 0 for the sampler's default, got {steps}")
    if eta != 0 and sampler != "ddim":
        raise ValueError(f"diffusion.eta: only 'ddim' has it, got {eta} with {sampler!r}; leave it at 0")
    if not 0 <= eta <= 1:
        raise ValueError(f"diffusion.eta: must be in [0, 1], got {eta}")


def _start(start: Tensor | Draw, sampler: str, stochastic: bool) -> tuple[Tensor, Callable[[int], Tensor]]:
    """The unit noise to start from, and the function that gives the noise of step i."""
    if not isinstance(start, Tensor):
        seed, index, shape = start
        return normal(seed, "sample/start", index, shape), lambda i: normal(seed, f"sample/{i}", index, shape)
    if stochastic:
        raise ValueError(
            f"diffusion.start: {sampler!r} draws noise at every step, which a tensor of starting noise does not give; "
            "pass (seed, index, shape)"
        )
    return start.float(), lambda _step: torch.zeros_like(start)


def _denoiser(
    objective: Objective, nets: Sequence[Network], times: Tensor, clip: bool, condition: dict[str, Any]
) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
    def denoise(x: Tensor, i: int) -> tuple[Tensor, Tensor]:
        t = times[i].expand(x.shape[0])
        x0, noise = objective.denoise(nets[i], x, t, **condition)
        if clip:
            alpha, sigma = objective.process.marginal(t[:1])
            x0 = x0.clamp(-1, 1)
            noise = (x - alpha * x0) / sigma
        return x0, noise

    return denoise
