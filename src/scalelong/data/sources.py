"""One way in: `load_source("digits")`, a folder, shards, latents, or a Hugging Face data set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from scalelong.data import cifar10, emoji, fashion_mnist
from scalelong.data.base import MemorySource, Source
from scalelong.data.celeba import CelebASource
from scalelong.data.coco import CocoSource
from scalelong.data.emoji import load_emoji
from scalelong.data.errors import DataError
from scalelong.data.fetch import fetch
from scalelong.data.folder import FolderSource
from scalelong.data.huggingface import HuggingFaceSource
from scalelong.data.imagenet64 import load_imagenet64
from scalelong.data.images import resize_all
from scalelong.data.latents import LatentSource
from scalelong.data.names import KNOWN, Kind, parse_name
from scalelong.data.streaming import StreamedSource
from scalelong.data.webdataset import WebDatasetSource

__all__ = ["KNOWN", "Source", "load_source"]

Root = str | Path | None


def load_source(
    name_or_path: str | Path, *, image_size: int | None = None, split: str = "train", root: Root = None
) -> Source:
    """A source of images; `image_size` crops and resizes, `root` is the cache folder (see `cache_dir`)."""
    if image_size is not None and (isinstance(image_size, bool) or image_size < 1):
        raise ValueError(f"data.image_size: must be a positive whole number, got {image_size!r}")
    kind, name = parse_name(str(name_or_path))
    if kind != "named":
        return _prefixed(kind, name, image_size, split, root)
    splits, loader = _NAMED[name]
    if split not in splits:
        raise DataError(f"data.split: {name} has no {split!r}; it has {', '.join(splits)}", "missing")
    source = loader(split, root)
    if image_size is None or image_size == source.shape[-1]:
        return source
    return MemorySource(name, resize_all(source.images, image_size), source.labels, source.class_names, source.captions)


def pixels_of(source: Source, root: Root = None) -> Source:
    """The images that latents were made of; any other source is its own images."""
    if not isinstance(source, LatentSource):
        return source
    origin = source.index["source"]
    images = load_source(origin["name"], image_size=origin["image_size"], split=origin["split"], root=root)
    if images.fingerprint != origin["fingerprint"]:
        raise DataError(f"{images.name}: holds other images than {source.name} were made of; encode them again")
    return images


def _prefixed(kind: Kind, name: str, image_size: int | None, split: str, root: Root) -> Source:
    match kind:
        case "hf":
            return HuggingFaceSource(name, image_size, split, root)
        case "hf-stream":
            return StreamedSource(name, image_size, split)
        case "latents":
            return LatentSource(name, image_size, split)
        case "celeba":
            return CelebASource(name, image_size, split)
        case "imagenet64":
            return load_imagenet64(name, image_size, split, root)
        case "coco":
            return CocoSource(name, image_size, split)
        case "webdataset":
            return WebDatasetSource(name, image_size, split, root)
        case _:
            return FolderSource(name, image_size, split)


def _digits(_split: str, _root: Root) -> MemorySource:
    """scikit-learn's 8 x 8 digits; 0 .. 16 becomes 0 .. 255."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    return MemorySource("digits", torch.from_numpy(pixels), labels, [str(digit) for digit in range(10)])


def _emoji32(split: str, _root: Root) -> MemorySource:
    return load_emoji(split)


def _cifar10(split: str, root: Root) -> MemorySource:
    images, labels = cifar10.read(fetch("cifar10", root), split)
    return MemorySource("cifar10", images, labels, cifar10.CLASSES)


def _fashion_mnist(split: str, root: Root) -> MemorySource:
    images, labels = fashion_mnist.read(fetch("fashion_mnist", root), split)
    return MemorySource("fashion_mnist", images, labels, fashion_mnist.CLASSES)


_NAMED: dict[str, tuple[tuple[str, ...], Callable[[str, Root], MemorySource]]] = {
    "cifar10": (("train", "test"), _cifar10),
    "digits": (("train",), _digits),
    "emoji32": (emoji.SPLITS, _emoji32),
    "fashion_mnist": (("train", "test"), _fashion_mnist),
}
