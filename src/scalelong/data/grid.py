"""Images side by side in one picture."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor


def grid_image(images: Tensor, columns: int | None = None, least_pixels: int = 512) -> Image.Image:
    """uint8 (n, C, H, W) images as a square grid, small ones enlarged so that a person can see them."""
    n, channels, height, width = images.shape
    columns = columns or math.ceil(math.sqrt(n))
    rows = math.ceil(n / columns)
    sheet = torch.full((channels, rows * (height + 1) - 1, columns * (width + 1) - 1), 255, dtype=torch.uint8)
    for i, image in enumerate(images.cpu()):
        top, left = (i // columns) * (height + 1), (i % columns) * (width + 1)
        sheet[:, top : top + height, left : left + width] = image
    pixels = sheet.permute(1, 2, 0).numpy()
    picture = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
    factor = max(1, round(least_pixels / picture.width))
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def save_grid(images: Tensor, path: Path, columns: int | None = None) -> None:
    """Write a grid as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    grid_image(images, columns).save(path)
