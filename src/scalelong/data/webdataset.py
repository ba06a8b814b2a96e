"""Tar shards in the layout of webdataset: `key.png` with `key.cls`, `key.txt` or `key.json`.

Each shard is indexed once, in one pass over its headers, and the index is cached for random access.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import tarfile
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import product
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import torch
from PIL import Image

from scalelong.data.base import DataError, Request, hashed_items, reading, register
from scalelong.data.download import cache_dir
from scalelong.data.images import EXTENSIONS, PictureSource, open_rgb
from scalelong.files import write_text
from scalelong.progress import Progress

logger = logging.getLogger(__name__)

_INDEX_VERSION = 3
_LONGEST = 2**20  # bytes of a caption or description
_TEXTS = frozenset({"txt", "text", "caption"})

Sample = dict[str, Any]  # key, offset, size, label, caption


@register("webdataset:PATTERN", "tar shards, for sets larger than memory")
class WebDatasetSource(PictureSource):
    """Images in tar shards with random access; only the index is in memory."""

    def __init__(self, request: Request) -> None:
        if request.split != "train":
            raise DataError(f"data.split: shards have no splits, got {request.split!r}; name that split's shards")
        self.name = f"webdataset:{request.path}"
        self.shards = expand(request.path)
        self._versions = [shard.stat().st_mtime_ns for shard in self.shards]
        columns: dict[str, list[Any]] = {name: [] for name in ("key", "offset", "size", "label", "caption")}
        self._starts = [0]
        for shard in Progress(self.shards, desc="index", unit="shard"):
            samples = shard_index(shard, cache_dir(request.root) / "webdataset")
            for name, values in columns.items():
                values += [sample[name] for sample in samples]
            self._starts.append(self._starts[-1] + len(samples))
        self._keys = columns["key"]
        self._offsets, self._sizes = (np.array(columns[name], dtype=np.int64) for name in ("offset", "size"))
        self.captions = self._all_or_none(columns["caption"], "caption")
        labels = self._all_or_none(columns["label"], "class")
        if labels is not None:
            self.set_labels(torch.tensor(labels))
        self.set_size(request.image_size)

    def __len__(self) -> int:
        return self._starts[-1]

    def where(self, item: int) -> str:
        return f"{self.shards[bisect_right(self._starts, item) - 1]}: {self._keys[item]}"

    def open(self, item: int) -> Image.Image:
        return open_rgb(io.BytesIO(self._content(item)), self.where(item))

    def _content(self, item: int) -> bytes:
        home, start, size = bisect_right(self._starts, item) - 1, int(self._offsets[item]), int(self._sizes[item])
        with reading(f"{self.where(item)}: cannot be read", "get the shard again"):
            file = _opened(self.shards[home], os.getpid())  # keep a reference: another thread may evict it
            content = os.pread(file.fileno(), size, start)  # not mmap: a truncated file would crash the process
            changed = os.fstat(file.fileno()).st_mtime_ns != self._versions[home]
        if len(content) < size:
            raise DataError(f"{self.where(item)}: cut short since it was indexed; get the shard again")
        if changed:
            raise DataError(f"{self.where(item)}: the shard changed since it was indexed; run the same command again")
        return content

    def _all_or_none(self, values: list[Any], what: str) -> list[Any] | None:
        if all(value is None for value in values):
            return None
        if None in values:
            item = values.index(None)
            raise DataError(f"{self.where(item)}: has no {what}, but other samples have; add it, or remove all")
        return values

    def _contents(self) -> Iterator[bytes]:
        yield self._offsets.astype("<i8").tobytes() + self._sizes.astype("<i8").tobytes()
        for item in hashed_items(len(self)):
            yield self._content(item)


@lru_cache(maxsize=128)
def _opened(shard: Path, process: int) -> IO[bytes]:  # noqa: ARG001 (each worker opens the files itself)
    return shard.open("rb")


def expand(pattern: str) -> list[Path]:
    """Expand `a/{000..009}.tar`, `a/{x,y}.tar` or `a/*.tar`; raise for missing shards."""
    parts = re.split(r"\{([^{}]*)\}", pattern)  # every second one was in braces
    choices = [_choices(part) if number % 2 else [part] for number, part in enumerate(parts)]
    shards: list[Path] = []
    for name in ("".join(words) for words in product(*choices)):
        path = Path(name).expanduser()
        shards += sorted(path.parent.glob(path.name)) if any(sign in path.name for sign in "*?[") else [path]
    missing = [shard for shard in shards if not shard.is_file()]
    if missing or not shards:
        which = f"{len(missing)} shard(s), the first is {missing[0]}" if missing else f"no shard matches {pattern}"
        raise DataError(f"data.name: missing: {which}; check the pattern, e.g. webdataset:data/{{000..009}}.tar")
    return shards


def _choices(inside: str) -> list[str]:
    bounds = re.fullmatch(r"(\d+)\.\.(\d+)", inside)  # 000..012, else a,b
    if bounds is None:
        return inside.split(",")
    first, last = bounds.groups()
    width = len(first) if first.startswith("0") else 0
    return [str(number).zfill(width) for number in range(int(first), int(last) + 1)]


def shard_index(shard: Path, cache: Path) -> list[Sample]:
    """The samples of a shard in file order, cached until the file changes."""
    status = shard.stat()
    identity = f"{_INDEX_VERSION} {shard.resolve()} {status.st_size} {status.st_mtime_ns}"
    kept = cache / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"
    if kept.is_file():
        with suppress(DataError), reading(f"{kept}: is damaged", "made again"):
            return _checked_index(json.loads(kept.read_text()), status.st_size)
        logger.warning("%s: the index of %s is damaged; it is made again", kept, shard)
    samples = _scan(shard)
    write_text(kept, json.dumps(samples))
    return _checked_index(samples, status.st_size)


def _checked_index(samples: Any, size: int) -> list[Sample]:
    """Validate the cached samples of a shard."""
    if not isinstance(samples, list) or not samples:
        raise ValueError("no samples")
    for sample in samples:
        label, caption = sample["label"], sample["caption"]
        sound = 0 < sample["offset"] <= sample["offset"] + sample["size"] <= size and isinstance(sample["key"], str)
        if not sound or not isinstance(label, int | None) or not isinstance(caption, str | None):
            raise ValueError(f"sample {sample!r}")
    return samples


def _scan(shard: Path) -> list[Sample]:
    samples: dict[str, Sample] = {}
    with reading(f"{shard}: not a whole tar file", "get it again"), tarfile.open(shard, "r:") as archive:
        for member in archive:
            if member.isreg():
                _add_member(archive, member, samples, shard)
        end = archive.offset
    with shard.open("rb") as file:  # tarfile misses truncation between two members
        file.seek(end)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise DataError(f"{shard}: cut short (no end of archive after {end:,} bytes); get it again")
    if not samples:
        raise DataError(f"{shard}: holds no samples; check the pattern")
    for key, sample in samples.items():
        if "size" not in sample:
            raise DataError(f"{shard}: sample {key!r} has no image; make the shard again")
    return list(samples.values())


def _add_member(archive: tarfile.TarFile, member: tarfile.TarInfo, samples: dict[str, Sample], shard: Path) -> None:
    """Add a member `key.extension` to the sample `key`."""
    path = PurePosixPath(member.name)
    stem, _, extension = path.name.partition(".")
    extension = extension.lower()
    if not stem:
        return
    key = str(path.parent / stem)
    sample = samples.setdefault(key, {"key": key, "label": None, "caption": None})
    if f".{extension.rpartition('.')[2]}" in EXTENSIONS:
        if "size" in sample:
            raise DataError(f"{shard}: sample {key!r} has a second image, {member.name}; make the shard again with one")
        sample.update(offset=member.offset_data, size=member.size)
        return
    if extension not in (*_TEXTS, "cls", "json"):
        return
    if member.size > _LONGEST:
        raise DataError(f"{shard}: {member.name} has {member.size:,} bytes of text; make the shard again")
    content = archive.extractfile(member)
    assert content is not None
    text = content.read().decode("utf-8", errors="replace").strip()
    where, fields = f"{shard}: {member.name}", {"label" if extension == "cls" else "caption": text}
    if extension == "json":
        with reading(f"{where}: is not JSON", "make the shard again"):
            found = json.loads(text)
        fields = found if isinstance(found, dict) else {}
    caption = next((fields[name] for name in ("caption", "text") if isinstance(fields.get(name), str)), None)
    label = next((str(fields[name]) for name in ("label", "cls") if fields.get(name) is not None), None)
    if label is not None and not (label.isascii() and label.isdecimal() and len(label) < 10):
        raise DataError(f"{where}: the class must be a whole number from 0, got {label[:40]!r}; make the shard again")
    for name, value in (("caption", caption), ("label", None if label is None else int(label))):
        if value is not None and (sample[name] is None or extension != "json"):
            sample[name] = value
