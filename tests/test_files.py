from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from scalelong.files import atomic_folder, atomic_write


def test_folder_appears_whole(tmp_path: Path) -> None:
    home = tmp_path / "deep" / "set"
    with atomic_folder(home) as files:
        (files / "a").write_text("new")
        assert not home.exists()
    assert [path.name for path in home.iterdir()] == ["a"]
    assert list(home.parent.iterdir()) == [home]


def test_folder_replaces_an_older_one(tmp_path: Path) -> None:
    home = tmp_path / "set"
    home.mkdir()
    (home / "old").write_text("old")
    with atomic_folder(home) as files:
        (files / "new").write_text("new")
    assert [path.name for path in home.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [home]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, SystemExit])
def test_nothing_is_left_after_an_error(tmp_path: Path, error: type[BaseException]) -> None:
    home = tmp_path / "set"
    home.mkdir()
    (home / "good").write_text("kept")
    with pytest.raises(error), atomic_folder(home) as files:
        (files / "half").write_text("half")
        raise error
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["set", "set/good"]


def test_temporary_folders_of_a_killed_process_are_removed_after_a_day(tmp_path: Path) -> None:
    old, young = tmp_path / ".set-staging-old", tmp_path / ".set-staging-young"
    for folder in (old, young):
        folder.mkdir()
    long_ago = time.time() - 3 * 24 * 3600
    os.utime(old, (long_ago, long_ago))
    with atomic_folder(tmp_path / "set"):
        pass
    assert not old.exists()
    assert young.exists()


def test_file_appears_whole_and_an_error_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file [1]"
    with atomic_write(path) as first, atomic_write(path) as second:
        first.write(b"first")
        second.write(b"second")
        assert not path.exists()
    assert path.read_bytes() == b"first"  # which ended last
    with pytest.raises(KeyboardInterrupt), atomic_write(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"first"
    assert list(path.parent.iterdir()) == [path]


def test_temporary_files_of_a_killed_process_are_removed_after_a_day(tmp_path: Path) -> None:
    old, young = tmp_path / ".file [1]-staging-old", tmp_path / ".file [1]-staging-young"
    for file in (old, young):
        file.touch()
    long_ago = time.time() - 3 * 24 * 3600
    os.utime(old, (long_ago, long_ago))
    with atomic_write(tmp_path / "file [1]"):
        pass
    assert not old.exists()
    assert young.exists()
