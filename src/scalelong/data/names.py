"""The names a source can be asked for by."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Literal

from scalelong.data.errors import DataError

NAMED = ("cifar10", "digits", "emoji32", "fashion_mnist")
Kind = Literal["named", "folder", "hf", "hf-stream", "latents", "celeba", "imagenet64", "coco", "webdataset"]
PREFIXED: dict[str, Kind] = {
    "folder:PATH": "folder",
    "celeba:PATH": "celeba",
    "imagenet64:PATH": "imagenet64",
    "coco:PATH": "coco",
    "webdataset:PATTERN": "webdataset",
    "hf:NAME_OR_PATH": "hf",
    "hf-stream:NAME_OR_PATH": "hf-stream",
    "latents:PATH": "latents",
}
KNOWN = (*NAMED, *PREFIXED)


def parse_name(name: str) -> tuple[Kind, str]:
    """What kind of source a name means, and the name or path without its prefix."""
    prefix, _, rest = name.partition(":")
    kinds = {kind: kind for kind in PREFIXED.values()}
    if prefix in kinds and rest:
        return kinds[prefix], rest
    if name in NAMED:
        return "named", name
    if name and Path(name).expanduser().is_dir():
        return "folder", name
    raise DataError(_unknown(name))


def _unknown(name: str) -> str:
    if any(separator in name for separator in ("/", "\\")) or name.startswith(("~", ".")):
        return f"data.name: {name!r} is not an existing folder; check the path. Known: {', '.join(KNOWN)}"
    near = difflib.get_close_matches(name.lower(), NAMED, n=1, cutoff=0.3)
    guess = f"; did you mean {near[0]!r}?" if near else "."
    return f"data.name: unknown {name!r}{guess} Known: {', '.join(KNOWN)}"
