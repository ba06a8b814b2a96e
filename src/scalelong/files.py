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

    >>> with atomic_write(Path("out.bin")) as file:
    ...     _ = file.write(b"data")
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    stage = path.with_name(_staging_prefix(path) + secrets.token_hex(4))
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
    """Make a temporary folder that is synced and replaces `home` on success and is removed on failure."""
    home.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=_staging_prefix(home), dir=home.parent))
    try:
        files = stage / "files"
        files.mkdir()
        yield files
        for path in files.rglob("*"):
            fsync(path)
        try:
            files.replace(home)
        except OSError:
            if not home.exists():
                raise
            home.replace(stage / "old")  # a bad copy, or another process's
            files.replace(home)
        fsync(home.parent)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def fsync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk."""
    if os.name == "nt":
        return  # Windows syncs neither folders nor files that are open for reading
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path, algorithm: str = "sha256") -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


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
