"""Real files, made here: folders of images and a small CIFAR-10 in its true layout."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scalelong.data import cifar10
from scalelong.data.download import DOWNLOADS, Expected

RECORDS = 12  # per file of the small CIFAR-10


def noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Two classes, 22 PNGs of several sizes and modes."""
    folder = tmp_path / "pictures"
    for number in range(22):
        home = folder / ("cat" if number % 3 else "dog")
        home.mkdir(parents=True, exist_ok=True)
        height, width = 9 + number, 14 + (number * 7) % 5
        if number % 4 == 0:
            image = Image.fromarray(noise(number, height, width))
        elif number % 4 == 1:
            image = Image.fromarray(noise(number, height, width, 4), "RGBA")
        else:
            image = Image.fromarray(noise(number, height, width, 3))
        image.save(home / f"{number:02d}.png")
    return folder


@pytest.fixture
def small_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the six .bin files with a few records each; the table of hashes is theirs for the test."""
    folder = tmp_path / "own" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    table = {}
    for number, name in enumerate(cifar10.FILES):
        records = noise(number, RECORDS, 1 + 3072)
        records[:, 0] %= 10
        content = records.tobytes()
        (folder / name).write_bytes(content)
        table[name] = Expected(len(content), hashlib.md5(content).hexdigest())
    monkeypatch.setattr(cifar10, "FILES", table)
    monkeypatch.setitem(DOWNLOADS, "cifar10", replace(DOWNLOADS["cifar10"], files=table))
    return folder
