"""Base class and registry of data sources. Shapes: n items, C channels, H x W pixels."""

from __future__ import annotations

import hashlib
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from tarfile import TarError
from typing import Any, NamedTuple, TypeVar
from zipfile import BadZipFile

import torch
from safetensors import SafetensorError
from torch import Tensor

from scalelong.errors import DataError as DataError
from scalelong.errors import did_you_mean, require
from scalelong.progress import Progress
from scalelong.runs.validation import MAX_CLASSES

Shape = tuple[int, int, int]
Device = str | torch.device
Root = str | Path | None  # the cache folder; None: $SCALELONG_DATA or the user's cache

Value = TypeVar("Value")
Loads = TypeVar("Loads", bound="Callable[[Request], Source]")


_DAMAGE = (
    *(OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, EOFError, OverflowError, RecursionError),
    *(zlib.error, TarError, BadZipFile, SafetensorError),
)


@contextmanager
def reading(what: str, remedy: str) -> Iterator[None]:
    """Convert errors of damaged files into a DataError: "what (reason); remedy"."""
    try:
        yield
    except DataError:
        raise
    except _DAMAGE as error:
        raise DataError(f"{what} ({str(error).partition(chr(10))[0]}); {remedy}") from error


def to_float(images: Tensor) -> Tensor:
    """Convert uint8 to float32 in [-1, 1]; bit-identical on every device.

    >>> to_float(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([-1.,  1.])
    """
    return (images.to(torch.float32) * 2.0 - 255.0) * (1.0 / 255.0)


