from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from scalelong.data import DataError, load_source
from scalelong.data.base import Request
from scalelong.data.folder import FolderSource

from .conftest import noise


def save(path: Path, height: int = 8, width: int = 8, seed: int = 0) -> np.ndarray:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = noise(seed, height, width, 3)
    Image.fromarray(pixels).save(path)
    return pixels


def test_sub_folders_are_classes(image_folder: Path) -> None:
    source = FolderSource(Request(str(image_folder), 8))
    assert source.class_names == ["cat", "dog"]
    assert source.labels is not None
    assert source.files == sorted(source.files)
    for name, label in zip(source.files, source.labels.tolist(), strict=True):
        assert source.class_names[label] == name.split("/")[0]
    image = source.read(5)
    assert (image.dtype, tuple(image.shape)) == (torch.uint8, (3, 8, 8))
    assert source.images is None  # streamed


def test_one_flat_folder_has_no_classes(tmp_path: Path) -> None:
    pixels = [save(tmp_path / f"{name}.png", seed=seed) for seed, name in enumerate("ba")]
    (tmp_path / "notes.txt").write_text("ignored")
    (tmp_path / "._a.png").write_text("ignored too")
    source = FolderSource(Request(str(tmp_path)))
    assert (source.num_classes, source.labels, source.files) == (0, None, ["a.png", "b.png"])
    assert np.array_equal(source.read(1).permute(1, 2, 0).numpy(), pixels[0])
    shutil.move(tmp_path / "b.png", tmp_path / "a.png")
    nested = tmp_path / "only"
    nested.mkdir()
    shutil.move(tmp_path / "a.png", nested / "a.png")
    assert FolderSource(Request(str(tmp_path))).num_classes == 0  # one sub-folder says nothing


def test_image_files_that_are_not_read_are_reported(tmp_path: Path, caplog) -> None:
    save(tmp_path / "a.png")
    for name in ("b.HEIC", "c.heic", "d.avif", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    assert FolderSource(Request(str(tmp_path))).files == ["a.png"]
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        "1 .avif, 2 .heic not read; convert them to PNG or JPEG to use them"
    ]


def test_splits(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("val", 1)):
        for number in range(count):
            save(tmp_path / split / "x" / f"{number}.png")
            save(tmp_path / split / "y" / f"{number}.png")
    assert len(FolderSource(Request(str(tmp_path)))) == 6
    validation = FolderSource(Request(str(tmp_path), split="val"))
    assert (len(validation), validation.class_names) == (2, ["x", "y"])
    with pytest.raises(DataError, match=r"data\.split: .* has no 'test'; it has train, val"):
        FolderSource(Request(str(tmp_path), split="test"))
    with pytest.raises(DataError, match="no sub-folder 'test'"):
        FolderSource(Request(str(tmp_path / "train"), split="test"))


def test_without_a_size_all_images_must_agree(tmp_path: Path) -> None:
    save(tmp_path / "a.png", 6, 9)
    save(tmp_path / "b.png", 6, 8)
    source = FolderSource(Request(str(tmp_path)))
    assert source.shape == (3, 6, 9)
    assert source.read(0).shape == (3, 6, 9)
    with pytest.raises(DataError, match=r"b\.png: 8 x 6 pixels.*set data\.image_size"):
        source.read(1)
    assert FolderSource(Request(str(tmp_path), 4)).read(1).shape == (3, 4, 4)


def test_fingerprint_is_the_contents_not_the_place(tmp_path: Path) -> None:
    save(tmp_path / "one" / "a.png")
    save(tmp_path / "one" / "b.png", seed=1)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    first, second = (FolderSource(Request(str(tmp_path / name), 8)).fingerprint for name in ("one", "two"))
    assert first == second
    assert FolderSource(Request(str(tmp_path / "one"), 4)).fingerprint != first
    content = bytearray((tmp_path / "two" / "b.png").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "two" / "b.png").write_bytes(content)  # another picture of the same size
    assert FolderSource(Request(str(tmp_path / "two"), 8)).fingerprint != first
    save(tmp_path / "two" / "b.png", 9, 9, seed=1)
    assert FolderSource(Request(str(tmp_path / "two"), 8)).fingerprint != first


def test_an_archive_is_no_folder(tmp_path: Path) -> None:
    archive = tmp_path / "images.zip"
    archive.touch()
    for name in (f"folder:{archive}", str(archive)):
        with pytest.raises(DataError, match=r"images\.zip is a file; unpack it into a folder, or use webdataset:"):
            load_source(name, image_size=8)


def test_errors_name_the_file_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not an existing folder; check the path"):
        FolderSource(Request(str(tmp_path / "nowhere")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty holds no images .*or use hf:"):
        FolderSource(Request(str(tmp_path / "empty")))
    save(tmp_path / "mixed" / "top.png")
    save(tmp_path / "mixed" / "class" / "a.png")
    with pytest.raises(DataError, match=r"top\.png: an image next to the subfolder 'class'"):
        FolderSource(Request(str(tmp_path / "mixed")))
    save(tmp_path / "bad" / "a.png")
    (tmp_path / "bad" / "b.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"b\.png: unreadable image .*replace or delete"):
        FolderSource(Request(str(tmp_path / "bad"))).read(1)


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    save(tmp_path / "elsewhere" / "a.png")
    save(tmp_path / "set" / "x" / "b.png")
    (tmp_path / "set" / "y").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "set" / "x" / "loop").symlink_to(tmp_path / "set")
    assert FolderSource(Request(str(tmp_path / "set"))).files == ["x/b.png", "y/a.png"]
