"""The registry of sources: each module of a source adds how it is named, described, loaded and checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from scalelong.data.base import DataError, Problem, Root, Shape, Source
from scalelong.data.images import threaded
from scalelong.errors import did_you_mean

Loads = TypeVar("Loads", bound="Callable[[Request], Source]")


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

    >>> import torch
    >>> from scalelong.data import MemorySource
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
    if spec and (path if ":" in spec.form else name == prefix):
        return spec, path
    if name and Path(name).expanduser().is_dir():
        return SOURCES["folder"], name
    known = [spec.form for spec in SOURCES.values()]
    forms = ", ".join(known)
    if name.startswith(("~", ".")) or {"/", "\\"} & set(name):
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
        raise DataError(f"data.split: {spec.form} has no {split!r}; it has {', '.join(spec.splits)}")
    return spec.load(Request(path, image_size, split, root))


def expected_shape(name: str) -> Shape | None:
    """(C, H, W) of a source's items if known without the data."""
    return find_source(name)[0].shape


def check(name: str, *, image_size: int | None = None, root: Root = None, split: str = "train") -> list[Problem]:
    """List every bad file, row or sample of a source; without an image size, images of several sizes are a problem.

    >>> check("emoji32")
    []
    """
    spec, path = find_source(name)
    if spec.check is not None:
        return spec.check(Request(path, image_size, split, root))
    try:
        source = load_source(name, image_size=1, split=split, root=root)  # with a size, loading decodes no image
    except DataError as error:
        return [Problem(name, str(error))]

    def verify(item: int) -> tuple[int, int] | Problem | None:
        try:
            return source.verify(item)
        except DataError as error:
            return Problem(source.where(item), str(error))

    results = list(tqdm(threaded(verify, range(len(source))), total=len(source), desc=name, disable=None))
    problems = [each for each in results if isinstance(each, Problem)]
    sizes = {each for each in results if isinstance(each, tuple)}
    if image_size is None and spec.shape is None and len(sizes) > 1:
        shown = ", ".join(f"{width} x {height}" for width, height in sorted(sizes)[:3])
        more = ", ..." if len(sizes) > 3 else ""
        problems.append(Problem(name, f"{name}: images of {len(sizes)} sizes ({shown}{more}); set data.image_size"))
    return problems
