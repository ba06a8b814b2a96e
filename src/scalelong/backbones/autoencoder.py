"""Autoencoders for latent diffusion: any diffusers AutoencoderKL, and a small one that trains in minutes.

Shapes: B images (B, 3, H, W) in [-1, 1]; latents (B, C, h, w).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def small_autoencoder(
    channels: int = 3, widths: tuple[int, ...] = (16, 32), latent_channels: int = 4, layers: int = 1, size: int = 32
) -> Any:
    """A diffusers AutoencoderKL with one level per width; every level after the first halves the image.

    >>> small_autoencoder(widths=(8, 8), size=16).config.latent_channels
    4
    """
    from diffusers import AutoencoderKL

    if not widths or any(width < 8 or width % 8 for width in widths):
        raise ValueError(f"autoencoder.widths: must be multiples of 8, got {widths}; (16, 32) halves the image once")
    if size % 2 ** (len(widths) - 1):
        fault = f"{len(widths)} levels halve the image {len(widths) - 1} times, which {size} pixels do not allow"
        raise ValueError(f"autoencoder.widths: {fault}; use fewer levels")
    return AutoencoderKL(
        in_channels=channels,
        out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        block_out_channels=widths,
        layers_per_block=layers,
        latent_channels=latent_channels,
        norm_num_groups=8,
        sample_size=size,
        scaling_factor=1.0,
        force_upcast=False,
        mid_block_add_attention=False,
    )


@dataclass(frozen=True)
class Autoencoder:
    """An AutoencoderKL, its sha256, and the affine map of its latents to unit variance."""

    model: Any
    digest: str
    scale: float
    shift: float = 0.0

    def latent_shape(self, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """(C, h, w) of the latents of images of this (channels, H, W)."""
        channels, height, width = shape
        config = self.model.config
        factor = 2 ** (len(config.block_out_channels) - 1)
        if channels != config.in_channels:
            raise ValueError(f"autoencoder: takes {config.in_channels} channels, got images of {channels}; use another")
        if height % factor or width % factor:
            fault = f"divides each side by {factor}, which {height} x {width} pixels do not allow"
            raise ValueError(f"autoencoder: {fault}; set the image size to a multiple of it")
        return config.latent_channels, height // factor, width // factor

    def moments(self, images: Tensor) -> Tensor:
        """(B, 2, C, h, w): mean and log-variance of the latents, before scale and shift."""
        with torch.no_grad():
            posterior = self.model.encode(images).latent_dist
        return torch.stack([posterior.mean, posterior.logvar], dim=1)

    def decode(self, latents: Tensor) -> Tensor:
        """Decode unit-variance latents to images, in small batches."""
        with torch.no_grad():
            stored = (latents / self.scale + self.shift).to(self.model.device, self.model.dtype)
            return torch.cat([self.model.decode(part).sample.float() for part in torch.split(stored, 64)])


def load_autoencoder(
    name_or_folder: str | Path, device: str | torch.device = "cpu", scale: float | None = None
) -> Autoencoder:
    """Load an AutoencoderKL from a `save_pretrained` folder or the hub; `scale` overrides its scaling factor."""
    from diffusers import AutoencoderKL

    name, folder = str(name_or_folder), Path(name_or_folder).expanduser()
    if not folder.is_dir() and (name.count("/") != 1 or name.startswith((".", "/", "~"))):  # nor a name on the hub
        raise FileNotFoundError(f"autoencoder: {folder} is not a folder with a config.json; check the path")
    is_pipeline = not (folder / "config.json").is_file() and (folder / "vae" / "config.json").is_file()
    options: dict[str, Any] = {"use_safetensors": True, **({"subfolder": "vae"} if is_pipeline else {})}
    try:
        model = AutoencoderKL.from_pretrained(str(folder) if folder.is_dir() else name, **options)
    except (OSError, ValueError, RuntimeError) as error:
        fault = f"{name} cannot be loaded ({str(error).splitlines()[0]})"
        raise ValueError(f"autoencoder: {fault}; give a folder written by save_pretrained, or a hub name") from error
    digest = autoencoder_digest(model.eval().requires_grad_(False))
    scale, shift = float(scale or model.config.scaling_factor), float(model.config.get("shift_factor") or 0.0)
    return Autoencoder(model.to(device), digest, scale, shift)


def autoencoder_digest(model: Any) -> str:
    """sha256 of the architecture and the weights, independent of the files."""
    keys = ["in_channels", "out_channels", "down_block_types", "up_block_types", "block_out_channels"]
    keys += ["layers_per_block", "latent_channels", "norm_num_groups", "act_fn"]
    digest = hashlib.sha256(json.dumps({key: model.config[key] for key in keys}, sort_keys=True).encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
