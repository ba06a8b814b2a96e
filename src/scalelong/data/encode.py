"""Encode a set of images as latents once: shard by shard, so that an interrupted encoding can be continued."""

from __future__ import annotations

import fcntl
import json
import logging
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
from scalelong.data.base import DataError, Source, to_float
from scalelong.data.images import threaded
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
from scalelong.files import atomic_write, file_digest, write_text

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
    """Write the latents of every image and its mirror image; the same call again continues, keeping whole shards."""
    folder = Path(folder)
    for key, value in (("batch_size", batch_size), ("per_shard", per_shard)):
        if value < 1:
            raise ValueError(f"encode.{key}: must be at least 1, got {value}")
    if source.stored[1] != torch.uint8:
        raise DataError(f"data.name: {source.name} are latents already; encode the images they were made from")
    shape = autoencoder.latent_shape(source.shape)
    plan = {  # all that decides what is written
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
    with _locked(folder):
        if (folder / INDEX).is_file() and _is_complete(folder, plan):
            logger.info("%s is complete", folder)
        else:
            _claim(folder, plan, 16 * len(source) * torch.Size(shape).numel())
            _encode(source, autoencoder, folder, plan, batch_size)
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
    with (folder / LOCK).open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"out: another process is encoding into {folder}; wait for it or stop it") from None
        yield


def _claim(folder: Path, plan: Mapping[str, Any], needed: int) -> None:
    """Write the plan, or compare it with the one that is there; refuses before any work."""
    if (folder / PLAN).is_file():
        _check_same(folder, json.loads((folder / PLAN).read_text()), plan)
        return
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"out: {folder} has {free / 1e9:.1f} GB free, the latents need {needed / 1e9:.1f} GB")
    write_text(folder / PLAN, json.dumps(plan))


def _is_complete(folder: Path, plan: Mapping[str, Any]) -> bool:
    """Whether finished latents are whole; if a file is bad, the encoding is reopened with the good shards kept."""
    index = read_index(folder)
    _check_same(folder, index, plan)
    problems = check_latents(folder, index)
    if not problems:
        return True
    logger.warning("%s", problems[0].message)
    for shard in index["shards"]:
        write_text((folder / shard["file"]).with_suffix(".json"), json.dumps(shard))
    write_text(folder / PLAN, json.dumps(plan))
    (folder / INDEX).unlink()
    return False


def _check_same(folder: Path, found: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    changed = [
        f"{key}: {found.get(key)} there, {value} requested" for key, value in plan.items() if found.get(key) != value
    ]
    if changed:
        message = f"out: {folder} holds latents of another encoding ({'; '.join(changed)}); choose another folder"
        raise DataError(message)


def _encode(source: Source, autoencoder: Autoencoder, folder: Path, plan: Mapping[str, Any], batch_size: int) -> None:
    for leftover in folder.glob(".*-staging-*"):  # of a killed process; the folder is locked, so nobody writes them
        leftover.unlink()
    autoencoder.model.save_pretrained(folder / AUTOENCODER)
    latent_autoencoder(folder, plan)  # the saved copy has the digest of the plan
    counts = source.caption_counts
    annotations = {
        "labels": None if source.labels is None else source.labels.tolist(),
        "class_names": list(source.class_names),
        "captions": source.captions,
        "caption_counts": None if counts is None else counts.tolist(),
    }
    write_text(folder / ANNOTATIONS, json.dumps(annotations))
    size, shards = plan["per_shard"], []
    with tqdm(total=len(source), unit="img", desc=f"encode {source.name}", disable=None) as bar:
        for number, start in enumerate(range(0, len(source), size)):
            path, items = folder / f"shard-{number:05d}.safetensors", range(start, min(start + size, len(source)))
            shards.append(_kept(path) or _encode_shard(path, items, source, autoencoder, batch_size, bar))
            bar.update(items.stop - bar.n)
    index = {**plan, "annotations": file_digest(folder / ANNOTATIONS), "shards": shards}
    write_text(folder / INDEX, json.dumps(index, indent=1) + "\n")
    for leftover in (*folder.glob("shard-*.json"), folder / PLAN):
        leftover.unlink()


def _kept(path: Path) -> dict[str, Any] | None:
    """The entry of a shard that an earlier process finished, if the file still has its hash."""
    note = path.with_suffix(".json")
    if not (note.is_file() and path.is_file()):
        return None
    entry: dict[str, Any] = json.loads(note.read_text())
    return entry if file_digest(path) == entry["sha256"] else None


def _encode_shard(
    path: Path, items: range, source: Source, autoencoder: Autoencoder, batch_size: int, bar: Any
) -> dict[str, Any]:
    images = threaded(source.read, items)
    parts = []
    while batch := list(islice(images, batch_size)):
        parts.append(_moments(autoencoder, torch.stack(batch)))
        bar.update(len(batch))
    with atomic_write(path) as file:
        file.write(save({TENSOR: torch.cat(parts)}))
    entry = {"file": path.name, "count": len(items), "bytes": path.stat().st_size, "sha256": file_digest(path)}
    write_text(path.with_suffix(".json"), json.dumps(entry))
    return entry


def _moments(autoencoder: Autoencoder, images: Tensor) -> Tensor:
    """(B, 2, 2, C, h, w) on the CPU: mean and log-variance of the images and of their mirror images."""
    pixels = to_float(images.to(autoencoder.model.device)).to(autoencoder.model.dtype)
    both = [autoencoder.moments(view).float() for view in (pixels, pixels.flip(-1))]
    return torch.stack(both, dim=1).cpu()
