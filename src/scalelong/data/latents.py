"""Encode a dataset into sharded latents of an autoencoder, and train on them.

Mean and log-variance of each image and its horizontal flip are stored; the sampling noise is a function of (seed, index).
Shapes: B batch, C x h x w latents; stored (2 mirrored, 2 mean and log-variance, C, h, w) float32.
"""

from __future__ import annotations

import json
import logging
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from scalelong.backbones.autoencoder import Autoencoder
from scalelong.data.base import DataError, Device, Request, Source, load_source, reading, register, threaded, to_float
from scalelong.data.download import read_json
from scalelong.data.images import gather_rows
from scalelong.data.latent_index import (
    ANNOTATIONS,
    AUTOENCODER,
    FORMAT,
    INDEX,
    PLAN,
    REMEDY,
    check_latents,
    index_digest,
    latent_autoencoder,
    read_index,
)
from scalelong.files import LOCK, atomic_write, check_space, file_digest, lock_folder, write_text
from scalelong.progress import Progress
from scalelong.random import normal

logger = logging.getLogger(__name__)

TENSOR = "moments"
_HASHED_ON_LOADING = 2**30  # bytes; larger sets are hashed by `scalelong data check` only


def _check(request: Request) -> list[DataError]:
    """Every bad file or, if there is none, every bad row."""
    folder, problems = Path(request.path).expanduser(), list[DataError]()
    try:
        index = read_index(folder)
        problems += check_latents(folder, index)
        latent_autoencoder(folder, index)
        if problems:
            return problems
        source = LatentSource(request)
    except (ValueError, OSError) as error:
        return [*problems, DataError(str(error))]
    for item in range(len(source)):
        try:
            source.read(item)
        except DataError as error:
            problems.append(error)
    return problems


@register("latents:PATH", "latents of an autoencoder, written by `scalelong data encode`", check=_check)
class LatentSource(Source):
    """Latents sampled from the stored distributions and scaled to unit variance."""

    def __init__(self, request: Request) -> None:
        self.folder = Path(request.path).expanduser()
        self.name = f"latents:{request.path}"
        self.index = read_index(self.folder)
        pixels, split = self.index["pixels"][1], self.index["source"]["split"]
        if request.image_size is not None:
            raise DataError(f"data.image_size: {self.name} are of {pixels} pixels already; encode again for others")
        if request.split != split:
            raise DataError(f"data.split: {self.name} has {split!r} only, not {request.split!r}")
        problems = check_latents(self.folder, self.index, _HASHED_ON_LOADING)
        if problems:
            raise problems[0]
        path = self.folder / ANNOTATIONS
        with reading(f"{path}: is damaged", "encode again"):
            notes = read_json(path, "encode again")
            self.captions = notes["captions"]
            self.caption_counts = None if notes["caption_counts"] is None else torch.tensor(notes["caption_counts"])
            labels = None if notes["labels"] is None else torch.tensor(notes["labels"])
            for what, found in (("labels", labels), ("caption_counts", self.caption_counts)):
                if found is not None and len(found) != len(self):
                    raise DataError(f"{path}: {len(found)} {what} for {len(self)} items; encode again")
            if labels is not None:
                self.set_labels(labels, notes["class_names"], str(path))
        channels, height, width = self.index["shape"]
        self.shape = (channels, height, width)
        self._starts = list(accumulate((shard["count"] for shard in self.index["shards"]), initial=0))
        self._shards: dict[int, Any] = {}

    def __len__(self) -> int:
        return int(self.index["count"])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_shards": {}}  # workers map the files themselves

    @property
    def stored(self) -> tuple[tuple[int, ...], torch.dtype]:
        return (2, 2, *self.shape), torch.float32

    def read(self, item: int) -> Tensor:
        return self.read_many([item])[0]

    def read_many(self, items: Sequence[int]) -> Tensor:
        rows = np.empty((len(items), *self.stored[0]), dtype=np.float32)
        found = gather_rows(self._shard, self._starts, items, rows)
        finite = found.flatten(1).isfinite().all(dim=1)
        if not finite.all():
            item = items[int((~finite).nonzero()[0])]
            raise DataError(f"{self.where(item)}: the latents are not finite; {REMEDY}")
        return found

    def where(self, item: int) -> str:
        shard = bisect_right(self._starts, item) - 1
        return f"{self.folder / self.index['shards'][shard]['file']} row {item - self._starts[shard]} (item {item})"

    def prepare(self, stored: Tensor, seed: int, index: Tensor, mirrored: Tensor | None) -> Tensor:
        """(B, C, h, w) sampled from the distribution of the image or of its horizontal flip."""
        rows = torch.arange(len(stored), device=stored.device)
        chosen = stored[rows, 0 if mirrored is None else mirrored.long()]
        mean, logvar = chosen[:, 0].contiguous(), chosen[:, 1].contiguous()
        sample = mean + torch.exp(0.5 * logvar) * normal(seed, "latent", index, self.shape)
        return (sample - float(self.index["shift"])) * float(self.index["scale"])

    def _shard(self, number: int) -> Any:
        """One memory-mapped shard (count, 2, 2, C, h, w)."""
        if number not in self._shards:
            shard = self.index["shards"][number]
            path, shape = self.folder / shard["file"], (shard["count"], *self.stored[0])
            with reading(f"{path}: not a whole shard", "encode again"), safe_open(path, framework="pt") as file:
                tensor = file.get_tensor(TENSOR)
            if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
                raise DataError(f"{path}: {tensor.dtype} {tuple(tensor.shape)}, expected float32 {shape}; encode again")
            self._shards[number] = tensor.numpy()
        return self._shards[number]

    @cached_property
    def fingerprint(self) -> str:
        return index_digest(self.index)


