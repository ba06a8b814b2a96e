"""Sets larger than memory, as tar shards in the layout of webdataset: `key.png` with `key.cls`, `key.txt` or `key.json`.

An index of each shard, built by one pass of tarfile over its headers and cached, tells where every image is. Images are
then read at their offset with os.pread: tarfile itself cannot serve threads and processes from any place without
scanning the shard again. So the order stays a function of (seed, index).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, product
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from scalelong.data.base import DataError, Request, hashed_items, register, update_with_annotations
from scalelong.data.download import cache_dir
from scalelong.data.images import EXTENSIONS, PictureSource, open_rgb
from scalelong.files import write_text

_BRACES = re.compile(r"\{([^{}]*)\}")
_OPEN_FILES = 128
_INDEX_VERSION = 2
_TEXTS = frozenset({"txt", "text", "caption"})
_BLOCK = 512


@register("webdataset:PATTERN", "tar shards, for sets larger than memory")
class WebDatasetSource(PictureSource):
    """Images in tar shards, read by position; only the index is held in memory."""

    def __init__(self, request: Request) -> None:
        if request.split != "train":
            raise DataError(
                f"data.split: shards have no splits, got {request.split!r}; give the pattern of that split's shards"
            )
        self.name = f"webdataset:{request.path}"
        self.shards = expand(request.path)
        cache = cache_dir(request.root) / "webdataset"
        found = [tar_index(shard, cache) for shard in tqdm(self.shards, desc="index", unit="shard", disable=None)]
        self._starts = list(accumulate((len(index.keys) for index in found), initial=0))
        self._offsets = np.concatenate([index.offsets for index in found])
        self._sizes = np.concatenate([index.sizes for index in found])
        self._keys = [key for index in found for key in index.keys]
        self.labels, self.class_names = self._labels(found)
        self.num_classes = len(self.class_names)
        self.captions = self._all_or_none([caption for index in found for caption in index.captions], "caption")
        self.image_size = request.image_size
        self._files: dict[int, int] = {}
        self._lock = Lock()
        self.shape = self.common_shape()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}, "_lock": None}  # each process opens the shards itself

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state | {"_lock": Lock()}

    def where(self, item: int) -> str:
        return f"{self.shards[self._home(item)]}: {self._keys[item]}"

    def open(self, item: int) -> Image.Image:
        return open_rgb(io.BytesIO(self._content(item)), self.where(item))

    def _home(self, item: int) -> int:
        return bisect_right(self._starts, item) - 1

    def _content(self, item: int) -> bytes:
        """The bytes of one image; offsets are absolute, so processes can share an open file."""
        home, size = self._home(item), int(self._sizes[item])
        with self._lock:  # another thread may be about to close a file
            content = os.pread(self._open_file(home), size, int(self._offsets[item]))
        if len(content) < size:
            raise DataError(f"{self.where(item)}: cut short since it was indexed; get the shard again", "truncated")
        return content

    def _open_file(self, home: int) -> int:
        if home not in self._files:
            while len(self._files) >= _OPEN_FILES:
                os.close(self._files.pop(next(iter(self._files))))
            self._files[home] = os.open(self.shards[home], os.O_RDONLY)
        return self._files[home]

    def _labels(self, found: Sequence[TarIndex]) -> tuple[Tensor | None, list[str]]:
        labels = self._all_or_none([label for index in found for label in index.labels], "class")
        if labels is None:
            return None, []
        return torch.tensor(labels, dtype=torch.int64), [str(number) for number in range(max(labels) + 1)]

    def _all_or_none(self, values: list[Any], what: str) -> list[Any] | None:
        without = [item for item, value in enumerate(values) if value is None]
        if len(without) == len(values):
            return None
        if without:
            raise DataError(
                f"{self.where(without[0])}: has no {what}, but other samples have ({len(without)} without); make the "
                "shards again, with all or none"
            )
        return values

    def _digest(self) -> str:
        """Over the table of contents, labels, captions, and the bytes of evenly spaced images."""
        digest = hashlib.sha256(repr((self.shape, len(self))).encode())
        digest.update(self._offsets.astype("<i8").tobytes() + self._sizes.astype("<i8").tobytes())
        for item in hashed_items(len(self)):
            digest.update(self._content(item))
        update_with_annotations(digest, self.labels, self.captions)
        return digest.hexdigest()


def expand(pattern: str) -> list[Path]:
    """The shards of `a/{000..009}.tar`, `a/{x,y}.tar` or `a/*.tar`; a missing one is refused."""
    parts = _BRACES.split(pattern)
    choices = [_choices(part) if number % 2 else [part] for number, part in enumerate(parts)]
    shards: list[Path] = []
    for name in ("".join(words) for words in product(*choices)):
        path = Path(name).expanduser()
        matches = sorted(path.parent.glob(path.name)) if any(sign in path.name for sign in "*?[") else [path]
        shards += matches
    missing = [shard for shard in shards if not shard.is_file()]
    if missing or not shards:
        which = f"{len(missing)} shard(s), the first is {missing[0]}" if missing else f"no shard matches {pattern}"
        raise DataError(
            f"data.name: missing: {which}; check the pattern, e.g. webdataset:data/{{000..009}}.tar", "missing"
        )
    return shards


def _choices(inside: str) -> list[str]:
    """`000..012` or `a,b`."""
    bounds = re.fullmatch(r"(\d+)\.\.(\d+)", inside)
    if bounds is None:
        return inside.split(",")
    first, last = bounds.groups()
    width = len(first) if first.startswith("0") else 0
    return [str(number).zfill(width) for number in range(int(first), int(last) + 1)]


@dataclass(frozen=True)
class TarIndex:
    """One entry per sample, in the order of the file."""

    keys: list[str]
    offsets: list[int]
    sizes: list[int]
    labels: list[int | None]
    captions: list[str | None]


@dataclass
class _Sample:
    image: tuple[int, int] | None = None
    label: int | None = None
    caption: str | None = None


def tar_index(shard: Path, cache: Path) -> TarIndex:
    """The index of a shard, from the cache if the file has not changed since."""
    try:
        status = shard.stat()
    except OSError as error:
        raise DataError(f"{shard}: cannot be opened ({error.strerror}); check the pattern", "missing") from error
    identity = f"{_INDEX_VERSION} {shard.resolve()} {status.st_size} {status.st_mtime_ns}"
    kept = cache / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"
    if kept.is_file():
        return TarIndex(**json.loads(kept.read_text()))
    index = _scan(shard, status.st_size)
    write_text(kept, json.dumps(asdict(index)))
    return index


def _scan(shard: Path, size: int) -> TarIndex:
    samples: dict[str, _Sample] = {}
    try:
        with tarfile.open(shard, "r:") as archive:
            for member in archive:
                if member.isreg():
                    _note(archive, member, samples, shard)
            end = archive.offset
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"{shard}: not a whole tar file ({error}); get it again", "truncated") from error
    if end + _BLOCK > size or not _ends_empty(shard, end):
        raise DataError(f"{shard}: cut short (no end of archive after {end:,} bytes); get it again", "truncated")
    return _index(samples, shard)


def _ends_empty(shard: Path, end: int) -> bool:
    """A tar file ends with blocks of zeros; one cut between two members does not, which tarfile does not report."""
    with shard.open("rb") as file:
        file.seek(end)
        return file.read(_BLOCK) == b"\0" * _BLOCK


def _note(archive: tarfile.TarFile, member: tarfile.TarInfo, samples: dict[str, _Sample], shard: Path) -> None:
    """A member `key.extension` belongs to sample `key`, as in webdataset."""
    path = PurePosixPath(member.name)
    stem, _, extension = path.name.partition(".")
    extension = extension.lower()
    if not stem or path.name.startswith("."):
        return
    key = str(path.parent / stem)
    sample = samples.setdefault(key, _Sample())
    if f".{extension.rpartition('.')[2]}" in EXTENSIONS:
        if sample.image is not None:
            raise DataError(f"{shard}: sample {key!r} has a second image, {member.name}; make the shard again with one")
        sample.image = (member.offset_data, member.size)
        return
    if extension not in (*_TEXTS, "cls", "json"):
        return
    content = archive.extractfile(member)
    assert content is not None
    text = content.read().decode("utf-8", errors="replace").strip()
    where = f"{shard}: {member.name}"
    if extension in _TEXTS:
        sample.caption = text
    elif extension == "cls":
        sample.label = _whole(text, where)
    else:
        _note_json(sample, text, where)


def _note_json(sample: _Sample, text: str, where: str) -> None:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: is not JSON ({error}); make the shard again", "unreadable") from error
    found: dict[str, Any] = content if isinstance(content, dict) else {}
    caption = next((found[key] for key in ("caption", "text") if isinstance(found.get(key), str)), None)
    label = next((found[key] for key in ("label", "cls") if found.get(key) is not None), None)
    sample.caption = caption if sample.caption is None else sample.caption
    sample.label = _whole(str(label), where) if label is not None and sample.label is None else sample.label


def _whole(text: str, where: str) -> int:
    if not text.isdigit():
        raise DataError(f"{where}: the class must be a whole number from 0, got {text[:40]!r}; make the shard again")
    return int(text)


def _index(samples: dict[str, _Sample], shard: Path) -> TarIndex:
    if not samples:
        raise DataError(f"{shard}: holds no samples; check the pattern", "missing")
    for key, sample in samples.items():
        if sample.image is None:
            raise DataError(f"{shard}: sample {key!r} has no image; make the shard again", "missing")
    places = [sample.image or (0, 0) for sample in samples.values()]
    return TarIndex(
        list(samples),
        [offset for offset, _ in places],
        [size for _, size in places],
        [sample.label for sample in samples.values()],
        [sample.caption for sample in samples.values()],
    )
