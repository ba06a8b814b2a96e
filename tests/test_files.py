from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from scalelong.errors import CheckpointError, DamagedFileError, UnsafePathError, WriteError
from scalelong.files import (
    atomic_folder,
    atomic_write,
    check_manifest,
    inside,
    open_inside,
    read_json,
    write_manifest,
    write_text,
)


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


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a\\b", "a\0b"])
def test_names_that_lead_out_of_a_folder_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsafePathError, match="is not the name of a file"):
        inside(tmp_path, name)


def test_links_and_pipes_inside_a_folder_are_not_opened(tmp_path: Path) -> None:
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    (run / "real").mkdir(parents=True)
    (run / "link").symlink_to(victim)
    (run / "folder").symlink_to(tmp_path)
    os.mkfifo(run / "pipe")
    for names in (("link",), ("folder", "victim")):
        with pytest.raises(UnsafePathError, match="symbolic link"):
            open_inside(run, *names, mode="a")
    for name in ("pipe", "real"):
        with pytest.raises((UnsafePathError, OSError)):
            open_inside(run, name, mode="r")
    with open_inside(run, "real", "new", mode="a") as file:
        file.write("x")
    assert (victim.read_text(), (run / "real" / "new").read_text()) == ("precious", "x")


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, "\x00"])
def test_json_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DamagedFileError, match=r"a\.json: is not readable JSON"):
        read_json(tmp_path, "a.json")


def test_a_manifest_finds_what_changed_is_missing_or_was_added(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("a")
    assert not check_manifest(tmp_path)
    write_manifest(tmp_path)
    assert check_manifest(tmp_path)
    (tmp_path / "notes.txt").write_text("of people")
    assert check_manifest(tmp_path)
    (tmp_path / "sub" / "evil.py").write_text("")
    with pytest.raises(CheckpointError, match=r"evil\.py: is not listed"):
        check_manifest(tmp_path)
    (tmp_path / "sub" / "evil.py").unlink()
    (tmp_path / "sub" / "a.txt").write_text("b")
    with pytest.raises(CheckpointError, match=r"a\.txt: has another sha256"):
        check_manifest(tmp_path)
    (tmp_path / "sub" / "a.txt").unlink()
    with pytest.raises(CheckpointError, match=r"a\.txt: is missing"):
        check_manifest(tmp_path)


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    said = r"a\.bin: cannot be written \(No space left on device; .* MB are free"
    with pytest.raises(WriteError, match=said), atomic_write(tmp_path / "new" / "deep" / "a.bin"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(WriteError, match="folder: cannot be written"), atomic_folder(tmp_path / "new" / "folder"):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(KeyboardInterrupt), atomic_write(tmp_path / "new" / "a.bin"):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_tensors_are_as_readable_as_other_files(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "a")
    with atomic_write(tmp_path / "a.safetensors") as file:
        save_file({"a": torch.ones(2)}, file.name)
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "a.txt").stat().st_mode
