"""Latents of an autoencoder in shards, as `scalelong data encode` writes them.

Each item is stored as mean and log-variance, of the image and of its mirror image; a training sample is drawn from that
normal distribution by (seed, index), so that the order of reading changes nothing.
Shapes: n items, B batch, C x h x w latents; stored (2 mirrored, 2 mean and log-variance, C, h, w) float32.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalelong.backbones.autoencoder import Autoencoder, load_autoencoder
from scalelong.data.base import Source, checked_labels
from scalelong.data.cache import Expected, Problem, bad_files
from scalelong.data.errors import DataError
from scalelong.random import normal

PREFIX = "latents"
INDEX = "index.json"
PLAN = "encoding.json"
ANNOTATIONS = "annotations.json"
AUTOENCODER = "autoencoder"
TENSOR = "moments"
FORMAT = "scalelong-latents-1"
_HASHED_AT_OPENING = 2**30  # bytes; larger sets are hashed by `scalelong data check` only

Memory = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


class LatentSource(Source):
    """What a latent denoiser is trained on: drawn from the stored distribution, scaled to unit variance."""

    def __init__(self, folder: str | Path, image_size: int | None = None, split: str = "train") -> None:
        self.folder = Path(folder).expanduser()
        self.name = f"{PREFIX}:{folder}"
        self.index = read_index(self.folder)
        if image_size is not None:
            raise DataError(
                f"data.image_size: {self.name} are of {self.index['pixels'][1]} pixels already; leave it out, "
                "or encode the images again at that size"
            )
        if split != self.index["source"]["split"]:
            raise DataError(
                f"data.split: {self.name} has {self.index['source']['split']!r} only, not {split!r}", "missing"
            )
        problems = check_latents(self.folder, self.index, whole=self._bytes() <= _HASHED_AT_OPENING)
        if problems:
            raise DataError(problems[0].message, problems[0].kind)
        notes = json.loads((self.folder / ANNOTATIONS).read_text())
        self.captions = notes["captions"]
        self.caption_counts = None if notes["caption_counts"] is None else torch.tensor(notes["caption_counts"])
        self.class_names = notes["class_names"]
        self.num_classes = len(self.class_names)
        labels = None if notes["labels"] is None else torch.tensor(notes["labels"])
        self.labels = checked_labels(labels, self.num_classes, self.name)
        channels, height, width = self.index["shape"]
        self.shape = (channels, height, width)
        self._starts = np.cumsum([0, *(shard["count"] for shard in self.index["shards"])])
        self._shards: dict[int, Memory] = {}

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
        found = np.empty((len(items), *self.stored[0]), dtype=np.float32)
        wanted = np.asarray(items)
        homes = np.searchsorted(self._starts, wanted, side="right") - 1
        for home in np.unique(homes):
            here = homes == home
            found[here] = self._shard(int(home))[wanted[here] - self._starts[home]]
        return torch.from_numpy(found)

    def prepare(self, stored: Tensor, seed: int, index: Tensor, mirrored: Tensor | None) -> Tensor:
        """(B, C, h, w) drawn from the distribution of the image or, where mirrored, of its mirror image."""
        rows = torch.arange(len(stored), device=stored.device)
        chosen = stored[rows, 0 if mirrored is None else mirrored.long()]
        mean, logvar = chosen[:, 0].contiguous(), chosen[:, 1].contiguous()
        drawn = mean + torch.exp(0.5 * logvar) * normal(seed, "latent", index, self.shape)
        return (drawn - float(self.index["shift"])) * float(self.index["scale"])

    def autoencoder(self, device: str | torch.device = "cpu") -> Autoencoder:
        """The autoencoder these latents are of; another one in its place is refused."""
        return latent_autoencoder(self.folder, self.index, device)

    def _shard(self, number: int) -> Memory:
        if number not in self._shards:
            shard = self.index["shards"][number]
            self._shards[number] = map_shard(self.folder / shard["file"], (shard["count"], *self.stored[0]))
        return self._shards[number]

    def _bytes(self) -> int:
        return sum(int(shard["bytes"]) for shard in self.index["shards"])

    def _digest(self) -> str:
        return index_digest(self.index)


def read_index(folder: Path) -> dict[str, Any]:
    """The table of contents of finished latents."""
    path = folder / INDEX
    if not path.is_file():
        unfinished = (folder / PLAN).is_file()
        remedy = "run the same `scalelong data encode` again, it goes on" if unfinished else "check the path"
        what = "the encoding is not finished" if unfinished else f"holds no {INDEX}, so these are no latents"
        raise DataError(f"data.name: {folder}: {what}; {remedy}", "missing")
    try:
        index: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{path}: is not JSON ({error}); encode again", "unreadable") from error
    if index.get("format") != FORMAT:
        raise DataError(f"{path}: format {index.get('format')!r}, expected {FORMAT!r}; encode again with this version")
    return index


def index_digest(index: Mapping[str, Any]) -> str:
    """The fingerprint of latents: over the autoencoder and the hashes of all files."""
    kept = {key: index[key] for key in ("shape", "scale", "shift", "annotations")}
    kept["autoencoder"] = index["autoencoder"]["sha256"]
    kept["shards"] = [shard["sha256"] for shard in index["shards"]]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def check_latents(folder: Path, index: Mapping[str, Any], whole: bool = True) -> list[Problem]:
    """Every shard that is missing, cut short or, where `whole`, of another hash."""
    expected = {shard["file"]: Expected(shard["bytes"], shard["sha256"]) for shard in index["shards"]}
    expected[ANNOTATIONS] = Expected(1, index["annotations"])
    remedy = "run the same `scalelong data encode` again, it makes the bad files anew"
    if whole:
        return bad_files(folder, expected, "sha256", remedy)
    short = {name: want for name, want in expected.items() if _size(folder / name) < want.size}
    return bad_files(folder, short, "sha256", remedy)


def latent_autoencoder(folder: Path, index: Mapping[str, Any], device: str | torch.device = "cpu") -> Autoencoder:
    """The autoencoder that lies with the latents, checked by its hash."""
    found = load_autoencoder(folder / AUTOENCODER, device, index["scale"])
    if found.digest != index["autoencoder"]["sha256"]:
        raise DataError(
            f"{folder / AUTOENCODER}: is another autoencoder (sha256 {found.digest[:12]}) than the latents were made "
            f"with ({index['autoencoder']['sha256'][:12]}); put the right one back, or encode again",
            "wrong hash",
        )
    return found


def decoder(name: str, device: str | torch.device, fingerprint: str = "") -> Autoencoder | None:
    """What turns samples of a model trained on the source `name` into images; None where they are images already.

    fingerprint: of the data that the model was trained on; where given, latents made anew since are refused.
    """
    prefix, _, folder = name.partition(":")
    if prefix != PREFIX:
        return None
    path = Path(folder).expanduser()
    index = read_index(path)
    if fingerprint and fingerprint != index_digest(index):
        raise DataError(
            f"{path}: holds other latents than the model was trained on (another autoencoder, or encoded anew); "
            "put the right ones back",
            "wrong hash",
        )
    return latent_autoencoder(path, index, device)


def map_shard(path: Path, shape: tuple[int, ...]) -> Memory:
    """The tensor of one safetensors file, mapped: only what is indexed is read."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entry = json.loads(file.read(length))[TENSOR]
        if entry["dtype"] != "F32" or tuple(entry["shape"]) != shape:
            raise ValueError(f"holds {entry['dtype']} {entry['shape']}, expected F32 {list(shape)}")
        offset = 8 + length + entry["data_offsets"][0]
        return np.memmap(path, dtype=np.float32, mode="r", offset=offset, shape=shape)
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise DataError(f"{path}: not a whole shard ({error}); encode again", "truncated") from error


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1
