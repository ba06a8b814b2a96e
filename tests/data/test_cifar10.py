from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scalelong.data import DataError, cifar10

from .conftest import RECORDS


def make(folder: Path) -> Path:
    files = folder / "files"
    files.mkdir()
    return files


def assert_same_files(one: Path, other: Path) -> None:
    assert sorted(path.name for path in other.iterdir()) == sorted(cifar10.FILES)
    for name in cifar10.FILES:
        assert (one / name).read_bytes() == (other / name).read_bytes()


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def npm_archive(path: Path, bins: Path) -> None:
    """The npm package's layout: a row per image, a column per pixel; labels as JSON."""
    labels = []
    with tarfile.open(path, "w:gz") as archive:
        for name in cifar10.FILES:
            records = np.frombuffer((bins / name).read_bytes(), np.uint8).reshape(RECORDS, 3073)
            labels.append(records[:, 0].tolist())
            png = io.BytesIO()
            Image.fromarray(np.stack([records[:, 1 + 1024 * c : 1025 + 1024 * c] for c in range(3)], -1)).save(
                png, "PNG"
            )
            add(archive, f"package/{Path(name).stem}.png", png.getvalue())
        add(
            archive,
            "package/train_lables.json",
            json.dumps([label for batch in labels[:5] for label in batch]).encode(),
        )
        add(archive, "package/test_lables.json", json.dumps(labels[5]).encode())


def test_read_gives_planes_and_labels(small_cifar: Path) -> None:
    images, labels = cifar10.read(small_cifar, "train")
    assert images.shape == (5 * RECORDS, 3, 32, 32)
    content = (small_cifar / "data_batch_2.bin").read_bytes()
    assert labels[RECORDS + 3] == content[3 * 3073]
    assert images[RECORDS + 3, 1, 0, 2] == content[3 * 3073 + 1 + 1024 + 2]
    assert len(cifar10.read(small_cifar, "test")[0]) == RECORDS


def test_half_a_record_is_refused(small_cifar: Path) -> None:
    path = small_cifar / "test_batch.bin"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match=r"test_batch\.bin: not whole records"):
        cifar10.read(small_cifar, "test")


def test_folder_archive_and_npm_package_give_the_same_files(small_cifar: Path, tmp_path: Path) -> None:
    canonical, package = tmp_path / "cifar-10-binary.tar.gz", tmp_path / "package.tgz"
    with tarfile.open(canonical, "w:gz") as archive:
        archive.add(small_cifar, "cifar-10-batches-bin")
        add(archive, "cifar-10-batches-bin/readme.html", b"<html>")
    npm_archive(package, small_cifar)
    for number, source in enumerate([small_cifar, small_cifar.parent, canonical, package]):
        (tmp_path / str(number)).mkdir()
        files = make(tmp_path / str(number))
        cifar10.unpack(source, files)
        assert_same_files(small_cifar, files)


def test_archive_cannot_write_elsewhere(small_cifar: Path, tmp_path: Path) -> None:
    evil = tmp_path / "evil.tar"
    with tarfile.open(evil, "w") as archive:
        add(archive, "../../outside/test_batch.bin", b"x")
        add(archive, "../../outside/other.txt", b"x")
        link = tarfile.TarInfo("data_batch_1.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(link)
    files = make(tmp_path)
    cifar10.unpack(evil, files)
    assert [path.name for path in files.iterdir()] == ["test_batch.bin"]
    assert not (tmp_path.parent / "outside").exists()


def test_pickled_version_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(source, "w:gz") as archive:
        add(archive, "cifar-10-batches-py/data_batch_1", b"not opened")
    with pytest.raises(DataError, match="pickled Python version; take cifar-10-binary"):
        cifar10.unpack(source, make(tmp_path))


def test_torn_archive_is_named(small_cifar: Path, tmp_path: Path) -> None:
    source = tmp_path / "torn.tar.gz"
    with tarfile.open(source, "w:gz") as archive:
        archive.add(small_cifar, "cifar-10-batches-bin")
    source.write_bytes(source.read_bytes()[: source.stat().st_size // 2])
    with pytest.raises(DataError, match=r"torn\.tar\.gz: not a whole tar archive"):
        cifar10.unpack(source, make(tmp_path))
