"""The diffusers scheduler that stands for a process: same noise levels, same times told to the network.

Continuous processes tell the network t * 999, so timestep i of 1000 stands for t = i / 999. At i = 0 there would be no
noise at all, which schedulers divide by; that entry alone is of another time, just below that of i = 1, so that grids
which reach from the first to the last entry end where those of `scalelong.diffusion` do.
"""

from __future__ import annotations

from typing import Any

import torch

from scalelong.diffusion import DDPM, EDM, Objective
from scalelong.diffusion.process import LAST_TIME, TIME_SCALE, ContinuousVP, Process

TIMESTEPS = int(TIME_SCALE) + 1
FIRST_TIME = 0.9 * LAST_TIME
_MAX_BETA = 0.999
_PREDICTIONS = {"noise": "epsilon", "x0": "sample", "v": "v_prediction"}


def scheduler_for(objective: Objective, sampler: str = "", clip: bool = False) -> Any:
    """DPM-Solver++ for the samplers dpm++*, DDPM's own for "ddpm", else DDIM; EDM has its own solver."""
    from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler, EDMDPMSolverMultistepScheduler

    process = objective.process
    if isinstance(process, EDM):
        return EDMDPMSolverMultistepScheduler(
            sigma_min=process.sigma_min, sigma_max=process.sigma_max, sigma_data=process.sigma_data, rho=process.rho
        )
    common = {**_noise_levels(process), "prediction_type": _PREDICTIONS[objective.prediction]}
    if sampler.startswith("dpm++"):
        clipping = {"thresholding": True, "sample_max_value": 1.0, "dynamic_thresholding_ratio": 1.0} if clip else {}
        order = 3 if sampler == "dpm++3m" else 2
        return DPMSolverMultistepScheduler(
            **common, **clipping, solver_order=order, use_lu_lambdas=True, final_sigmas_type="zero"
        )
    if sampler == "ddpm":
        return DDPMScheduler(**common, clip_sample=clip, timestep_spacing="trailing")
    return DDIMScheduler(**common, clip_sample=clip, set_alpha_to_one=True, timestep_spacing="trailing")


def _noise_levels(process: Process) -> dict[str, Any]:
    if isinstance(process, DDPM):
        return {
            "num_train_timesteps": process.num_steps,
            "beta_start": process.beta_start,
            "beta_end": process.beta_end,
            "beta_schedule": "linear",
        }
    if not isinstance(process, ContinuousVP):
        raise ValueError(f"export: no scheduler of diffusers stands for the process {process.name!r}")
    return {"num_train_timesteps": TIMESTEPS, "trained_betas": _betas(process)}


def _betas(process: ContinuousVP) -> list[float]:
    """beta_i = 1 - alpha_i^2 / alpha_{i-1}^2."""
    times = torch.arange(TIMESTEPS, dtype=torch.float64) / TIME_SCALE
    times[0] = FIRST_TIME
    alpha, _ = process.marginal(times)
    alpha_bar = torch.cat([alpha.new_ones(1), alpha.square()])
    betas: list[float] = (1 - alpha_bar[1:] / alpha_bar[:-1]).clamp(max=_MAX_BETA).tolist()
    return betas
