from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from scalelong.data import DataError, load_source
from scalelong.data.loader import DeviceLoader, StreamLoader

from .conftest import noise

ROWS = 5


def write(folder: Path, name: str, seed: int, labels: Any = None, save: Any = np.savez, **changes: Any) -> Path:
    """One batch as the official files have it: rows of planes, labels from 1, the mean image."""
    labels = np.arange(1, ROWS + 1) * 200 if labels is None else labels
    arrays = {"data": noise(seed, ROWS, 12288), "labels": np.asarray(labels), "mean": np.zeros(12288)} | changes
    save(folder / name, **arrays)
    return folder / name


@pytest.fixture
def batches(tmp_path: Path) -> Path:
    folder = tmp_path / "imagenet64"
    folder.mkdir()
    for number in (1, 2, 10):
        write(folder, f"train_data_batch_{number}.npz", number)
    write(folder, "val_data.npz", 99)
    return folder


def test_batches_are_read_in_their_order_with_labels_from_zero(batches: Path) -> None:
    source = load_source(f"imagenet64:{batches}")
    assert (len(source), source.shape, source.num_classes) == (3 * ROWS, (3, 64, 64), 1000)
    assert source.labels is not None
    assert source.labels.tolist() == [199, 399, 599, 799, 999] * 3
    for item, (seed, row) in {0: (1, 0), 7: (2, 2), 14: (10, 4)}.items():
        assert np.array_equal(source.read(item).numpy(), noise(seed, ROWS, 12288)[row].reshape(3, 64, 64))
    assert len(load_source(f"imagenet64:{batches}", split="val")) == ROWS
    assert load_source(f"imagenet64:{batches}", image_size=16).read(3).shape == (3, 16, 16)
    with pytest.raises(DataError, match="has no 'test'; it has train, val"):
        load_source(f"imagenet64:{batches}", split="test")
    (batches / "map_clsloc.txt").write_text("n02119789 200 kit_fox\n")
    assert load_source(f"imagenet64:{batches}").class_names[199] == "kit fox"


def test_a_compressed_batch_is_unpacked_once_and_the_loaders_agree(batches: Path, tmp_path: Path) -> None:
    stored = load_source(f"imagenet64:{batches}")
    squeezed = tmp_path / "squeezed"
    squeezed.mkdir()
    for number in (1, 2, 10):
        write(squeezed, f"train_data_batch_{number}.npz", number, save=np.savez_compressed)
    packed = load_source(f"imagenet64:{squeezed}", root=tmp_path / "cache")
    assert packed.fingerprint == stored.fingerprint
    kept = list((tmp_path / "cache" / "imagenet64").glob("*.npy"))
    assert len(kept) == 3
    times = [file.stat().st_mtime_ns for file in kept]
    load_source(f"imagenet64:{squeezed}", root=tmp_path / "cache")
    assert [file.stat().st_mtime_ns for file in kept] == times
    index = torch.arange(20)
    streamed = StreamLoader(packed, seed=1, workers=0).batch(index)
    resident = DeviceLoader(stored, seed=1).batch(index)
    assert torch.equal(streamed.images, resident.images)


def test_a_batch_written_column_by_column_is_the_same(batches: Path, tmp_path: Path) -> None:
    turned = tmp_path / "turned"
    turned.mkdir()
    for number in (1, 2, 10):
        write(turned, f"train_data_batch_{number}.npz", number, data=np.asfortranarray(noise(number, ROWS, 12288)))
    source, expected = (load_source(f"imagenet64:{folder}") for folder in (turned, batches))
    assert torch.equal(source.read_many(range(15)), expected.read_many(range(15)))
    assert source.fingerprint == expected.fingerprint


def test_bad_batches_are_refused_by_name(batches: Path) -> None:
    def refused(match: str) -> None:
        with pytest.raises(DataError, match=match):
            load_source(f"imagenet64:{batches}")

    write(batches, "train_data_batch_2.npz", 2, labels=[1, 2, 1001, 4, 0])
    refused(r"batch_2\.npz: row 2 has label 1001, expected 1 \.\. 1000 \(2 such row")
    write(batches, "train_data_batch_2.npz", 2, labels=[1, 2])
    refused("2 labels for 5 images")
    write(batches, "train_data_batch_2.npz", 2, data=noise(2, ROWS, 3072))
    refused(r"data is uint8 \(5, 3072\), expected uint8 \(n, 12288\)")
    np.savez(batches / "train_data_batch_2.npz", labels=np.ones(3))
    refused("not a whole npz file .*data.npy")
    good = write(batches, "train_data_batch_2.npz", 2).read_bytes()
    (batches / "train_data_batch_2.npz").write_bytes(good[: len(good) // 2])
    refused("not a whole npz file")
    with zipfile.ZipFile(batches / "train_data_batch_2.npz", "w") as archive:
        archive.writestr("data.npy", b"\x93NUMPY nothing")
    refused("not a whole npz file")


def test_class_folders(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for label in ("n01440764", "n02119789"):
            (tmp_path / split / label).mkdir(parents=True)
            Image.fromarray(noise(1, 80, 70, 3)).save(tmp_path / split / label / "a.png")
    source = load_source(f"imagenet64:{tmp_path}", split="val")
    assert (len(source), source.shape, source.class_names) == (2, (3, 64, 64), ["n01440764", "n02119789"])
