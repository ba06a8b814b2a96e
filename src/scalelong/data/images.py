"""From a file to uint8 (C, H, W), and from uint8 to the network's [-1, 1] and back."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from tqdm import tqdm

from scalelong.data.errors import DataError, Kind

EXTENSIONS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})

_EIGHT_BIT_MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"})
_BROKEN_FILE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)
_ORIENTED = frozenset({"exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp"})  # what can tell the orientation
_WINDOW = 1024  # items handed to the thread pool at a time

Item = TypeVar("Item")
Result = TypeVar("Result")


def on_white(image: Image.Image) -> Image.Image:
    """RGB; what is transparent becomes white."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        white.alpha_composite(rgba)
        return white.convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def open_rgb(file: Path | IO[bytes], where: str) -> Image.Image:
    """Decode a whole image, upright, as RGB; `where` names it in errors."""
    try:
        with Image.open(file) as image:
            if image.mode not in _EIGHT_BIT_MODES:
                bands = len(image.getbands())
                raise DataError(
                    f"{where}: expected 8-bit RGB, grey or palette, got mode {image.mode} ({bands} channel(s)); "
                    "convert it to 8-bit RGB or remove it",
                    "wrong channels",
                )
            image.load()
            # looking for an orientation is slow for small images
            if image.format == "TIFF" or not _ORIENTED.isdisjoint(image.info):
                ImageOps.exif_transpose(image, in_place=True)
            return on_white(image)
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{where}: the file is not there; restore it or remove the link to it", "missing") from error
    except _BROKEN_FILE as error:
        kind: Kind = "truncated" if _looks_truncated(file, error) else "unreadable"
        raise DataError(f"{where}: {kind} image ({error}); replace or delete the file", kind) from error


def _looks_truncated(file: Path | IO[bytes], error: BaseException) -> bool:
    empty = isinstance(file, Path) and file.is_file() and file.stat().st_size == 0
    return empty or isinstance(error, EOFError) or "truncated" in str(error).lower()


def fit(image: Image.Image, size: int) -> Image.Image:
    """The centre square, resized to size x size."""
    if image.size == (size, size):
        return image
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    square = image.crop((left, top, left + side, top + side))  # resize(box=) would let the filter look outside
    return square.resize((size, size), Image.Resampling.BICUBIC)


def to_tensor(image: Image.Image) -> Tensor:
    """uint8 (C, H, W) of a grey or RGB image."""
    array = np.array(image, dtype=np.uint8)
    if array.ndim == 2:
        array = array[:, :, None]
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()


def resize_all(images: Tensor, size: int) -> Tensor:
    """(n, C, H, W) uint8 to (n, C, size, size), with the same filter as for files."""
    if tuple(images.shape[-2:]) == (size, size):
        return images
    pixels = images.permute(0, 2, 3, 1).numpy()
    if pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    bar = tqdm(pixels, desc=f"resize to {size}", disable=None)
    return torch.stack([to_tensor(fit(Image.fromarray(array), size)) for array in bar])


def to_float(images: Tensor) -> Tensor:
    """uint8 to float32 in [-1, 1]; a multiplication, so that every device gives the same bits."""
    return (images.to(torch.float32) * 2.0 - 255.0) * (1.0 / 255.0)


def to_uint8(images: Tensor) -> Tensor:
    """[-1, 1] to uint8: the inverse of `to_float`; what lies outside is clipped."""
    return ((images.to(torch.float32) + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)


def threaded(function: Callable[[Item], Result], items: Sequence[Item], threads: int = 8) -> Iterator[Result]:
    """function(item) in order, on threads (Pillow decodes outside the interpreter lock)."""
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(items), _WINDOW):
            yield from pool.map(function, items[start : start + _WINDOW])
