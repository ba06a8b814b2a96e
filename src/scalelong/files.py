"""Atomic writes, safe opening inside a folder, and manifests of hashes.

A file or folder appears under its final name only when it is complete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import IO, Any

from scalelong.errors import CheckpointError, DamagedFileError, UnsafePathError, WriteError
from scalelong.failpoints import failpoint

logger = logging.getLogger(__name__)

LOCK = ".lock"  # held by the process that writes into a folder
MANIFEST = "manifest.json"  # the files of a checkpoint, save or export, and their hashes
_LARGEST_JSON = 2**28  # bytes
_CHECKED = frozenset({".py", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npy", ".npz"})
_STALE_SECONDS = 24 * 3600.0


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that is synced and renamed to `path` on success and removed on failure.

    >>> with atomic_write(Path("out.bin")) as file:
    ...     _ = file.write(b"data")
    """
    if path.is_dir():
        raise WriteError(f"{path}: is a folder; give the name of a file")
    with _writing(path):
        stage = path.with_name(_staging_prefix(path) + secrets.token_hex(4))
        try:
            with stage.open("xb") as file:
                mode = os.fstat(file.fileno()).st_mode
                yield file
            stage.chmod(stat.S_IMODE(mode))  # safetensors replaces the file by one that only its owner can read
            fsync(stage)
            stage.replace(path)
        finally:
            stage.unlink(missing_ok=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Create the parents of `path` and remove them again on error; disk errors become a WriteError."""
    missing = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"{path}: cannot be written ({error.strerror}: {error.filename})") from error
    try:
        yield
    except BaseException as error:
        free = f"{shutil.disk_usage(path.parent).free / 1e6:.1f} MB are free"
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()
        if isinstance(error, Exception) and (code := disk_error(error)):
            raise WriteError(f"{path}: cannot be written ({os.strerror(code)}; {free})") from error
        raise


def disk_error(error: Exception) -> int:
    """The errno of a full or failing disk, also for errors raised by safetensors; 0 for other errors."""
    said = re.search(r"os error (\d+)", str(error))
    code = int(said[1]) if said else getattr(error, "errno", None)
    return code if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO) else 0


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_write(path) as file:
        file.write(text.encode())


@contextmanager
def atomic_folder(home: Path) -> Iterator[Path]:
    """Make a temporary folder that is synced and replaces `home` on success and is removed on failure."""
    with _writing(home):
        stage = Path(tempfile.mkdtemp(prefix=_staging_prefix(home), dir=home.parent))
        try:
            files = stage / "files"
            files.mkdir()
            yield files
            for path in files.rglob("*"):
                fsync(path)
            failpoint("save.before_rename")
            try:
                files.replace(home)
            except OSError:
                if not home.exists():
                    raise
                home.replace(stage / "old")  # a bad copy, or another process's; `remove_leftovers` puts it back
                failpoint("save.between_renames")
                files.replace(home)
            failpoint("save.after_rename")
            fsync(home.parent)
        finally:
            shutil.rmtree(stage, ignore_errors=True)


# ----------------------------------------------------------------------------------------------- inside a run's folder


def inside(folder: Path, *names: str) -> Path:
    """Return folder/name/...; raise if a name escapes the folder or a symbolic link is on the path.

    >>> inside(Path("run"), "checkpoints", "../../other")
    Traceback (most recent call last):
    scalelong.errors.UnsafePathError: '../../other' is not the name of a file in run/checkpoints; ...
    """
    path = Path(folder)
    for name in names:
        if name in ("", ".", "..") or not {"/", "\\", "\0"}.isdisjoint(name):
            raise UnsafePathError(f"{name!r} is not the name of a file in {path}; names with / or .. are refused")
        path = path / name
        if path.is_symlink():
            raise UnsafePathError(
                f"{path}: is a symbolic link, which may lead out of {folder}; put the file itself there"
            )
    return path


def open_inside(folder: Path, *names: str, mode: str = "r") -> IO[Any]:
    """Open a regular file in a run folder for reading or appending, with the checks of `inside`."""
    path = inside(folder, *names)

    def opener(name: str, flags: int) -> int:  # nonblocking: a pipe is refused, not awaited
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)

    binary = "b" in mode
    file = open(path, mode, encoding=None if binary else "utf-8", errors=None if binary else "replace", opener=opener)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise UnsafePathError(f"{path}: is not a regular file; remove it")
    return file


def lock_folder(folder: Path, doing: str = "training") -> IO[str]:
    """Lock `folder` until the returned file is closed or this process ends; raise if another process holds the lock."""
    import fcntl  # Unix only, as is training

    lock = open_inside(folder, LOCK, mode="a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise RuntimeError(f"out: another process is {doing} into {folder}; wait for it or stop it") from None
    mine = weakref.ref(lock)

    def close() -> None:  # a worker that outlives this process must not keep the lock
        if (inherited := mine()) is not None:
            inherited.close()

    os.register_at_fork(after_in_child=close)
    return lock


def check_writable(folder: Path, key: str = "out", remedy: str = "choose another folder") -> None:
    """Raise if `folder` cannot be created or written to; errors name `key`."""
    there = _existing(folder)
    if not there.is_dir():
        raise ValueError(f"{key}: cannot create {folder}: {there} is a file; {remedy}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"{key}: no permission to write to {there}; {remedy}")


def _existing(folder: Path) -> Path:
    """The folder itself, or its nearest parent that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def check_space(folder: Path, needed: float, what: str) -> None:
    """Raise if the disk of `folder`, which need not exist yet, has less than `needed` bytes free."""
    if (free := shutil.disk_usage(_existing(folder)).free) < needed:
        raise OSError(f"out: {folder} has {_size(free)} free, {what} {_size(needed)}; free some or choose another disk")


def _size(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def read_json(folder: Path, *names: str) -> Any:
    """Read a JSON file in a folder; raise a DamagedFileError if it is invalid."""
    path = inside(folder, *names)
    try:
        with open_inside(folder, *names, mode="rb") as file:
            content = file.read(_LARGEST_JSON + 1)
        if len(content) > _LARGEST_JSON:
            raise ValueError(f"more than {_LARGEST_JSON:,} bytes")
        return json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, (FileNotFoundError, UnsafePathError)):
            raise
        reason = "empty" if path.is_file() and not path.stat().st_size else str(error).partition("\n")[0]
        raise DamagedFileError(f"{path}: is not readable JSON ({reason}); restore it") from error


@contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Convert safetensors' errors into a DamagedFileError that names the file."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        reason = str(error).partition("\n")[0]
        raise DamagedFileError(f"{path}: is not a whole safetensors file ({reason}); restore it") from error


# ------------------------------------------------------------------------------------------------------------- hashes


def write_manifest(folder: Path) -> None:
    """Write the sha256 of every file below `folder` into its manifest.json."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    hashes = {path.relative_to(folder).as_posix(): file_digest(path) for path in files}
    write_text(folder / MANIFEST, json.dumps(hashes, indent=1) + "\n")


def check_manifest(folder: Path) -> bool:
    """Raise a CheckpointError for the first file that differs from the manifest; return False if there is no manifest."""
    if not os.path.lexists(folder / MANIFEST):
        return False  # written by an older version
    hashes = read_json(folder, MANIFEST)
    if not isinstance(hashes, dict) or not hashes or not all(isinstance(value, str) for value in hashes.values()):
        raise CheckpointError(f"{folder / MANIFEST}: is damaged (no table of hashes); restore it")
    for name, digest in hashes.items():
        path = inside(folder, *name.split("/"))
        if not path.is_file() or file_digest(path) != digest:
            what = "has another sha256 than" if path.is_file() else "is missing, but is listed in"
            raise CheckpointError(f"{path}: {what} {MANIFEST}; it was damaged or changed, restore it")
    for path in sorted(folder.rglob("*")):
        if path.suffix in _CHECKED and path.relative_to(folder).as_posix() not in hashes:
            raise CheckpointError(f"{path}: is not listed in {MANIFEST}; code or weights were added, remove them")
    return True


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


def remove_leftovers(folder: Path) -> None:
    """Remove leftovers of killed writers from a folder without other writers, and restore what they were replacing."""
    for left in folder.glob(".*-staging-*"):
        home = folder / left.name[1:].rpartition("-staging-")[0]
        if (left / "old").is_dir() and not home.exists():
            (left / "old").replace(home)
        logger.info("removing a temporary of an interrupted process: %s", left)
        _remove(left)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _staging_prefix(path: Path) -> str:
    """Prefix of temporary names for `path`; also removes leftovers older than a day."""
    prefix = f".{path.name}-staging-"
    for left in path.parent.glob(escape(prefix) + "*"):
        with suppress(FileNotFoundError):  # another process may just have finished
            if time.time() - left.stat().st_mtime <= _STALE_SECONDS:
                continue
            logger.info("removing a temporary of an interrupted process: %s", left)
            _remove(left)
    return prefix
