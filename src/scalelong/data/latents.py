"""Latents of an autoencoder in shards, as `scalelong data encode` writes them.

Each item is stored as mean and log-variance, of the image and of its mirror image; a training sample is mean + standard
deviation x noise, the noise being a function of (seed, index).
Shapes: n items, B batch, C x h x w latents; stored (2 mirrored, 2 mean and log-variance, C, h, w) float32.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from scalelong.backbones.autoencoder import Autoencoder, load_autoencoder
from scalelong.data.base import DataError, Problem, Root, Source, checked_labels, gather_rows
from scalelong.data.download import Expected, bad_files
from scalelong.data.registry import Request, load_source, register
from scalelong.random import normal

PREFIX = "latents"
INDEX = "index.json"
PLAN = "encoding.json"
ANNOTATIONS = "annotations.json"
AUTOENCODER = "autoencoder"
TENSOR = "moments"
FORMAT = "scalelong-latents-1"
_REMEDY = "run the same `scalelong data encode` again to make the bad files anew"
_HASHED_ON_LOADING = 2**30  # bytes; larger sets are hashed by `scalelong data check` only


def _check(request: Request) -> list[Problem]:
    folder = Path(request.path).expanduser()
    try:
        index = read_index(folder)
        latent_autoencoder(folder, index)
    except (DataError, FileNotFoundError) as error:
        return [Problem(str(folder), str(error))]
    return check_latents(folder, index)


@register("latents:PATH", "latents of an autoencoder, written by `scalelong data encode`", check=_check)
class LatentSource(Source):
    """Latents sampled from the stored distributions and scaled to unit variance."""

    def __init__(self, request: Request) -> None:
        self.folder = Path(request.path).expanduser()
        self.name = f"{PREFIX}:{request.path}"
        self.index = read_index(self.folder)
        if request.image_size is not None:
            raise DataError(
                f"data.image_size: {self.name} are of {self.index['pixels'][1]} pixels already; leave it out, "
                "or encode the images again at that size"
            )
        split = self.index["source"]["split"]
        if request.split != split:
            raise DataError(f"data.split: {self.name} has {split!r} only, not {request.split!r}")
        problems = check_latents(self.folder, self.index, _HASHED_ON_LOADING)
        if problems:
            raise DataError(problems[0].message)
        notes = json.loads((self.folder / ANNOTATIONS).read_text())
        self.captions = notes["captions"]
        self.caption_counts = None if notes["caption_counts"] is None else torch.tensor(notes["caption_counts"])
        self.class_names = notes["class_names"]
        self.num_classes = len(self.class_names)
        labels = None if notes["labels"] is None else torch.tensor(notes["labels"])
        self.labels = checked_labels(labels, self.num_classes, self.name)
        channels, height, width = self.index["shape"]
        self.shape = (channels, height, width)
        self._starts = list(accumulate((shard["count"] for shard in self.index["shards"]), initial=0))
        self._shards: dict[int, Any] = {}

    def __len__(self) -> int:
        return int(self.index["count"])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_shards": {}}  # each worker maps the files itself

    @property
    def stored(self) -> tuple[tuple[int, ...], torch.dtype]:
        return (2, 2, *self.shape), torch.float32

    def read(self, item: int) -> Tensor:
        return self.read_many([item])[0]

    def read_many(self, items: Sequence[int]) -> Tensor:
        rows = np.empty((len(items), *self.stored[0]), dtype=np.float32)
        return gather_rows(self._shard, self._starts, items, rows)

    def prepare(self, stored: Tensor, seed: int, index: Tensor, mirrored: Tensor | None) -> Tensor:
        """(B, C, h, w) sampled from the distribution of the image or, where mirrored, of its mirror image."""
        rows = torch.arange(len(stored), device=stored.device)
        chosen = stored[rows, 0 if mirrored is None else mirrored.long()]
        mean, logvar = chosen[:, 0].contiguous(), chosen[:, 1].contiguous()
        sample = mean + torch.exp(0.5 * logvar) * normal(seed, "latent", index, self.shape)
        return (sample - float(self.index["shift"])) * float(self.index["scale"])

    def _shard(self, number: int) -> Any:
        """One shard (count, 2, 2, C, h, w), mapped: only rows that are indexed are read."""
        if number not in self._shards:
            shard = self.index["shards"][number]
            path, shape = self.folder / shard["file"], (shard["count"], *self.stored[0])
            try:
                with safe_open(path, framework="pt") as file:
                    tensor = file.get_tensor(TENSOR)
            except (OSError, SafetensorError) as error:
                raise DataError(f"{path}: not a whole shard ({error}); encode again") from error
            if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
                raise DataError(f"{path}: {tensor.dtype} {tuple(tensor.shape)}, expected float32 {shape}; encode again")
            self._shards[number] = tensor.numpy()
        return self._shards[number]

    @cached_property
    def fingerprint(self) -> str:
        return index_digest(self.index)


def read_index(folder: Path) -> dict[str, Any]:
    """The index of finished latents."""
    path = folder / INDEX
    if not path.is_file():
        unfinished = (folder / PLAN).is_file()
        remedy = "run the same `scalelong data encode` again to continue" if unfinished else "check the path"
        what = "the encoding is not finished" if unfinished else f"not latents (no {INDEX})"
        raise DataError(f"data.name: {folder}: {what}; {remedy}")
    try:
        index: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{path}: is not JSON ({error}); encode again") from error
    if index.get("format") != FORMAT:
        raise DataError(f"{path}: format {index.get('format')!r}, expected {FORMAT!r}; encode again with this version")
    return index


def index_digest(index: Mapping[str, Any]) -> str:
    """The fingerprint of latents: over the autoencoder and the hashes of all files."""
    kept = {key: index[key] for key in ("shape", "scale", "shift", "annotations")}
    kept["autoencoder"] = index["autoencoder"]["sha256"]
    kept["shards"] = [shard["sha256"] for shard in index["shards"]]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def check_latents(folder: Path, index: Mapping[str, Any], hash_limit: float = math.inf) -> list[Problem]:
    """Every file that is missing, truncated or, in sets up to `hash_limit` bytes, of another hash."""
    expected = {shard["file"]: Expected(shard["bytes"], shard["sha256"]) for shard in index["shards"]}
    expected[ANNOTATIONS] = Expected(1, index["annotations"])
    hashed = sum(want.size for want in expected.values()) <= hash_limit
    return bad_files(folder, expected, _REMEDY, "sha256" if hashed else None)


def latent_autoencoder(folder: Path, index: Mapping[str, Any], device: str | torch.device = "cpu") -> Autoencoder:
    """The autoencoder stored with the latents, checked by its hash."""
    found = load_autoencoder(folder / AUTOENCODER, device, index["scale"])
    if found.digest != index["autoencoder"]["sha256"]:
        raise DataError(
            f"{folder / AUTOENCODER}: is another autoencoder (sha256 {found.digest[:12]}) than the latents were made "
            f"with ({index['autoencoder']['sha256'][:12]}); put the right one back, or encode again"
        )
    return found


def decoder(name: str, device: str | torch.device, fingerprint: str = "") -> Autoencoder | None:
    """The autoencoder that decodes samples of a model trained on the source `name`; None if they are images already.

    fingerprint: of the data that the model was trained on; if given, other latents are refused.
    """
    prefix, _, folder = name.partition(":")
    if prefix != PREFIX:
        return None
    path = Path(folder).expanduser()
    index = read_index(path)
    if fingerprint and fingerprint != index_digest(index):
        raise DataError(
            f"{path}: holds other latents than the model was trained on (another autoencoder, or encoded anew); "
            "put the right ones back"
        )
    return latent_autoencoder(path, index, device)


def original_images(source: Source, root: Root = None) -> Source:
    """The images that latents were made from; any other source itself."""
    if not isinstance(source, LatentSource):
        return source
    origin = source.index["source"]
    images = load_source(origin["name"], image_size=origin["image_size"], split=origin["split"], root=root)
    if images.fingerprint != origin["fingerprint"]:
        raise DataError(f"{images.name}: not the images that {source.name} were made from; encode them again")
    return images
