"""What a source of images is, and the registry of sources. Legend: n items, C channels, H x W pixels."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from scalelong.errors import did_you_mean

Shape = tuple[int, int, int]
Root = str | Path | None  # the cache folder; None: $SCALELONG_DATA or the user's cache
Loads = TypeVar("Loads", bound="Callable[[Request], Source]")
Kind = Literal["missing", "truncated", "wrong hash", "unreadable", "wrong channels", "invalid"]

_HASHED_ITEMS = 64  # items whose contents enter a fingerprint where reading all would take too long


class DataError(ValueError):
    """Bad data; the message names the file (or row) and the remedy."""

    def __init__(self, message: str, kind: Kind = "invalid") -> None:
        super().__init__(message)
        self.kind: Kind = kind


@dataclass(frozen=True)
class Problem:
    """One bad file or item, as `check` lists them."""

    path: str
    kind: Kind
    message: str

    def __str__(self) -> str:
        return self.message if self.path in self.message else f"{self.path}: {self.message}"


def to_float(images: Tensor) -> Tensor:
    """uint8 to float32 in [-1, 1]; a multiplication, so that every device gives the same bits.

    >>> to_float(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([-1.,  1.])
    """
    return (images.to(torch.float32) * 2.0 - 255.0) * (1.0 / 255.0)


def to_uint8(images: Tensor) -> Tensor:
    """[-1, 1] to uint8, the inverse of `to_float`; values outside are clipped.

    >>> to_uint8(torch.tensor([-1.0, 0.0, 3.0]))
    tensor([  0, 128, 255], dtype=torch.uint8)
    """
    return ((images.to(torch.float32) + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)


class Source(ABC):
    """Images with optional labels and captions; items are numbered 0 .. n - 1, always in the same order.

    >>> class Ramp(Source):
    ...     name, shape = "ramp", (1, 2, 2)
    ...     def __len__(self):
    ...         return 100
    ...     def read(self, item):
    ...         return torch.full(self.shape, item, dtype=torch.uint8)
    >>> Ramp().read_many([3, 7])[:, 0, 0, 0]
    tensor([3, 7], dtype=torch.uint8)
    """

    name: str
    shape: Shape  # (C, H, W), the same for every item
    num_classes: int = 0  # 0: no labels
    labels: Tensor | None = None  # (n,) int64
    captions: list[str] | None = None  # one per item, or `caption_counts` per item
    caption_counts: Tensor | None = None  # (n,) captions of each item, stored consecutively; None: one each
    class_names: Sequence[str] = ()
    images: Tensor | None = None  # uint8 (n, C, H, W) if the set is held in memory
    window: int | None = None  # items are shuffled within windows of this many; None: within the whole epoch
    max_workers: int | None = None  # processes that may read it at a time; None: any number; 0: a thread reads it

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    def stored(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of what `read` returns."""
        return self.shape, torch.uint8

    @abstractmethod
    def read(self, item: int) -> Tensor:
        """One item as stored: uint8 (C, H, W) for images."""

    def read_many(self, items: Sequence[int]) -> Tensor:
        """Items as stored: uint8 (len(items), C, H, W) for images."""
        return torch.stack([self.read(item) for item in items])

    def where(self, item: int) -> str:
        """What errors call this item."""
        return f"{self.name} row {item}"

    def verify(self, item: int) -> tuple[int, int] | None:
        """Read one item whole, or raise a DataError; the image's (width, height) if it is resized afterwards."""
        self.read(item)
        return None

    def prepare(self, stored: Tensor, seed: int, index: Tensor, mirrored: Tensor | None) -> Tensor:  # noqa: ARG002
        """Training input, float32 (B, C, H, W), from stored items (B, ...), all on one device.

        index: (B,) global sample indices. mirrored: (B,) bool, items to flip; None: none.
        """
        if mirrored is not None:
            stored = torch.where(mirrored[:, None, None, None], stored.flip(-1), stored)
        return to_float(stored)

    def _form(self) -> object:
        """How items are processed; enters the fingerprint."""
        return (self.shape, len(self))

    def _contents(self) -> Iterator[bytes]:
        """Bytes that identify the items, for the fingerprint: by default, evenly spaced items as stored."""
        yield self.read_many(hashed_items(len(self))).numpy().tobytes()

    @cached_property
    def fingerprint(self) -> str:
        """sha256 that changes when the data does, and does not depend on where the data is stored."""
        digest = hashlib.sha256(repr(self._form()).encode())
        for content in self._contents():
            digest.update(content)
        numbers = self.caption_counts if self.labels is None else self.labels
        if numbers is not None:
            digest.update(numbers.numpy().astype("<i8").tobytes())
        for caption in self.captions or ():
            digest.update(caption.encode() + b"\0")
        return digest.hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes of all items as stored."""
        shape, dtype = self.stored
        return len(self) * math.prod(shape) * dtype.itemsize


class MemorySource(Source):
    """A set held in memory.

    >>> source = MemorySource("noise", torch.randint(0, 256, (8, 3, 4, 4), dtype=torch.uint8))
    >>> len(source), source.shape
    (8, (3, 4, 4))
    """

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

    def _form(self) -> object:
        return self.shape

    def _contents(self) -> Iterator[bytes]:
        yield self.images.contiguous().numpy().tobytes()


def checked_labels(labels: Tensor | None, num_classes: int, where: str) -> Tensor | None:
    """int64 labels, all in 0 .. num_classes - 1; a DataError names the first item that is not."""
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


def gather_rows(shard: Callable[[int], Any], starts: Sequence[int], items: Sequence[int], out: Any) -> Tensor:
    """Fill the array `out` with rows of shards; `starts` are the shards' first items, and the total."""
    wanted = np.asarray(items)
    homes = np.searchsorted(starts, wanted, side="right") - 1
    for home in np.unique(homes).tolist():
        here = homes == home
        out[here] = shard(home)[wanted[here] - starts[home]]
    return torch.from_numpy(out)


def hashed_items(count: int) -> list[int]:
    """The evenly spaced items of 0 .. count - 1 whose contents enter a fingerprint."""
    return torch.linspace(0, count - 1, min(count, _HASHED_ITEMS)).long().tolist()


@dataclass(frozen=True)
class Request:
    """What `load_source` or `check` was asked for."""

    path: str  # what follows "prefix:"; "" for a named set
    image_size: int | None = None
    split: str = "train"
    root: Root = None


@dataclass(frozen=True)
class SourceSpec:
    """How a source is named, described, loaded and checked; `register` adds it to `SOURCES`."""

    form: str  # "cifar10", or a prefix and what follows it: "folder:PATH"
    description: str
    load: Callable[[Request], Source]
    splits: tuple[str, ...] = ()  # of a named set; sources with a path look for theirs in the data
    check: Callable[[Request], list[Problem]] | None = None  # None: every item is read
    shape: Shape | None = None  # of the items, if known without the data


SOURCES: dict[str, SourceSpec] = {}  # by name or prefix


def register(form: str, description: str, **options: Any) -> Callable[[Loads], Loads]:
    """Decorate a `Source` class or a function that takes a `Request`; options are further fields of `SourceSpec`.

    >>> @register("black", "eight black images", splits=("train",))
    ... def load_black(request):
    ...     return MemorySource("black", torch.zeros(8, 3, 4, 4, dtype=torch.uint8))
    >>> len(load_source("black")), SOURCES.pop("black").description
    (8, 'eight black images')
    """

    def add(load: Loads) -> Loads:
        SOURCES[form.partition(":")[0]] = SourceSpec(form, description, load, **options)
        return load

    return add


def find_source(name: str) -> tuple[SourceSpec, str]:
    """The spec that a name refers to, and what follows its prefix; a plain path is a folder."""
    prefix, _, path = name.partition(":")
    spec = SOURCES.get(prefix)
    if spec and (path or name == spec.form):
        return spec, path
    if name and Path(name).expanduser().is_dir():
        return SOURCES["folder"], name
    known = [spec.form for spec in SOURCES.values()]
    forms = ", ".join(known)
    if any(separator in name for separator in ("/", "\\")) or name.startswith(("~", ".")):
        raise DataError(f"data.name: {name!r} is not an existing folder; check the path. Known: {forms}")
    hint = did_you_mean(name.lower(), [form for form in known if ":" not in form])
    raise DataError(f"data.name: unknown {name!r}; {hint}choose one of {forms}")


def load_source(
    name_or_path: str | Path, *, image_size: int | None = None, split: str = "train", root: Root = None
) -> Source:
    """Load a source by name; `image_size` crops and resizes, `root` is the cache folder (see `cache_dir`).

    >>> source = load_source("digits")
    >>> len(source), source.shape, source.num_classes
    (1797, (1, 8, 8), 10)
    """
    if image_size is not None and (isinstance(image_size, bool) or image_size < 1):
        raise ValueError(f"data.image_size: must be a positive whole number, got {image_size!r}")
    spec, path = find_source(str(name_or_path))
    if spec.splits and split not in spec.splits:
        raise DataError(f"data.split: {spec.form} has no {split!r}; it has {', '.join(spec.splits)}", "missing")
    return spec.load(Request(path, image_size, split, root))


def expected_shape(name: str) -> Shape | None:
    """(C, H, W) of a source's items if known without the data."""
    return find_source(name)[0].shape


def check(name: str, *, image_size: int | None = None, root: Root = None, split: str = "train") -> list[Problem]:
    """Read all of a source and list every bad file, row or sample; an empty list means that all of it is good.

    image_size: the size that images will be resized to; without it all must have one size.

    >>> check("emoji32")
    []
    """
    spec, path = find_source(name)
    if spec.check is not None:
        return spec.check(Request(path, image_size, split, root))
    try:
        source = load_source(name, image_size=1, split=split, root=root)  # with a size, loading decodes no image
    except DataError as error:
        return [Problem(name, error.kind, str(error))]
    problems, sizes = [], set()
    for item in tqdm(range(len(source)), desc=name, disable=None):
        try:
            size = source.verify(item)
            sizes |= {size} if size else set()
        except DataError as error:
            problems.append(Problem(source.where(item), error.kind, str(error)))
    if image_size is None and spec.shape is None and len(sizes) > 1:
        shown = ", ".join(f"{width} x {height}" for width, height in sorted(sizes)[:3])
        more = ", ..." if len(sizes) > 3 else ""
        problems.append(
            Problem(name, "invalid", f"{name}: images of {len(sizes)} sizes ({shown}{more}); set data.image_size")
        )
    return problems
