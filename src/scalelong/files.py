"""Atomic writes: a file or folder appears under its name complete, or not at all."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

_STALE_SECONDS = 24 * 3600.0


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that is synced and renamed to `path` on success and removed on failure.

    Concurrent writers of one path do not see each other's temporary files.

    >>> with atomic_write(Path("out.bin")) as file:
    ...     _ = file.write(b"data")
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = _staging_prefix(path)
    stage = path.with_name(prefix + secrets.token_hex(4))
    try:
        with stage.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        stage.replace(path)
    finally:
        stage.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_write(path) as file:
        file.write(text.encode())


@contextmanager
def atomic_folder(home: Path) -> Iterator[Path]:
    """Make a temporary folder that is synced and renamed to `home` on success and removed on failure.

    A folder that already exists under that name is replaced.
    """
    home.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=_staging_prefix(home), dir=home.parent))
    try:
        files = stage / "files"
        files.mkdir()
        yield files
        for path in files.rglob("*"):
            fsync(path)
        _install(files, home, stage / "old")
        fsync(home.parent)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def fsync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path, algorithm: str = "sha256") -> str:
    """Hex digest of a file's bytes."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _install(files: Path, home: Path, old: Path) -> None:
    """Rename the finished folder; an existing one (a bad copy, or another process's) moves aside."""
    try:
        files.replace(home)
    except OSError:
        if not home.exists():
            raise
        home.replace(old)
        files.replace(home)


def _staging_prefix(path: Path) -> str:
    """Prefix of the temporary names for `path`; those that a killed process left over a day ago are removed."""
    prefix = f".{path.name}-staging-"
    for left in path.parent.glob(escape(prefix) + "*"):
        with suppress(FileNotFoundError):  # another process may just have finished
            if time.time() - left.stat().st_mtime <= _STALE_SECONDS:
                continue
            logger.info("removing a temporary of an interrupted process: %s", left)
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink()
    return prefix
