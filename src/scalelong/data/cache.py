"""Where fetched data lives, and how a folder or a file comes to be there: whole, or not at all."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import IO, NamedTuple

from scalelong.data.errors import Kind

logger = logging.getLogger(__name__)

_STALE_SECONDS = 24 * 3600.0


class Expected(NamedTuple):
    """What a file must be."""

    size: int
    digest: str


@dataclass(frozen=True)
class Problem:
    """One bad file of a source, as `check` lists them."""

    path: str
    kind: Kind
    message: str


def cache_dir(root: str | Path | None = None) -> Path:
    """`root`, else $SCALELONG_DATA, else the user's cache folder."""
    chosen = root or os.environ.get("SCALELONG_DATA")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "scalelong"


def file_digest(path: Path, algorithm: str) -> str:
    """Hex digest of a file's bytes."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def bad_files(folder: Path, expected: Mapping[str, Expected], algorithm: str, remedy: str) -> list[Problem]:
    """Every file of `folder` that is missing, truncated, unreadable or has the wrong hash."""
    problems = []
    for name, want in expected.items():
        path = folder / name
        found = _problem_of(path, want, algorithm)
        if found:
            kind, detail = found
            problems.append(Problem(str(path), kind, f"{path}: {kind} ({detail}); {remedy}"))
    return problems


def _problem_of(path: Path, want: Expected, algorithm: str) -> tuple[Kind, str] | None:
    try:
        size = path.stat().st_size
        if size < want.size:
            return "truncated", f"{size} of {want.size} bytes"
        digest = file_digest(path, algorithm)
    except FileNotFoundError:
        return "missing", "no such file"
    except OSError as error:
        return "unreadable", error.strerror or str(error)
    return None if digest == want.digest else ("wrong hash", f"{algorithm} {digest}, expected {want.digest}")


@contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which gets its name once it is whole; processes that write the same one do not meet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}-staging-"
    _remove_stale(path.parent, prefix)
    stage = path.with_name(prefix + secrets.token_hex(4))
    try:
        with stage.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        stage.replace(path)
    finally:
        stage.unlink(missing_ok=True)


@contextmanager
def staged(home: Path) -> Iterator[tuple[Path, Path]]:
    """Two empty folders, files and scratch; on success `files` becomes `home`, and nothing else stays in any case."""
    home.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{home.name}-staging-"
    _remove_stale(home.parent, prefix)
    stage = Path(tempfile.mkdtemp(prefix=prefix, dir=home.parent))
    try:
        files, scratch = stage / "files", stage / "scratch"
        files.mkdir()
        scratch.mkdir()
        yield files, scratch
        _flush(files)
        _install(files, home, stage / "old")
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _install(files: Path, home: Path, old: Path) -> None:
    """Give the finished folder its name; what stood there (a bad copy, or another process's) moves aside."""
    try:
        files.replace(home)
    except OSError:
        if not home.exists():
            raise
        home.replace(old)
        files.replace(home)


def _flush(folder: Path) -> None:
    """Force the files to disk before they get their final name."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _remove_stale(parent: Path, prefix: str) -> None:
    """What processes left that were killed outright more than a day ago."""
    for path in parent.glob(escape(prefix) + "*"):
        with suppress(FileNotFoundError):  # another process may just have finished
            if time.time() - path.stat().st_mtime <= _STALE_SECONDS:
                continue
            logger.info("removing what an interrupted process left: %s", path)
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