def to_uint8(images: Tensor) -> Tensor:
    """Convert [-1, 1] to uint8 with clipping; the inverse of `to_float`.

    >>> to_uint8(torch.tensor([-1.0, 0.0, 3.0]))
    tensor([  0, 128, 255], dtype=torch.uint8)
    """
    return ((images.to(torch.float32) + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)


class Source(ABC):
    """Images with optional labels and captions, in a fixed order.

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
    images: Tensor | None = None  # uint8 (n, C, H, W) if in memory
    window: int | None = None  # items are shuffled within windows of this many; None: within the whole epoch
    max_workers: int | None = None  # maximum number of worker processes; None: unlimited; 0: use a thread

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    def stored(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of what `read` returns."""
        return self.shape, torch.uint8

    @property
    def nbytes(self) -> int:
        """Bytes of all items as stored."""
        return len(self) * math.prod(self.stored[0]) * self.stored[1].itemsize

    @abstractmethod
    def read(self, item: int) -> Tensor:
        """One item as stored: uint8 (C, H, W) for images."""

    def read_many(self, items: Sequence[int]) -> Tensor:
        """Items as stored: uint8 (len(items), C, H, W) for images."""
        return torch.stack([self.read(item) for item in items])

    def where(self, item: int) -> str:
        """Name of an item in error messages."""
        return f"{self.name} row {item}"

    def verify(self, item: int) -> tuple[int, int] | None:
        """Read one item completely or raise a DataError; return (width, height) of images that are resized."""
        self.read(item)
        return None

    def require_same_classes(self, training: Source, what: str) -> None:
        """Raise if a label means another class here than in the training data."""
        known = training.class_names
        for k, name in enumerate(self.class_names):
            if k >= len(known) or known[k] != name:
                there = repr(known[k]) if k < len(known) else "missing"
                raise DataError(
                    f"{what}: class {k} is {name!r}, in the training data {there}; give both the same classes"
                )

    def set_labels(self, labels: Tensor, class_names: Sequence[str] = (), where: str = "") -> None:
        """Set labels and class names (default: numbers); raise for labels out of range."""
        self.labels = labels.to(torch.int64)
        largest = int(self.labels.max())
        if max(len(class_names), 0 if class_names else largest + 1) > MAX_CLASSES:
            found = f"item {int(self.labels.argmax())} has label {largest}"
            raise DataError(f"{where or self.name}: {found}, but {MAX_CLASSES:,} classes are the most; merge some")
        self.class_names = list(class_names) or [str(k) for k in range(largest + 1)]
        self.num_classes = len(self.class_names)
        bad = ((self.labels < 0) | (self.labels >= self.num_classes)).nonzero().flatten()
        if len(bad):
            row, value = int(bad[0]), int(self.labels[bad[0]])
            expected = f"expected 0 .. {self.num_classes - 1} ({len(bad)} such item(s)); correct or remove them"
            raise DataError(f"{where or self.name}: item {row} has label {value}, {expected}")

    def prepare(self, stored: Tensor, seed: int, index: Tensor, mirrored: Tensor | None) -> Tensor:  # noqa: ARG002
        """Training input, float32 (B, C, H, W), from stored items with global indices (B,); `mirrored` ones flipped."""
        if mirrored is not None:
            stored = torch.where(mirrored[:, None, None, None], stored.flip(-1), stored)
        return to_float(stored)

    def _form(self) -> object:
        """How items are processed; part of the fingerprint."""
        return (self.shape, len(self))

    def _contents(self) -> Iterator[bytes]:
        """Bytes that identify the items, for the fingerprint: by default, evenly spaced items as stored."""
        yield self.read_many(hashed_items(len(self))).numpy().tobytes()

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the data, independent of its location."""
        digest = hashlib.sha256(repr(self._form()).encode())
        for content in self._contents():
            digest.update(content)
        numbers = self.caption_counts if self.labels is None else self.labels
        if numbers is not None:
            digest.update(numbers.numpy().astype("<i8").tobytes())
        for caption in self.captions or ():
            digest.update(caption.encode() + b"\0")
        return digest.hexdigest()


class MemorySource(Source):
    """A dataset in memory.

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
            raise DataError(f"{name}: images must be uint8 (n, 1 or 3, H, W), got {images.dtype} {tuple(images.shape)}")
        for what, values in (("labels", labels), ("captions", captions)):
            if values is not None and len(values) != len(images):
                raise DataError(f"{name}: {len(values)} {what} for {len(images)} images; use files of one set")
        self.name, self.images, self.captions = name, images, captions
        self.shape = (images.shape[1], images.shape[2], images.shape[3])
        if labels is not None:
            self.set_labels(labels, class_names)

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


class Request(NamedTuple):
    """Arguments of `load_source` or `check`."""

    path: str  # the part after "prefix:", or the name of a named dataset
    image_size: int | None = None
    split: str = "train"
    root: Root = None


class SourceSpec(NamedTuple):
    """Name, description, loader and checker of a source; `register` adds it to `SOURCES`."""

    form: str  # "cifar10", or a prefix and what follows it: "folder:PATH"
    description: str
    load: Callable[[Request], Source]
    splits: tuple[str, ...] = ()  # of named datasets; others find theirs in the data
    check: Callable[[Request], list[DataError]] | None = None  # None: every item is read
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
    """The spec of a name and the part after its prefix; a plain path is a folder."""
    prefix, _, path = name.partition(":")
    spec = SOURCES.get(prefix)
    if spec and (path if ":" in spec.form else name == prefix):
        return spec, path or name
    if name and Path(name).expanduser().exists():
        return SOURCES["folder"], name
    known = [spec.form for spec in SOURCES.values()]
    if name.startswith(("~", ".")) or {"/", "\\"} & set(name):
        raise DataError(f"data.name: {name!r} is not an existing folder; check the path. Known: {', '.join(known)}")
    hint = did_you_mean(name.lower(), [form for form in known if ":" not in form])
    raise DataError(f"data.name: unknown {name!r}; {hint}choose one of {', '.join(known)}")


def load_source(name: str | Path, *, image_size: int | None = None, split: str = "train", root: Root = None) -> Source:
    """Load a source by name; `image_size` crops and resizes, `root` is the cache folder (see `cache_dir`).

    >>> source = load_source("digits")
    >>> len(source), source.shape, source.num_classes
    (1797, (1, 8, 8), 10)
    """
    usable = image_size is None or (not isinstance(image_size, bool) and image_size >= 1)
    require(usable, "data.image_size", "a positive whole number", image_size)
    spec, path = find_source(str(name))
    if spec.splits and split not in spec.splits:
        raise DataError(f"data.split: {spec.form} has no {split!r}; it has {', '.join(spec.splits)}")
    return spec.load(Request(path, image_size, split, root))


def check(name: str, *, image_size: int | None = None, root: Root = None, split: str = "train") -> list[DataError]:
    """List bad files, rows and samples of a source; without an image size, mixed sizes are errors too.

    >>> check("emoji32")
    []
    """
    spec, path = find_source(name)
    if spec.check is not None:
        return spec.check(Request(path, image_size, split, root))
    try:
        source = load_source(name, image_size=1, split=split, root=root)  # with a size, loading decodes no image
    except DataError as error:
        return [error]

    def verify(item: int) -> tuple[int, int] | DataError | None:
        try:
            return source.verify(item)
        except DataError as error:
            return error

    results = list(Progress(threaded(verify, range(len(source))), total=len(source), desc=name, unit="img"))
    problems = [each for each in results if isinstance(each, DataError)]
    sizes = sorted({each for each in results if isinstance(each, tuple)})
    if image_size is None and spec.shape is None and len(sizes) > 1:
        shown = ", ".join(f"{width} x {height}" for width, height in sizes[:3]) + (", ..." if len(sizes) > 3 else "")
        problems.append(DataError(f"{name}: images of {len(sizes)} sizes ({shown}); set data.image_size"))
    return problems


def threaded(function: Callable[[int], Value], items: Sequence[int]) -> Iterator[Value]:
    """Map a function over items with threads, in order (Pillow releases the GIL)."""
    with ThreadPoolExecutor(8) as pool:
        for start in range(0, len(items), 1024):  # results wait in memory
            yield from pool.map(function, items[start : start + 1024])


def hashed_items(count: int) -> list[int]:
    """Up to 64 evenly spaced items to hash for the fingerprint."""
    return torch.linspace(0, count - 1, min(count, 64)).long().tolist()