def decoder(name: str, device: Device, fingerprint: str = "") -> Autoencoder | None:
    """The decoder for samples of a model trained on the source `name` with this fingerprint; None for pixels."""
    prefix, _, folder = name.partition(":")
    if prefix != "latents":
        return None
    path = Path(folder).expanduser()
    index = read_index(path)
    if fingerprint and fingerprint != index_digest(index):
        raise DataError(f"{path}: holds other latents than the model was trained on; put the right ones back")
    return latent_autoencoder(path, index, device)


def original_images(source: Source, root: str | Path | None = None) -> Source:
    """The source of the encoded images; other sources are returned as is."""
    if not isinstance(source, LatentSource):
        return source
    origin = source.index["source"]
    images = load_source(origin["name"], image_size=origin["image_size"], split=origin["split"], root=root)
    if images.fingerprint != origin["fingerprint"]:
        raise DataError(f"{images.name}: not the images that {source.name} were made from; encode them again")
    return images


class Origin(NamedTuple):
    """The source of the encoded images, for evaluation."""

    name: str
    image_size: int | None = None
    split: str = "train"


def encode(
    source: Source, model: Autoencoder, folder: str | Path, origin: Origin, batch_size: int = 64, per_shard: int = 1024
) -> Path:
    """Encode every image and its horizontal flip; calling it again continues an interrupted encoding."""
    folder = Path(folder)
    if batch_size < 1 or per_shard < 1:
        raise ValueError(f"encode: batch_size and per_shard must be at least 1, got {batch_size} and {per_shard}")
    if source.stored[1] != torch.uint8:
        raise DataError(f"data.name: {source.name} are latents already; encode the images they were made from")
    shape = model.latent_shape(source.shape)
    plan = {  # everything that determines the output
        "format": FORMAT,
        "autoencoder": {"sha256": model.digest, "class": type(model.model).__name__},
        "scale": model.scale,
        "shift": model.shift,
        "source": {**origin._asdict(), "fingerprint": source.fingerprint},
        "pixels": list(source.shape),
        "shape": list(shape),
        "count": len(source),
        "per_shard": per_shard,
    }
    with _locked(folder):
        if not _is_complete(folder, plan):
            _encode(source, model, folder, plan, batch_size)
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from encoding into the same folder until the block ends or the process dies."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out: {folder} is a file; choose a folder")
    folder.mkdir(parents=True, exist_ok=True)
    names = {path.name for path in folder.iterdir()} - {LOCK}
    if names and names.isdisjoint({PLAN, INDEX}):
        raise ValueError(f"out: {folder} is not empty and holds no {PLAN}; choose another folder")
    with lock_folder(folder, "encoding"):
        yield


