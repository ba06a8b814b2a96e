"""The grid of samples that a run draws as it trains."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scalelong.backbones import as_network
from scalelong.data import Shape
from scalelong.diffusion import Objective, sample
from scalelong.runs.settings import RunConfig
from scalelong.training.condition import Condition


def draw_grid(config: RunConfig, objective: Objective, model: nn.Module, shape: Shape, condition: Condition) -> Tensor:
    """`sampling.count` samples as the sampler gives them; sample i is a function of the seed and i."""
    settings = config.sampling
    index = torch.arange(settings.count, device=condition.device)
    return sample(
        objective,
        as_network(model),
        (config.training.seed, index, shape),
        sampler=settings.sampler,
        steps=settings.steps,
        clip=settings.clip,
        guidance=condition.guidance(settings.guidance, settings.guidance_interval),
        **condition.of_drawn(index),
    )
