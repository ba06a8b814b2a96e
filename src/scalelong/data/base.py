"""What a source of images is. Legend: n items, C channels, H x W pixels."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from scalelong.data.errors import DataError
from scalelong.data.images import to_float
from scalelong.data.order import sample_to_item

Shape = tuple[int, int, int]

_SAMPLED = 64  # items whose contents enter a fingerprint where reading all would take too long


class Source(ABC):
    """Images with optional labels and captions; items are numbered 0 .. n - 1, always in the same order."""

    name: str
    shape: Shape  # (C, H, W), the same for every item
    num_classes: int  # 0: no labels
    labels: Tensor | None  # (n,) int64
    captions: list[str] | None  # one for each item, or as many as `caption_counts` says
    caption_counts: Tensor | None = None  # (n,) how many captions each item has, one after another; None: one each
    class_names: list[str]
    images: Tensor | None = None  # uint8 (n, C, H, W) where the set is held in memory
    max_workers: int | None = None  # how many processes may read it at a time; None: any number; 0: a thread reads it

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    def stored(self) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and type of what `read` gives."""
        return self.shape, torch.uint8

    @abstractmethod
    def read(self, item: int) -> Tensor:
        """One item as it is stored: of images, uint8 (C, H, W)."""

    def read_many(self, items: Sequence[int]) -> Tensor:
        """Items as they are stored: of images, uint8 (len(items), C, H, W)."""
        return torch.stack([self.read(item) for item in items])

    def order(self, seed: int, index: Tensor) -> Tensor:
        """The item at each global sample index; every epoch of n samples is a fresh permutation."""
        return sample_to_item(seed, len(self), index)

    def prepare(self, stored: Tensor, seed: int, index: Tensor, mirrored: Tensor | None) -> Tensor:  # noqa: ARG002
        """What the network is trained on, float32 (B, C, H, W), of stored items (B, ...), all on one device.

        index: (B,) global sample indices. mirrored: (B,) which of them are flipped; None: none.
        """
        if mirrored is not None:
            stored = torch.where(mirrored[:, None, None, None], stored.flip(-1), stored)
        return to_float(stored)

    @abstractmethod
    def _digest(self) -> str: ...

    @cached_property
    def fingerprint(self) -> str:
        """sha256 that changes when the data does, and does not depend on where the data lies."""
        return self._digest()

    @property
    def nbytes(self) -> int:
        """Bytes of all items as they are stored."""
        shape, dtype = self.stored
        return len(self) * math.prod(shape) * dtype.itemsize


class MemorySource(Source):
    """A set that is wholly in memory."""

    images: Tensor

    def __init__(
        self,
        name: str,
        images: Tensor,
        labels: Tensor | None = None,
        class_names: Sequence[str] = (),
        captions: list[str] | None = None,
    ) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
            raise DataError(
                f"{name}: images must be uint8 (n, 1 or 3, H, W), got {images.dtype} {tuple(images.shape)}",
                "wrong channels",
            )
        for what, values in (("labels", labels), ("captions", captions)):
            if values is not None and len(values) != len(images):
                raise DataError(
                    f"{name}: {len(values)} {what} for {len(images)} images; the files do not belong together"
                )
        self.name, self.images, self.captions = name, images, captions
        self.shape = (images.shape[1], images.shape[2], images.shape[3])
        self.class_names = list(class_names)
        self.num_classes = len(self.class_names) if labels is not None else 0
        self.labels = checked_labels(labels, self.num_classes, name)

    def __len__(self) -> int:
        return len(self.images)

    def read(self, item: int) -> Tensor:
        return self.images[item]

    def read_many(self, items: Sequence[int]) -> Tensor:
        return self.images[torch.as_tensor(items, dtype=torch.int64)]

    def _digest(self) -> str:
        digest = hashlib.sha256(repr(self.shape).encode())
        digest.update(self.images.contiguous().numpy().data)
        update_with_annotations(digest, self.labels, self.captions)
        return digest.hexdigest()


def checked_labels(labels: Tensor | None, num_classes: int, where: str) -> Tensor | None:
    """int64 labels, all in 0 .. num_classes - 1, or a DataError that names the first item that is not."""
    if labels is None:
        return None
    labels = labels.to(torch.int64)
    bad = ((labels < 0) | (labels >= num_classes)).nonzero().flatten()
    if len(bad):
        first = int(bad[0])
        raise DataError(
            f"{where}: item {first} has label {int(labels[first])}, expected 0 .. {num_classes - 1} "
            f"({len(bad)} such item(s)); correct or remove them"
        )
    return labels


def sampled_items(count: int) -> list[int]:
    """Evenly spaced items of 0 .. count - 1, the first and the last among them: those that a fingerprint reads."""
    return torch.linspace(0, count - 1, min(count, _SAMPLED)).long().tolist()


def update_with_annotations(digest: hashlib._Hash, labels: Tensor | None, captions: list[str] | None) -> None:
    """Add labels and captions to a running hash."""
    if labels is not None:
        digest.update(labels.numpy().astype("<i8").tobytes())
    for caption in captions or ():
        digest.update(caption.encode() + b"\0")