def _is_complete(folder: Path, plan: Mapping[str, Any]) -> bool:
    """True if the folder contains these latents completely; else prepare it, keeping valid shards."""
    index = read_index(folder) if (folder / INDEX).is_file() else None
    found = index or (read_json(folder / PLAN, "remove the folder") if (folder / PLAN).is_file() else plan)
    changed = [f"{key} {found.get(key)}, not {value}" for key, value in plan.items() if found.get(key) != value]
    if changed:
        raise DataError(f"out: {folder} holds latents of another encoding ({'; '.join(changed)}); choose another")
    if index is not None:
        problems = check_latents(folder, index)
        if not problems:
            logger.info("%s is complete", folder)
            return True
        logger.warning("%s", problems[0])
        for shard in index["shards"]:
            write_text((folder / shard["file"]).with_suffix(".json"), json.dumps(shard))
    elif found is plan:
        check_space(folder, 16 * plan["count"] * math.prod(plan["shape"]), "the latents need")
    write_text(folder / PLAN, json.dumps(plan))
    (folder / INDEX).unlink(missing_ok=True)
    return False


def _encode(source: Source, autoencoder: Autoencoder, folder: Path, plan: Mapping[str, Any], batch_size: int) -> None:
    for leftover in folder.glob(".*-staging-*"):  # left by a killed process; the folder is locked
        leftover.unlink()
    autoencoder.model.save_pretrained(folder / AUTOENCODER)
    latent_autoencoder(folder, plan)  # the saved copy has the digest of the plan
    labels, counts = (None if t is None else t.tolist() for t in (source.labels, source.caption_counts))
    notes = {"labels": labels, "class_names": list(source.class_names), "captions": source.captions}
    write_text(folder / ANNOTATIONS, json.dumps({**notes, "caption_counts": counts}))
    size, shards = plan["per_shard"], []
    with Progress(total=len(source), unit="img", desc=f"encode {source.name}") as bar:
        for number, start in enumerate(range(0, len(source), size)):
            path, items = folder / f"shard-{number:05d}.safetensors", range(start, min(start + size, len(source)))
            note = path.with_suffix(".json")  # exists if an earlier process finished this shard
            entry: Any = None
            with suppress(OSError, ValueError):  # missing or damaged
                entry = json.loads(note.read_bytes())
            if not isinstance(entry, dict) or not path.is_file() or entry.get("sha256") != file_digest(path):
                with atomic_write(path) as file:
                    file.write(save({TENSOR: _moments(source, items, autoencoder, batch_size, bar)}))
                entry = {"file": path.name, "count": len(items)}
                entry |= {"bytes": path.stat().st_size, "sha256": file_digest(path)}
                write_text(note, json.dumps(entry))
            shards.append(entry)
            bar.update(items.stop - bar.n)
    index = {**plan, "annotations": file_digest(folder / ANNOTATIONS), "shards": shards}
    write_text(folder / INDEX, json.dumps(index, indent=1) + "\n")
    for leftover in (*folder.glob("shard-*.json"), folder / PLAN):
        leftover.unlink()


def _moments(source: Source, items: range, autoencoder: Autoencoder, batch_size: int, bar: Any) -> Tensor:
    """(n, 2, 2, C, h, w) on the CPU: mean and log-variance of the images and of their mirror images."""
    images, parts = threaded(source.read, items), []
    while batch := list(islice(images, batch_size)):
        pixels = to_float(torch.stack(batch).to(autoencoder.model.device)).to(autoencoder.model.dtype)
        both = [autoencoder.moments(view).float() for view in (pixels, pixels.flip(-1))]
        parts.append(torch.stack(both, dim=1).cpu())
        bar.update(len(batch))
    return torch.cat(parts)
