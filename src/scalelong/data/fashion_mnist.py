"""Fashion-MNIST."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from scalelong.data.base import DataError, MemorySource, Request, reading, register
from scalelong.data.download import DOWNLOADS, Download, Expected, Mirror, check_download, fetch
from scalelong.data.images import resized

FILES = {  # sha256 of the unpacked files: archives differ from packer to packer
    "train-images-idx3-ubyte": Expected(47_040_016, "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
    "train-labels-idx1-ubyte": Expected(60_008, "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
    "t10k-images-idx3-ubyte": Expected(7_840_016, "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
    "t10k-labels-idx1-ubyte": Expected(10_008, "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
}
CLASSES = ["t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"]
_INSTALLED = "usr/share/datasets/fashion-mnist"  # where Debian's package puts the files


def unpack(source: Path, files: Path) -> None:
    """Copy the four idx files out of a folder, unpacking .gz."""
    if not source.is_dir():
        raise DataError(f"{source.name}: expected the folder that holds {', '.join(FILES)} (or .gz)")
    for name in FILES:
        packed = source / f"{name}.gz"
        if (source / name).is_file():
            shutil.copyfile(source / name, files / name)
        elif packed.is_file():
            with reading(f"{packed}: not a whole gzip file", "download it again"), gzip.open(packed) as content:
                (files / name).write_bytes(content.read(FILES[name].size + 1))  # more would be refused by hash


def read(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """uint8 images (n, 1, 28, 28) and int64 labels (n,); the files have headers of 16 and 8 bytes."""
    prefix = {"train": "train", "test": "t10k"}[split]
    path = folder / f"{prefix}-images-idx3-ubyte"
    images = np.fromfile(path, np.uint8)[16:]
    if images.size == 0 or images.size % (28 * 28):
        raise DataError(f"{path}: not a whole idx file of 28 x 28 images; fetch it again")
    labels = np.fromfile(folder / f"{prefix}-labels-idx1-ubyte", np.uint8)[8:]
    return torch.from_numpy(images.reshape(-1, 1, 28, 28)), torch.from_numpy(labels.astype(np.int64))


DOWNLOADS["fashion_mnist"] = Download(
    "fashion_mnist",
    FILES,
    mirrors=(Mirror("path", f"/{_INSTALLED}"), Mirror("debian", "dataset-fashion-mnist", inside=_INSTALLED)),
    unpack=unpack,
    own_copies=("fashion-mnist",),
    remedy="install Debian's dataset-fashion-mnist, or pass the folder of the four idx(.gz) files as source=",
)


@register(
    "fashion_mnist",
    "Fashion-MNIST, 28 x 28 grey, 10 classes; fetched and verified by hash",
    splits=("train", "test"),
    check=check_download,
    shape=(1, 28, 28),
)
def load_fashion_mnist(request: Request) -> MemorySource:
    images, labels = read(fetch("fashion_mnist", request.root), request.split)
    return resized(MemorySource("fashion_mnist", images, labels, CLASSES), request.image_size)
