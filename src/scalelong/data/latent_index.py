"""The index of encoded latents: hashes and the stored autoencoder."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalelong.backbones.autoencoder import Autoencoder, load_autoencoder
from scalelong.data.base import DataError, Device, reading
from scalelong.data.download import Expected, bad_files, read_json
from scalelong.errors import require_number
from scalelong.files import inside

INDEX = "index.json"
PLAN = "encoding.json"  # present until encoding has finished
ANNOTATIONS = "annotations.json"
AUTOENCODER = "autoencoder"
FORMAT = "scalelong-latents-1"
REMEDY = "run the same `scalelong data encode` again"


def read_index(folder: Path) -> dict[str, Any]:
    """The index of finished latents."""
    if not (folder / INDEX).is_file():
        if (folder / PLAN).is_file():
            raise DataError(f"data.name: {folder}: the encoding is not finished; {REMEDY} to continue")
        raise DataError(f"data.name: {folder}: not latents (no {INDEX}); check the path")
    index: Any = read_json(folder / INDEX, "encode again")
    with reading(f"{folder / INDEX}: is damaged", "encode again"):
        if index.get("format") != FORMAT:
            raise DataError(f"{folder / INDEX}: format {index.get('format')!r}, expected {FORMAT!r}; encode again")
        for shard in index["shards"]:
            inside(folder, shard["file"])
            require_number("count", shard["count"], 1, 10**9, whole=True)
            require_number("bytes", shard["bytes"], 1, 10**15, whole=True)
        for value in (*index["shape"], *index["pixels"]):
            require_number("shape", value, 1, 2**16, whole=True)
        for key in ("scale", "shift"):
            require_number(key, index[key], -1e6, 1e6)
        if not index["scale"] or len(index["shape"]) != 3 or len(index["pixels"]) != 3:
            raise ValueError("scale, shape or pixels")
        if index["count"] != sum(shard["count"] for shard in index["shards"]):
            raise ValueError(f"{index['count']} items, but its shards have another number")
        autoencoder, source = index["autoencoder"], index["source"]
        texts = (index["annotations"], autoencoder["sha256"], source["name"], source["split"])
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("annotations, autoencoder or source")
    return dict(index)


def index_digest(index: Mapping[str, Any]) -> str:
    """Fingerprint of latents: hash of the autoencoder and all files."""
    kept = {key: index[key] for key in ("shape", "scale", "shift", "annotations")}
    kept["autoencoder"] = index["autoencoder"]["sha256"]
    kept["shards"] = [shard["sha256"] for shard in index["shards"]]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def check_latents(folder: Path, index: Mapping[str, Any], hash_limit: float = math.inf) -> list[DataError]:
    """Every file that is missing, truncated or, up to `hash_limit` bytes in total, has a wrong hash."""
    expected = {shard["file"]: Expected(shard["bytes"], shard["sha256"]) for shard in index["shards"]}
    expected[ANNOTATIONS] = Expected(1, index["annotations"])
    hashed = sum(want.size for want in expected.values()) <= hash_limit
    return bad_files(folder, expected, f"{REMEDY} to make it anew", "sha256" if hashed else None)


def latent_autoencoder(folder: Path, index: Mapping[str, Any], device: Device = "cpu") -> Autoencoder:
    """The autoencoder stored with the latents, checked by its hash."""
    found = load_autoencoder(folder / AUTOENCODER, device, index["scale"])
    if found.digest != index["autoencoder"]["sha256"]:
        raise DataError(f"{folder / AUTOENCODER}: is another autoencoder than the latents were made with; restore it")
    return found
