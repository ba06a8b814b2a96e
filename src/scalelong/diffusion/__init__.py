"""Diffusion processes, objectives and samplers."""

from scalelong.diffusion.objective import Network, Objective, draw_time_and_noise
from scalelong.diffusion.process import DDPM, EDM, PROCESSES, VPSDE, Cosine, Flow, Process, get_process
from scalelong.diffusion.sampling import SAMPLERS, guided, resolve_sampling, sample

__all__ = [
    "DDPM",
    "EDM",
    "PROCESSES",
    "SAMPLERS",
    "VPSDE",
    "Cosine",
    "Flow",
    "Network",
    "Objective",
    "Process",
    "draw_time_and_noise",
    "get_process",
    "guided",
    "resolve_sampling",
    "sample",
]
