"""From a configuration to the things it names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from scalelong import skips
from scalelong.backbones import UViT, ddpm_cifar10, iddpm_imagenet64, text_latent
from scalelong.data import to_uint8
from scalelong.data.base import Shape
from scalelong.data.latents import decoder
from scalelong.diffusion import Objective, get_process
from scalelong.runs.settings import Conditioning, ModelSettings, RunConfig
from scalelong.training.checks import check_shape, uvit_config

ToPixels = Callable[[Tensor], Tensor]  # what a sampler gives, float (B, C, H, W), -> uint8 images


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """What is made on the CPU inside is a function of the seed; no random state is another one afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the other devices too
        yield


def build_pixels(config: RunConfig, device: torch.device, data: str = "") -> ToPixels:
    """How what is drawn becomes images: the one place that every sample of a run passes through.

    data: the fingerprint of what the run was trained on; latents that are others by now are refused.
    """
    autoencoder = decoder(config.data.name, device, data)
    if autoencoder is None:
        return to_uint8
    return lambda latents: to_uint8(autoencoder.decode(latents))


def build_objective(config: RunConfig) -> Objective:
    """The process and what is predicted in it."""
    return Objective(get_process(config.diffusion.process), config.diffusion.prediction)


def build_model(config: RunConfig, shape: Shape, given: Conditioning | None = None) -> nn.Module:
    """The backbone for images of this shape, scaled, with weights that are a function of the seed.

    The backbone is made before the gates, so every method starts from the same weights.
    """
    given = given or Conditioning()
    check_shape(config, shape, given)
    with seeded(config.training.seed):
        build = _uvit if config.model.backbone == "uvit" else _text_unet if given.text_dim else _unet
        model = build(config.model, shape, given)
        skips.apply(model, config.scaling.method, placement=config.scaling.placement, **config.scaling.options())
    return model


def _uvit(settings: ModelSettings, shape: Shape, given: Conditioning) -> nn.Module:
    return UViT(uvit_config(settings, shape[0], shape[1], given))


def _unet(settings: ModelSettings, shape: Shape, given: Conditioning) -> nn.Module:
    """The network of DDPM, or that of IDDPM, for this shape and these channels; classes are added to the time."""
    levels = range(len(settings.channels))
    attentive = {1} if settings.style == "ddpm" else set(levels[-2:])
    build = ddpm_cifar10 if settings.style == "ddpm" else iddpm_imagenet64
    model = build(
        **_sizes(settings, shape),
        down_block_types=tuple("AttnDownBlock2D" if level in attentive else "DownBlock2D" for level in levels),
        up_block_types=tuple("AttnUpBlock2D" if level in attentive else "UpBlock2D" for level in reversed(levels)),
        num_class_embeds=given.label_rows or None,
    )
    return _checkpointed(model, settings)


def _text_unet(settings: ModelSettings, shape: Shape, given: Conditioning) -> nn.Module:
    """diffusers' conditional UNet with cross attention to the text at every level, 32 channels a head at the first."""
    levels = len(settings.channels)
    model = text_latent(
        **_sizes(settings, shape),
        down_block_types=("CrossAttnDownBlock2D",) * levels,
        up_block_types=("CrossAttnUpBlock2D",) * levels,
        attention_head_dim=max(1, settings.channels[0] // 32),
        cross_attention_dim=given.text_dim,
    )
    return _checkpointed(model, settings)


def _sizes(settings: ModelSettings, shape: Shape) -> dict[str, Any]:
    return {
        "sample_size": shape[1],
        "in_channels": shape[0],
        "out_channels": shape[0],
        "block_out_channels": settings.channels,
        "layers_per_block": settings.layers_per_block,
    }


def _checkpointed(model: Any, settings: ModelSettings) -> nn.Module:
    if settings.checkpointing:
        model.enable_gradient_checkpointing()
    return model  # type: ignore[no-any-return]
