from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from scalelong.data.cache import Expected, bad_files, cache_dir, staged, written_whole


def test_cache_folder_is_asked_for_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCALELONG_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / ".cache" / "scalelong"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "scalelong"
    monkeypatch.setenv("SCALELONG_DATA", str(tmp_path / "data"))
    assert cache_dir() == tmp_path / "data"
    assert cache_dir(tmp_path / "given") == tmp_path / "given"


def test_staged_folder_appears_whole(tmp_path: Path) -> None:
    home = tmp_path / "deep" / "set"
    with staged(home) as (files, scratch):
        (files / "a").write_text("new")
        (scratch / "download").write_text("x")
        assert not home.exists()
    assert [path.name for path in home.iterdir()] == ["a"]
    assert list(home.parent.iterdir()) == [home]


def test_staged_folder_replaces_what_was_there(tmp_path: Path) -> None:
    home = tmp_path / "set"
    home.mkdir()
    (home / "old").write_text("old")
    with staged(home) as (files, _):
        (files / "new").write_text("new")
    assert [path.name for path in home.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [home]


@pytest.mark.parametrize("blow", [KeyboardInterrupt, OSError, SystemExit])
def test_nothing_is_left_after_a_blow(tmp_path: Path, blow: type[BaseException]) -> None:
    home = tmp_path / "set"
    home.mkdir()
    (home / "good").write_text("kept")
    with pytest.raises(blow), staged(home) as (files, _):
        (files / "half").write_text("half")
        raise blow
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["set", "set/good"]


def test_remains_of_a_killed_fetch_go_after_a_day(tmp_path: Path) -> None:
    old, young = tmp_path / ".set-staging-old", tmp_path / ".set-staging-young"
    for folder in (old, young):
        folder.mkdir()
    long_ago = time.time() - 3 * 24 * 3600
    os.utime(old, (long_ago, long_ago))
    with staged(tmp_path / "set"):
        pass
    assert not old.exists()
    assert young.exists()


def test_a_file_appears_whole_and_a_blow_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file [1]"
    with written_whole(path) as first, written_whole(path) as second:
        first.write(b"first")
        second.write(b"second")
        assert not path.exists()
    assert path.read_bytes() == b"first"  # which ended last
    with pytest.raises(KeyboardInterrupt), written_whole(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"first"
    assert list(path.parent.iterdir()) == [path]


def test_remains_of_a_killed_writer_go_after_a_day(tmp_path: Path) -> None:
    old, young = tmp_path / ".file [1]-staging-old", tmp_path / ".file [1]-staging-young"
    for file in (old, young):
        file.touch()
    long_ago = time.time() - 3 * 24 * 3600
    os.utime(old, (long_ago, long_ago))
    with written_whole(tmp_path / "file [1]"):
        pass
    assert not old.exists()
    assert young.exists()


def test_bad_files_lists_all_of_them(tmp_path: Path) -> None:
    good = b"as it should be"
    want = Expected(len(good), hashlib.sha256(good).hexdigest())
    (tmp_path / "good").write_bytes(good)
    (tmp_path / "short").write_bytes(good[:3])
    (tmp_path / "changed").write_bytes(good[::-1])
    (tmp_path / "longer").write_bytes(good + b"!")
    (tmp_path / "folder").mkdir()
    names = ["good", "short", "changed", "gone", "longer", "folder"]
    found = bad_files(tmp_path, dict.fromkeys(names, want), "sha256", "do this")
    kinds = {Path(problem.path).name: problem.kind for problem in found}
    assert kinds == {
        "short": "truncated",
        "changed": "wrong hash",
        "gone": "missing",
        "longer": "wrong hash",
        "folder": "unreadable",
    }
    assert all(problem.path in problem.message and problem.message.endswith("do this") for problem in found)
