"""From a configuration to the things it names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from scalelong import skips
from scalelong.backbones import UViT, ddpm_cifar10
from scalelong.data import to_uint8
from scalelong.data.base import Shape
from scalelong.diffusion import Objective, get_process
from scalelong.training.config import ModelSettings, RunConfig, uvit_config

ToPixels = Callable[[Tensor], Tensor]  # what a sampler gives, float (B, C, H, W), -> uint8 images


def build_pixels(config: RunConfig, device: torch.device) -> ToPixels:  # noqa: ARG001 (pixels need neither)
    """How what is drawn becomes images: the one place that every sample of a run passes through."""
    return to_uint8


def build_objective(config: RunConfig) -> Objective:
    """The process and what is predicted in it."""
    return Objective(get_process(config.diffusion.process), config.diffusion.prediction)


def build_model(config: RunConfig, shape: Shape) -> nn.Module:
    """The backbone for images of this shape, scaled, with weights that are a function of the seed.

    The backbone is made before the gates, so every method starts from the same weights.
    """
    config.check_shape(shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.training.seed)
        model = _uvit(config.model, shape) if config.model.backbone == "uvit" else _unet(config.model, shape)
        skips.apply(model, config.scaling.method, placement=config.scaling.placement, **config.scaling.options())
    return model


def _uvit(settings: ModelSettings, shape: Shape) -> nn.Module:
    return UViT(uvit_config(settings, shape[0], shape[1]))


def _unet(settings: ModelSettings, shape: Shape) -> nn.Module:
    """DDPM's CIFAR-10 network with its attention at the second level, for this shape and these channels."""
    levels = len(settings.channels)
    down = ["AttnDownBlock2D" if level == 1 else "DownBlock2D" for level in range(levels)]
    up = ["AttnUpBlock2D" if level == 1 else "UpBlock2D" for level in reversed(range(levels))]
    model: Any = ddpm_cifar10(
        sample_size=shape[1],
        in_channels=shape[0],
        out_channels=shape[0],
        block_out_channels=settings.channels,
        layers_per_block=settings.layers_per_block,
        down_block_types=tuple(down),
        up_block_types=tuple(up),
    )
    if settings.checkpointing:
        model.enable_gradient_checkpointing()
    return model  # type: ignore[no-any-return]
