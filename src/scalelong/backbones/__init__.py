"""Denoisers with long skips: U-ViT, and diffusers' UNets with the paper's sizes."""

from scalelong.backbones.official import load_official_uvit
from scalelong.backbones.unet import as_network, ddpm_cifar10, iddpm_imagenet64, text_latent
from scalelong.backbones.uvit import UViT, UViTConfig

__all__ = ["UViT", "UViTConfig", "as_network", "ddpm_cifar10", "iddpm_imagenet64", "load_official_uvit", "text_latent"]
