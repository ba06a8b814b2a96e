"""Sets larger than memory, as tar shards in the layout of webdataset: `key.png` with `key.cls`, `key.txt` or `key.json`.

Every sample can be read on its own through an index of each shard, so the order stays a function of (seed, index).
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, product
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from scalelong.data.base import sampled_items, update_with_annotations
from scalelong.data.cache import cache_dir
from scalelong.data.errors import DataError
from scalelong.data.images import open_rgb
from scalelong.data.pictures import PictureSource
from scalelong.data.tar_index import TarIndex, tar_index

_BRACES = re.compile(r"\{([^{}]*)\}")
_OPEN_FILES = 128


class WebDatasetSource(PictureSource):
    """Pictures in tar shards, read by position; nothing but the index is held in memory."""

    def __init__(
        self, pattern: str, image_size: int | None = None, split: str = "train", root: str | Path | None = None
    ) -> None:
        if split != "train":
            raise DataError(
                f"data.split: shards have no splits, got {split!r}; give the pattern of that split's shards"
            )
        self.name = f"webdataset:{pattern}"
        self.shards = expand(pattern)
        cache = cache_dir(root) / "webdataset"
        found = [tar_index(shard, cache) for shard in tqdm(self.shards, desc="index", unit="shard", disable=None)]
        self._starts = list(accumulate((len(index.keys) for index in found), initial=0))
        self._offsets = np.concatenate([index.offsets for index in found])
        self._sizes = np.concatenate([index.sizes for index in found])
        self._keys = [key for index in found for key in index.keys]
        self.labels, self.class_names = self._labels(found)
        self.num_classes = len(self.class_names)
        captions = self._all_or_none([caption for index in found for caption in index.captions], "caption")
        self.captions = captions
        self.image_size = image_size
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
        """The bytes of one picture; positions are absolute, so processes can share an open file."""
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
        """Over the table of contents, labels, captions, and the bytes of evenly spaced pictures."""
        digest = hashlib.sha256(repr((self.shape, len(self))).encode())
        digest.update(self._offsets.astype("<i8").tobytes() + self._sizes.astype("<i8").tobytes())
        for item in sampled_items(len(self)):
            digest.update(self._content(item))
        update_with_annotations(digest, self.labels, self.captions)
        return digest.hexdigest()


def expand(pattern: str) -> list[Path]:
    """The shards of `a/{000..009}.tar`, `a/{x,y}.tar` or `a/*.tar`, all of them there."""
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
