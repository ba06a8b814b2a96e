from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from scalelong.data import DataError, fashion_mnist

from .conftest import noise


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def idx_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    for stem, count in (("train", 7), ("t10k", 3)):
        (folder / f"{stem}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(noise(count, count, 28, 28))))
        (folder / f"{stem}-labels-idx1-ubyte").write_bytes(idx(np.arange(count, dtype=np.uint8)))
    return folder


def test_plain_and_packed_files_are_read(idx_folder: Path, tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    fashion_mnist.unpack(idx_folder, files)
    assert sorted(path.name for path in files.iterdir()) == sorted(fashion_mnist.FILES)
    images, labels = fashion_mnist.read(files, "test")
    assert np.array_equal(images[:, 0].numpy(), noise(3, 3, 28, 28))
    assert labels.tolist() == [0, 1, 2]
    assert fashion_mnist.read(files, "train")[0].shape == (7, 1, 28, 28)


def test_broken_files_are_named(idx_folder: Path, tmp_path: Path) -> None:
    packed = idx_folder / "t10k-images-idx3-ubyte.gz"
    packed.write_bytes(packed.read_bytes()[:100])
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\.gz: not a whole gzip"):
        fashion_mnist.unpack(idx_folder, tmp_path)
    for content in (b"", b"\0\0\x08", idx(noise(0, 3, 28, 28))[:-1]):
        (tmp_path / "t10k-images-idx3-ubyte").write_bytes(content)
        with pytest.raises(DataError, match="not a whole idx file"):
            fashion_mnist.read(tmp_path, "test")
    with pytest.raises(DataError, match="expected the folder"):
        fashion_mnist.unpack(idx_folder / "nothing", tmp_path)
