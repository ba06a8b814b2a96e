"""ImageNet at 64 x 64: the official npz batches, whose labels count from 1, or a folder of class folders.

Shapes: `data` is (n, 3 * 64 * 64) uint8, planes of red, green and blue; `labels` is (n,).
"""

from __future__ import annotations

import hashlib
import re
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from scalelong.data.base import Source, sampled_items
from scalelong.data.cache import cache_dir, written_whole
from scalelong.data.errors import DataError
from scalelong.data.folder import FolderSource
from scalelong.data.images import fit, to_tensor

SIZE = 64
CLASSES = 1000
CLASS_TABLE = "map_clsloc.txt"
PATTERNS = {"train": "*train_data_batch_*.npz", "val": "*val_data*.npz"}

Array = np.ndarray[Any, Any]


def load_imagenet64(
    path: str | Path, image_size: int | None = None, split: str = "train", root: str | Path | None = None
) -> Source:
    """The npz batches of a folder, or class folders (`n01440764/...`, possibly below train/ and val/)."""
    folder = Path(path).expanduser()
    if any(folder.glob("*.npz")):
        return ImageNet64Source(folder, image_size, split, root)
    source = FolderSource(folder, image_size or SIZE, split)
    source.name = f"imagenet64:{path}"
    return source


class ImageNet64Source(Source):
    """The batches are mapped, not loaded: a compressed one is unpacked into the cache once."""

    captions = None

    def __init__(self, folder: Path, image_size: int | None, split: str, root: str | Path | None) -> None:
        self.name = f"imagenet64:{folder}"
        if split not in PATTERNS or not any(folder.glob(PATTERNS[split])):
            have = [name for name, pattern in PATTERNS.items() if any(folder.glob(pattern))]
            raise DataError(
                f"data.split: {folder} has no {split!r}; it has {', '.join(have) or 'no batches'}", "missing"
            )
        files = sorted(folder.glob(PATTERNS[split]), key=lambda file: [int(n) for n in re.findall(r"\d+", file.stem)])
        self._batches = [_pixels(file, cache_dir(root) / "imagenet64") for file in files]
        self.labels = torch.cat([_labels(file, len(data)) for file, data in zip(files, self._batches, strict=True)])
        self.class_names = _class_names(folder / CLASS_TABLE)
        self.num_classes = CLASSES
        size = image_size or SIZE
        self.shape = (3, size, size)
        self._starts = np.cumsum([0, *(len(data) for data in self._batches)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, item: int) -> Tensor:
        return self.read_many([item])[0]

    def read_many(self, items: Sequence[int]) -> Tensor:
        wanted = np.asarray(items)
        found = np.empty((len(wanted), 3, SIZE, SIZE), dtype=np.uint8)
        homes = np.searchsorted(self._starts, wanted, side="right") - 1
        for home in np.unique(homes):
            here = homes == home
            rows = self._batches[home][wanted[here] - self._starts[home]]
            found[here] = rows.reshape(-1, 3, SIZE, SIZE)
        images = torch.from_numpy(found)
        if self.shape[1] == SIZE:
            return images
        pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
        return torch.stack([to_tensor(fit(picture, self.shape[1])) for picture in pictures])

    def _digest(self) -> str:
        """Over the number of images, all labels, and the pixels of evenly spaced images."""
        digest = hashlib.sha256(repr((self.shape, len(self))).encode())
        digest.update(self.read_many(sampled_items(len(self))).numpy().tobytes())
        assert self.labels is not None
        digest.update(self.labels.numpy().astype("<i8").tobytes())
        return digest.hexdigest()


def _pixels(file: Path, cache: Path) -> Array:
    """`data` of one batch, mapped."""
    try:
        with zipfile.ZipFile(file) as archive:
            entry = archive.getinfo("data.npy")
            data = _mapped(archive, entry, file, cache)
    except KeyError:
        raise DataError(f"{file}: holds no array `data`; this is no batch of downsampled ImageNet") from None
    except (zipfile.BadZipFile, OSError, ValueError, EOFError) as error:
        raise DataError(f"{file}: not a whole npz file ({error}); download it again", "truncated") from error
    if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3 * SIZE * SIZE:
        raise DataError(
            f"{file}: data is {data.dtype} {data.shape}, expected uint8 (n, {3 * SIZE * SIZE}); take the {SIZE} x {SIZE} "
            "version in npz format",
            "wrong channels",
        )
    return data


def _mapped(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, file: Path, cache: Path) -> Array:
    if entry.compress_type == zipfile.ZIP_STORED:
        with archive.open(entry) as member:
            version = np.lib.format.read_magic(member)
            read_header = (
                np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            )
            shape, by_columns, dtype = read_header(member)
            header = member.tell()
        if header + int(np.prod(shape)) * dtype.itemsize != entry.file_size:
            raise ValueError(f"data claims {shape} {dtype}, which its {entry.file_size} bytes are not")
        start = _start_of(file, entry) + header
        return np.memmap(file, dtype=dtype, mode="r", offset=start, shape=shape, order="F" if by_columns else "C")
    key = hashlib.sha256(f"{file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns}".encode()).hexdigest()[:16]
    unpacked = cache / f"{file.stem}-{key}.npy"
    if not unpacked.is_file():
        with written_whole(unpacked) as out, archive.open(entry) as member:  # which verifies the checksum
            shutil.copyfileobj(member, out, 1 << 20)
    mapped: Array = np.load(unpacked, mmap_mode="r", allow_pickle=False)
    return mapped


def _start_of(file: Path, entry: zipfile.ZipInfo) -> int:
    """Where a member's bytes begin: behind its local header, whose name and extra field have their own lengths."""
    with file.open("rb") as stream:
        stream.seek(entry.header_offset + 26)
        lengths = stream.read(4)
    return entry.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


def _labels(file: Path, count: int) -> Tensor:
    """(n,) from 0, of labels that count from 1."""
    with np.load(file, allow_pickle=False) as arrays:
        if "labels" not in arrays:
            raise DataError(f"{file}: holds no array `labels`; this is no batch of downsampled ImageNet")
        labels = np.asarray(arrays["labels"]).astype(np.int64).reshape(-1)
    if len(labels) != count:
        raise DataError(f"{file}: {len(labels)} labels for {count} images; download it again")
    bad = np.flatnonzero((labels < 1) | (labels > CLASSES))
    if len(bad):
        raise DataError(
            f"{file}: row {bad[0]} has label {labels[bad[0]]}, expected 1 .. {CLASSES} ({len(bad)} such row(s)); "
            "download it again"
        )
    return torch.from_numpy(labels - 1)


def _class_names(table: Path) -> list[str]:
    """From lines such as `n02119789 1 kit_fox`; plain numbers where the table is not there."""
    names = [str(number) for number in range(CLASSES)]
    for line in table.read_text().splitlines() if table.is_file() else ():
        words = line.split(maxsplit=2)
        if len(words) == 3 and words[1].isdigit() and 1 <= int(words[1]) <= CLASSES:
            names[int(words[1]) - 1] = words[2].replace("_", " ")
    return names
