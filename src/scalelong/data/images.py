"""Decode images to uint8 (C, H, W), sources that decode on the fly, and PNG grids."""

from __future__ import annotations

import math
import struct
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from scalelong.data.base import DataError, MemorySource, Source, hashed_items, reading
from scalelong.errors import require_memory
from scalelong.files import atomic_write

EXTENSIONS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # others (EPS) would run programs
MAX_PIXELS = 2**25  # limit against decompression bombs
_EIGHT_BIT_MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"})
_BROKEN_FILE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)
_ORIENTED = frozenset({"exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp"})  # may hold an orientation


def on_white(image: Image.Image) -> Image.Image:
    """RGB, composited on white where transparent."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        white.alpha_composite(rgba)
        return white.convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def open_rgb(file: Path | IO[bytes], where: str) -> Image.Image:
    """Decode a whole image, upright, as RGB; `where` names it in errors."""
    try:
        with Image.open(file, formats=FORMATS) as image:
            if (pixels := image.width * image.height) > MAX_PIXELS:
                raise DataError(f"{where}: {pixels:,} pixels, more than {MAX_PIXELS:,}; resize or delete it")
            if image.mode not in _EIGHT_BIT_MODES:
                raise DataError(f"{where}: expected 8-bit RGB, grey or palette, got mode {image.mode}; convert it")
            image.load()
            # looking for an orientation is slow for small images
            if image.format == "TIFF" or not _ORIENTED.isdisjoint(image.info):
                ImageOps.exif_transpose(image, in_place=True)
            return on_white(image)
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{where}: no such file; restore it or remove the link to it") from error
    except _BROKEN_FILE as error:
        empty = isinstance(file, Path) and file.is_file() and file.stat().st_size == 0
        truncated = empty or isinstance(error, EOFError) or "truncated" in str(error).lower()
        fault = "truncated" if truncated else "unreadable"
        raise DataError(f"{where}: {fault} image ({error}); replace or delete the file") from error


def center_crop(image: Image.Image, side: int) -> Image.Image:
    """The central side x side pixels."""
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def fit(image: Image.Image, size: int) -> Image.Image:
    """Center-crop to a square and resize to size x size."""
    if image.size == (size, size):
        return image
    square = center_crop(image, min(image.size))  # resize(box=) filters beyond the crop
    return square.resize((size, size), Image.Resampling.BICUBIC)


def to_tensor(image: Image.Image) -> Tensor:
    """uint8 (C, H, W) of a grey or RGB image."""
    return torch.from_numpy(np.atleast_3d(np.array(image, dtype=np.uint8))).permute(2, 0, 1).contiguous()


def resize_all(images: Tensor, size: int) -> Tensor:
    """(n, C, H, W) uint8 to (n, C, size, size), with the same filter as for files."""
    if tuple(images.shape[-2:]) == (size, size):
        return images
    pixels = images[:, 0] if images.shape[1] == 1 else images.permute(0, 2, 3, 1)
    return torch.stack([to_tensor(fit(Image.fromarray(array), size)) for array in pixels.numpy()])


def resized(source: MemorySource, size: int | None) -> MemorySource:
    """Resize the images of a source to size x size; None keeps them."""
    if size is None or size == source.shape[-1]:
        return source
    count, channels = source.images.shape[:2]
    require_memory(f"data.image_size: {size}", count * channels * size * size, f"{count:,} images need")
    images = resize_all(source.images, size)
    return MemorySource(source.name, images, source.labels, source.class_names, source.captions)


class PictureSource(Source):
    """Images decoded on the fly, center-cropped and resized; without an image size all must have the same size."""

    image_size: int | None

    @abstractmethod
    def open(self, item: int) -> Image.Image:
        """One whole RGB image, before cropping."""

    def verify(self, item: int) -> tuple[int, int]:
        return self.open(item).size

    def set_size(self, image_size: int | None) -> None:
        """Set the image shape: the requested size, or the size of the first image."""
        self.image_size = image_size
        width, height = (image_size, image_size) if image_size else self.open(0).size
        self.shape = (3, height, width)

    def read(self, item: int) -> Tensor:
        return to_tensor(self._fitted(item))

    def read_many(self, items: Sequence[int]) -> Tensor:
        """Read into one array: for small images, separate tensors cost as much as decoding."""
        _, height, width = self.shape
        pixels = np.empty((len(items), height, width, 3), dtype=np.uint8)
        for row, item in enumerate(items):
            pixels[row] = np.asarray(self._fitted(item))
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()

    def _fitted(self, item: int) -> Image.Image:
        try:
            image = self.open(item)
        except DataError as error:
            raise DataError(f"{error} (item {item})") from error
        if self.image_size is not None:
            return fit(image, self.image_size)
        _, height, width = self.shape
        if image.size != (width, height):
            sizes = f"{image.size[0]} x {image.size[1]} pixels, but the first one has {width} x {height}"
            raise DataError(f"{self.where(item)}: {sizes}; set data.image_size to crop and resize all (item {item})")
        return image


class FileSource(PictureSource):
    """One file per image; `files` are paths relative to `folder`."""

    folder: Path
    files: list[str]

    def __len__(self) -> int:
        return len(self.files)

    def where(self, item: int) -> str:
        return str(self.folder / self.files[item])

    def open(self, item: int) -> Image.Image:
        return open_rgb(self.folder / self.files[item], self.where(item))

    def _form(self) -> object:
        return self.shape

    def _contents(self) -> Iterator[bytes]:
        """Each file's name and size, and the bytes of some files."""
        for item, name in enumerate(self.files):
            with reading(f"{self.where(item)}: cannot be read", "restore it or remove the link to it"):
                yield f"{name}\0{(self.folder / name).stat().st_size}\n".encode()
        for item in hashed_items(len(self)):
            yield (self.folder / self.files[item]).read_bytes()


def save_grid(images: Tensor, path: Path, columns: int | None = None) -> None:
    """Write uint8 (n, C, H, W) images as a square grid, enlarged by a whole factor to about 512 pixels."""
    n, channels, height, width = images.shape
    columns = columns or math.ceil(math.sqrt(n))
    sheet = np.full((math.ceil(n / columns) * (height + 1) - 1, columns * (width + 1) - 1, channels), 255, np.uint8)
    for i, image in enumerate(images.permute(0, 2, 3, 1).cpu().numpy()):
        top, left = (i // columns) * (height + 1), (i % columns) * (width + 1)
        sheet[top : top + height, left : left + width] = image
    picture = Image.fromarray(sheet[:, :, 0] if channels == 1 else sheet)
    enlarged = ImageOps.scale(picture, max(1, round(512 / picture.width)), Image.Resampling.NEAREST)
    with atomic_write(path) as file:
        enlarged.save(file, "PNG")


def gather_rows(shard: Callable[[int], Any], starts: Sequence[int], items: Sequence[int], out: Any) -> Tensor:
    """Fill the array `out` with rows of shards; `starts` are the shards' first items, and the total."""
    wanted = np.asarray(items)
    homes = np.searchsorted(starts, wanted, side="right") - 1
    for home in np.unique(homes).tolist():
        here = homes == home
        out[here] = shard(home)[wanted[here] - starts[home]]
    return torch.from_numpy(out)
