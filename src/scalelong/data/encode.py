"""Turn a set of images into latents once: shard by shard, so that an interrupted encoding goes on where it stood."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from scalelong.backbones.autoencoder import Autoencoder
from scalelong.data.base import Source
from scalelong.data.cache import file_digest
from scalelong.data.errors import DataError
from scalelong.data.images import threaded, to_float
from scalelong.data.latents import (
    ANNOTATIONS,
    AUTOENCODER,
    FORMAT,
    INDEX,
    PLAN,
    TENSOR,
    check_latents,
    latent_autoencoder,
    read_index,
)

logger = logging.getLogger(__name__)

LOCK = ".lock"


@dataclass(frozen=True)
class Origin:
    """Where the images came from, so that latents can be compared with them."""

    name: str
    image_size: int | None = None
    split: str = "train"


def encode(
    source: Source,
    autoencoder: Autoencoder,
    folder: str | Path,
    origin: Origin,
    *,
    batch_size: int = 64,
    per_shard: int = 1024,
) -> Path:
    """Write the latents of every image and its mirror image; the same call again keeps the whole shards and goes on."""
    folder = Path(folder)
    for key, value in (("batch_size", batch_size), ("per_shard", per_shard)):
        if value < 1:
            raise ValueError(f"encode.{key}: must be at least 1, got {value}")
    if source.stored[1] != torch.uint8:
        raise DataError(f"data.name: {source.name} are latents already; encode the images they were made of")
    shape = autoencoder.latent_shape(source.shape)
    plan = _plan(source, autoencoder, origin, shape, per_shard)
    with _alone(folder):
        if (folder / INDEX).is_file() and _is_complete(folder, plan):
            logger.info("%s is complete", folder)
        else:
            _claim(folder, plan, 16 * len(source) * torch.Size(shape).numel())
            _encode(source, autoencoder, folder, plan, batch_size)
    return folder


def _encode(source: Source, autoencoder: Autoencoder, folder: Path, plan: Mapping[str, Any], batch_size: int) -> None:
    autoencoder.model.save_pretrained(folder / AUTOENCODER)
    latent_autoencoder(folder, plan)  # what lies there is what encodes
    _write(folder / ANNOTATIONS, json.dumps(_annotations(source)).encode())
    starts = range(0, len(source), plan["per_shard"])
    with tqdm(total=len(source), unit="img", desc=f"encode {source.name}", disable=None) as bar:
        shards = [
            _shard(folder, number, start, source, autoencoder, plan, batch_size, bar)
            for number, start in enumerate(starts)
        ]
    index = {**plan, "annotations": file_digest(folder / ANNOTATIONS, "sha256"), "shards": shards}
    _write(folder / INDEX, (json.dumps(index, indent=1) + "\n").encode())
    for leftover in (*folder.glob("shard-*.json"), folder / PLAN):
        leftover.unlink()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes from encoding into the same folder; held until the block ends or the process dies."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out: {folder} is a file; choose a folder")
    folder.mkdir(parents=True, exist_ok=True)
    names = {path.name for path in folder.iterdir()} - {LOCK}
    if names and names.isdisjoint({PLAN, INDEX}):
        raise ValueError(f"out: {folder} is not empty and holds no {PLAN}; choose another folder")
    with (folder / LOCK).open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"out: another process is encoding into {folder}; wait for it or stop it") from None
        yield


def _plan(
    source: Source, autoencoder: Autoencoder, origin: Origin, shape: tuple[int, int, int], per_shard: int
) -> dict[str, Any]:
    """All that decides what is written."""
    return {
        "format": FORMAT,
        "autoencoder": {"sha256": autoencoder.digest, "class": type(autoencoder.model).__name__},
        "scale": autoencoder.scale,
        "shift": autoencoder.shift,
        "source": {**vars(origin), "fingerprint": source.fingerprint},
        "pixels": list(source.shape),
        "shape": list(shape),
        "count": len(source),
        "per_shard": per_shard,
    }


def _claim(folder: Path, plan: Mapping[str, Any], needed: int) -> None:
    """Make the folder this encoding's, or refuse before any work."""
    if (folder / PLAN).is_file():
        _check_same(folder, json.loads((folder / PLAN).read_text()), plan)
        return
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"out: {folder} has {free / 1e9:.1f} GB free, the latents need {needed / 1e9:.1f} GB")
    _write(folder / PLAN, json.dumps(plan).encode())


def _is_complete(folder: Path, plan: Mapping[str, Any]) -> bool:
    """Whether finished latents are whole; where a file is bad, the encoding is open again but for the good shards."""
    index = read_index(folder)
    _check_same(folder, index, plan)
    problems = check_latents(folder, index)
    if not problems:
        return True
    logger.warning("%s", problems[0].message)
    for shard in index["shards"]:
        _write((folder / shard["file"]).with_suffix(".json"), json.dumps(shard).encode())
    _write(folder / PLAN, json.dumps(plan).encode())
    (folder / INDEX).unlink()
    return False


def _check_same(folder: Path, there: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    changed = [key for key, value in plan.items() if there.get(key) != value]
    if changed:
        lines = "; ".join(f"{key}: {there.get(key)} there, {plan[key]} asked for" for key in changed)
        raise DataError(
            f"out: {folder} holds latents of another encoding ({lines}); choose another folder", "wrong hash"
        )


def _shard(
    folder: Path,
    number: int,
    start: int,
    source: Source,
    autoencoder: Autoencoder,
    plan: Mapping[str, Any],
    batch_size: int,
    bar: Any,
) -> dict[str, Any]:
    """Encode one shard, or keep the one that is there if its hash is the one noted when it was written."""
    path = folder / f"shard-{number:05d}.safetensors"
    note = path.with_suffix(".json")
    count = min(plan["per_shard"], plan["count"] - start)
    kept = json.loads(note.read_text()) if note.is_file() else None
    if kept and path.is_file() and file_digest(path, "sha256") == kept["sha256"]:
        bar.update(count)
        return dict(kept)
    images = threaded(source.read, range(start, start + count))
    parts = []
    while batch := list(islice(images, batch_size)):
        parts.append(_moments(autoencoder, torch.stack(batch)))
        bar.update(len(batch))
    _write(path, save({TENSOR: torch.cat(parts)}))
    entry = {"file": path.name, "count": count, "bytes": path.stat().st_size, "sha256": file_digest(path, "sha256")}
    _write(note, json.dumps(entry).encode())
    return entry


def _moments(autoencoder: Autoencoder, images: Tensor) -> Tensor:
    """(B, 2, 2, C, h, w) on the CPU: the images' and the mirror images' mean and log-variance."""
    pixels = to_float(images.to(autoencoder.model.device)).to(autoencoder.model.dtype)
    both = [autoencoder.moments(view).float() for view in (pixels, pixels.flip(-1))]
    return torch.stack(both, dim=1).cpu()


def _annotations(source: Source) -> dict[str, Any]:
    counts = source.caption_counts
    return {
        "labels": None if source.labels is None else source.labels.tolist(),
        "class_names": source.class_names,
        "captions": source.captions,
        "caption_counts": None if counts is None else counts.tolist(),
    }


def _write(path: Path, content: bytes) -> None:
    """A file that is whole or not there, whatever is killed."""
    staged = path.with_name(f".{path.name}.staged")
    with staged.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    staged.replace(path)
