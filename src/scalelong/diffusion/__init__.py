"""Diffusion: how noise is added (process), what is predicted (objective), and how images are made (sampling)."""

from scalelong.diffusion.guidance import Guidance, guided
from scalelong.diffusion.objective import Network, Objective, draw_time_and_noise
from scalelong.diffusion.process import DDPM, EDM, PROCESSES, VPSDE, Cosine, Process, get_process
from scalelong.diffusion.sampling import SAMPLERS, default_sampler, sample

__all__ = [
    "DDPM",
    "EDM",
    "PROCESSES",
    "SAMPLERS",
    "VPSDE",
    "Cosine",
    "Guidance",
    "Network",
    "Objective",
    "Process",
    "default_sampler",
    "draw_time_and_noise",
    "get_process",
    "guided",
    "sample",
]
