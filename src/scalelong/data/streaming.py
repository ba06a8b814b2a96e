"""Hugging Face data sets that are larger than the disk: read as a stream, never stored.

A stream cannot be read at any place, so its order is coarser than that of other sources: windows of rows come one after
another, and within a window the order is a function of (seed, index). Going back to a place means skipping to its window.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from threading import Lock
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from scalelong.data.base import checked_labels, update_with_annotations
from scalelong.data.errors import DataError
from scalelong.data.huggingface import (
    caption_column,
    cell_image,
    filled,
    image_column,
    label_column,
    library,
    open_stream,
)
from scalelong.data.pictures import PictureSource
from scalelong.random import random_bits

WINDOW = 4096  # rows held in memory at a time, still encoded


class StreamedSource(PictureSource):
    """The images of a stream; labels and captions are read first, in a pass over their columns alone."""

    max_workers = 0  # each process would stream everything again, and Arrow's threads may hang in one that was forked

    def __init__(self, name: str, image_size: int | None = None, split: str = "train", window: int = WINDOW) -> None:
        name, _, rows = name.partition("#")
        if rows and (not rows.isdigit() or int(rows) < 1):
            raise DataError(f"data.name: hf-stream:{name}#{rows}: after # comes the number of rows to use")
        self.name, self.window = f"hf-stream:{name}", window
        stream = open_stream(name, split)
        self._column = image_column(stream, self.name)
        self._stream = stream.cast_column(self._column, library().Image(decode=False)).select_columns([self._column])
        self._take_notes(stream, int(rows) if rows else None, split)
        self.image_size = image_size
        self._cursor: tuple[int, Iterator[Any]] | None = None  # the window that comes next, and where it is read from
        self._windows: dict[int, list[Any]] = {}
        self._lock = Lock()
        self.shape = self.common_shape()

    def __len__(self) -> int:
        return self._count

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cursor": None, "_windows": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state | {"_lock": Lock()}

    def order(self, seed: int, index: Tensor) -> Tensor:
        """Window after window; within one, a fresh permutation every epoch."""
        index = index.to(device="cpu", dtype=torch.int64)
        return torch.tensor([self._item(seed, place) for place in index.tolist()], dtype=torch.int64)

    def _item(self, seed: int, place: int) -> int:
        epoch, within = divmod(place, len(self))
        first = within // self.window * self.window
        size = min(self.window, len(self) - first)
        return first + int(_shuffled(seed, epoch * len(self) + first, size)[within - first])

    def where(self, item: int) -> str:
        return f"{self.name} row {item}"

    def open(self, item: int) -> Image.Image:
        number, place = divmod(item, self.window)
        with self._lock:  # a stream stands at one place
            rows = self._windows.get(number) or self._load(number)
        if place >= len(rows):
            raise DataError(
                f"{self.where(item)}: the stream ended before; it has changed, or #ROWS is too many", "truncated"
            )
        return cell_image(rows[place][self._column], self.where(item))

    def _load(self, number: int) -> list[Any]:
        """Read one window, going on where the stream stands if that is where it starts; two windows are kept."""
        following, rows = self._cursor or (0, iter(self._stream))
        if following != number:
            rows = iter(self._stream.skip(number * self.window))
        found = list(islice(rows, self.window))
        self._cursor = (number + 1, rows)
        while len(self._windows) >= 2:
            self._windows.pop(next(iter(self._windows)))
        self._windows[number] = found
        return found

    def _take_notes(self, stream: Any, rows: int | None, split: str) -> None:
        """Labels, captions and the number of rows, from the light columns."""
        label, names = label_column(stream)
        caption = caption_column(stream, self._column)
        columns = [name for name in (label, caption) if name is not None]
        table = list(islice(stream.select_columns(columns), rows)) if columns else []
        self._count = len(table) if columns else rows or _rows_known(stream, split, self.name)
        self.captions = filled([row[caption] for row in table], caption, "caption", self.name) if caption else None
        found = filled([row[label] for row in table], label, "label", self.name) if label else None
        labels = None if found is None else torch.tensor(found, dtype=torch.int64)
        self.class_names = names or ([] if labels is None else [str(k) for k in range(int(labels.max()) + 1)])
        self.num_classes = len(self.class_names)
        self.labels = checked_labels(labels, self.num_classes, self.name)

    def _digest(self) -> str:
        """Over the number of rows, labels, captions, and the first row's image: more would read the stream."""
        digest = hashlib.sha256(repr((self.shape, len(self), self.window)).encode())
        digest.update(self.open(0).tobytes())
        update_with_annotations(digest, self.labels, self.captions)
        return digest.hexdigest()


@lru_cache(maxsize=8)
def _shuffled(seed: int, first: int, size: int) -> Tensor:
    return torch.argsort(random_bits(seed, "order", torch.arange(first, first + size)), stable=True)


def _rows_known(stream: Any, split: str, name: str) -> int:
    """What the data set says of itself; a stream cannot be counted without reading all of it."""
    splits = getattr(stream.info, "splits", None) or {}
    count = getattr(splits.get(split), "num_examples", None)
    if not count:
        raise DataError(f"data.name: {name} does not say how many rows it has; write {name}#ROWS")
    return int(count)
