"""Fashion-MNIST as four idx files: a header of big-endian integers, then bytes."""

from __future__ import annotations

import gzip
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from scalelong.data.cache import Expected
from scalelong.data.download import debian_unpack
from scalelong.data.errors import DataError

ALGORITHM = "sha256"  # of the unpacked files: the archives differ from packer to packer
FILES = {
    "train-images-idx3-ubyte": Expected(47_040_016, "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
    "train-labels-idx1-ubyte": Expected(60_008, "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
    "t10k-images-idx3-ubyte": Expected(7_840_016, "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
    "t10k-labels-idx1-ubyte": Expected(10_008, "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
}
SPLITS = {"train": "train", "test": "t10k"}
CLASSES = ["t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"]
OWN_COPIES = ("fashion-mnist",)
REMEDY = "install Debian's dataset-fashion-mnist, or pass the folder of the four idx(.gz) files as source="

_PACKAGE = "dataset-fashion-mnist"
_INSTALLED = Path("/usr/share/datasets/fashion-mnist")


def from_installed(files: Path, scratch: Path) -> None:
    """Where Debian's package puts the files."""
    if not _INSTALLED.is_dir():
        raise DataError(f"{_INSTALLED}: not there", "missing")
    unpack(_INSTALLED, files, scratch)


def from_debian(files: Path, scratch: Path) -> None:
    """Debian's package, downloaded but not installed."""
    root = debian_unpack(_PACKAGE, scratch)
    unpack(root / _INSTALLED.relative_to("/"), files, scratch)


ROUTES: tuple[Callable[[Path, Path], None], ...] = (from_installed, from_debian)


def unpack(source: Path, files: Path, scratch: Path) -> None:  # noqa: ARG001 (the signature all sets share)
    """Copy the four idx files out of a folder, unpacking .gz."""
    if not source.is_dir():
        raise DataError(f"{source.name}: expected the folder that holds {', '.join(FILES)} (or .gz)", "missing")
    for name in FILES:
        plain, packed = source / name, source / f"{name}.gz"
        if plain.is_file():
            shutil.copyfile(plain, files / name)
        elif packed.is_file():
            try:
                with gzip.open(packed) as content, (files / name).open("wb") as target:
                    shutil.copyfileobj(content, target, 1 << 20)
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(f"{packed}: not a whole gzip file ({error}); download it again", "truncated") from error


def read(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """uint8 images (n, 1, 28, 28) and int64 labels (n,)."""
    stem = SPLITS[split]
    images = _read_idx(folder / f"{stem}-images-idx3-ubyte")
    labels = _read_idx(folder / f"{stem}-labels-idx1-ubyte")
    return images[:, None], labels.long()


def _read_idx(path: Path) -> Tensor:
    content = np.fromfile(path, dtype=np.uint8)
    dimensions = int(content[3]) if content.size >= 4 else 0
    start = 4 + 4 * dimensions
    shape = content[4:start].view(">u4").astype(np.int64)
    if dimensions == 0 or content[2] != 8 or content.size - start != shape.prod():
        raise DataError(f"{path}: not a whole idx file of bytes; fetch it again", "truncated")
    return torch.from_numpy(content[start:].reshape(tuple(shape)))
