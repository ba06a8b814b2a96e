"""ImageNet at 64 x 64: the official npz batches (`data`: (n, 3 * 64 * 64) uint8, `labels` from 1), or class folders."""

from __future__ import annotations

import hashlib
import re
import shutil
import zipfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalelong.data.base import DataError, Request, Source, reading, register
from scalelong.data.download import cache_dir
from scalelong.data.folder import FolderSource
from scalelong.data.images import gather_rows, resize_all
from scalelong.files import atomic_write

SIZE = 64
CLASSES = 1000
PATTERNS = {"train": "*train_data_batch_*.npz", "val": "*val_data*.npz"}


@register(
    "imagenet64:PATH", "the official downsampled npz batches, or class folders; 1,000 classes", shape=(3, SIZE, SIZE)
)
def load_imagenet64(request: Request) -> Source:
    """The npz batches of a folder, or class folders (`n01440764/...`, possibly below train/ and val/)."""
    folder = Path(request.path).expanduser()
    if any(folder.glob("*.npz")):
        return ImageNet64Source(folder, request)
    source = FolderSource(request._replace(image_size=request.image_size or SIZE))
    source.name = f"imagenet64:{request.path}"
    return source


class ImageNet64Source(Source):
    """The npz batches, unpacked into `cache` once and memory-mapped."""

    labels: Tensor
    num_classes = CLASSES

    def __init__(self, folder: Path, request: Request) -> None:
        split, size, cache = request.split, request.image_size or SIZE, cache_dir(request.root) / "imagenet64"
        self.name = f"imagenet64:{folder}"
        if split not in PATTERNS or not any(folder.glob(PATTERNS[split])):
            have = [name for name, pattern in PATTERNS.items() if any(folder.glob(pattern))]
            raise DataError(f"data.split: {folder} has no {split!r}; it has {', '.join(have) or 'no batches'}")
        files = sorted(folder.glob(PATTERNS[split]), key=lambda file: [int(n) for n in re.findall(r"\d+", file.stem)])
        self._batches = [_pixels(file, cache) for file in files]
        self.labels = torch.cat([_labels(file, len(data)) for file, data in zip(files, self._batches, strict=True)])
        self.class_names = _class_names(folder / "map_clsloc.txt")
        self.shape = (3, size, size)
        self._starts = list(accumulate((len(data) for data in self._batches), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, item: int) -> Tensor:
        return self.read_many([item])[0]

    def read_many(self, items: Sequence[int]) -> Tensor:
        rows = np.empty((len(items), 3 * SIZE * SIZE), dtype=np.uint8)
        found = gather_rows(self._batches.__getitem__, self._starts, items, rows)
        return resize_all(found.view(-1, 3, SIZE, SIZE), self.shape[1])


def _pixels(file: Path, cache: Path) -> np.ndarray[Any, Any]:
    """`data` of one batch, memory-mapped from an unpacked .npy file in the cache."""
    status = file.stat()
    key = hashlib.sha256(f"{file.resolve()} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:16]
    unpacked = cache / f"{file.stem}-{key}.npy"
    with reading(f"{file}: not a whole npz file", "download it again"):
        if not unpacked.is_file():
            with zipfile.ZipFile(file) as archive:
                _check_sizes(archive, file)
                with archive.open("data.npy") as member, atomic_write(unpacked) as out:
                    shutil.copyfileobj(member, out, 1 << 20)
        data: np.ndarray[Any, Any] = np.load(unpacked, mmap_mode="r", allow_pickle=False)
    if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3 * SIZE * SIZE:
        expected = f"expected uint8 (n, {3 * SIZE * SIZE}); take the {SIZE} x {SIZE} version in npz format"
        raise DataError(f"{file}: data is {data.dtype} {data.shape}, {expected}")
    return data


def _check_sizes(archive: zipfile.ZipFile, file: Path) -> None:
    """Reject zip bombs; images hardly compress."""
    for member in archive.infolist():
        bound = 2**24 if member.filename == "labels.npy" else max(2**26, 20 * member.compress_size)
        if member.file_size > bound:
            sizes = f"{member.compress_size:,} bytes unpack to {member.file_size:,}"
            raise DataError(f"{file}: {member.filename}: {sizes}, which no images do; download it again")


def _labels(file: Path, count: int) -> Tensor:
    """(n,) labels from 0; the file has them from 1."""
    with reading(f"{file}: not a whole npz file", "download it again"), np.load(file, allow_pickle=False) as arrays:
        _check_sizes(arrays.zip, file)
        labels = np.asarray(arrays["labels"]).astype(np.int64).reshape(-1)
    if len(labels) != count:
        raise DataError(f"{file}: {len(labels)} labels for {count} images; download it again")
    bad = np.flatnonzero((labels < 1) | (labels > CLASSES))
    if len(bad):
        expected = f"expected 1 .. {CLASSES} ({len(bad)} such row(s)); download it again"
        raise DataError(f"{file}: row {bad[0]} has label {labels[bad[0]]}, {expected}")
    return torch.from_numpy(labels - 1)


def _class_names(table: Path) -> list[str]:
    """From lines such as `n02119789 1 kit_fox`; plain numbers without the table."""
    text = table.read_text(encoding="utf-8", errors="replace") if table.is_file() else ""
    lines = re.findall(r"^\S+[ \t]+(\d+)[ \t]+(.+)$", text, flags=re.M)
    found = {int(number) - 1: name.strip().replace("_", " ") for number, name in lines}
    return [found.get(number, str(number)) for number in range(CLASSES)]
