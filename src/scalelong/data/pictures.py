"""Sources whose images are decoded one by one, when they are asked for."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from scalelong.data.base import Shape, Source, sampled_items, update_with_annotations
from scalelong.data.errors import DataError
from scalelong.data.images import fit, open_rgb, to_tensor


class PictureSource(Source):
    """With an image size, every picture is cropped to the centre square and resized; without, all must be of one size."""

    image_size: int | None

    @abstractmethod
    def open(self, item: int) -> Image.Image:
        """One whole RGB image, before cropping."""

    @abstractmethod
    def where(self, item: int) -> str:
        """What an error calls this item."""

    def common_shape(self) -> Shape:
        """(3, H, W) of every image: as asked for, or as the first one has it."""
        width, height = (self.image_size, self.image_size) if self.image_size is not None else self.open(0).size
        return (3, height, width)

    def read(self, item: int) -> Tensor:
        return to_tensor(self._fitted(item))

    def read_many(self, items: Sequence[int]) -> Tensor:
        """One array for all of them: for small pictures, a tensor each costs as much as decoding."""
        _, height, width = self.shape
        pixels = np.empty((len(items), height, width, 3), dtype=np.uint8)
        for row, item in enumerate(items):
            pixels[row] = np.asarray(self._fitted(item))
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()

    def _fitted(self, item: int) -> Image.Image:
        image = self.open(item)
        if self.image_size is not None:
            return fit(image, self.image_size)
        _, height, width = self.shape
        if image.size != (width, height):
            raise DataError(
                f"{self.where(item)}: {image.size[0]} x {image.size[1]} pixels, but the first one has "
                f"{width} x {height}; set data.image_size to crop and resize all of them"
            )
        return image


class FileSource(PictureSource):
    """One file for each picture, below one folder; `files` are paths from there."""

    folder: Path
    files: list[str]

    def __len__(self) -> int:
        return len(self.files)

    def where(self, item: int) -> str:
        return str(self.folder / self.files[item])

    def open(self, item: int) -> Image.Image:
        return open_rgb(self.folder / self.files[item], self.where(item))

    def _form(self) -> object:
        """What was made of the files."""
        return self.shape

    def _digest(self) -> str:
        """Over the form, each file's name and size, the bytes of evenly spaced files, and the annotations."""
        digest = hashlib.sha256(repr(self._form()).encode())
        for name in self.files:
            digest.update(f"{name}\0{(self.folder / name).stat().st_size}\n".encode())
        for item in sampled_items(len(self)):
            digest.update((self.folder / self.files[item]).read_bytes())
        update_with_annotations(digest, self.caption_counts if self.labels is None else self.labels, self.captions)
        return digest.hexdigest()
