"""Denoisers with long skips: U-ViT, and diffusers' UNets in the sizes of the paper."""

from scalelong.backbones.official import load_official_uvit
from scalelong.backbones.unet import (
    DiffusersUNet,
    as_network,
    ddpm_cifar10,
    iddpm_imagenet64,
    model_inputs,
    text_latent,
    unwrapped,
)
from scalelong.backbones.uvit import SkipLinear, UViT, UViTConfig

__all__ = [
    "DiffusersUNet",
    "SkipLinear",
    "UViT",
    "UViTConfig",
    "as_network",
    "ddpm_cifar10",
    "iddpm_imagenet64",
    "load_official_uvit",
    "model_inputs",
    "text_latent",
    "unwrapped",
]
