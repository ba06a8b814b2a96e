"""Denoisers with long skips: U-ViT, diffusers' UNets as the paper used them."""

from scalelong.backbones.official import load_official_uvit
from scalelong.backbones.unet import PRESETS as UNET_PRESETS
from scalelong.backbones.unet import Network, as_network, ddpm_cifar10, iddpm_imagenet64, text_latent
from scalelong.backbones.uvit import PRESETS as UVIT_PRESETS
from scalelong.backbones.uvit import SkipLinear, UViT, UViTConfig

__all__ = [
    "UNET_PRESETS",
    "UVIT_PRESETS",
    "Network",
    "SkipLinear",
    "UViT",
    "UViTConfig",
    "as_network",
    "ddpm_cifar10",
    "iddpm_imagenet64",
    "load_official_uvit",
    "text_latent",
]
