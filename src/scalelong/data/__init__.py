"""Data sources and the loader.

To add a source, write a file like `cifar10.py` that calls `register`, and import it below.
"""

from scalelong.data import (  # noqa: F401
    celeba,
    cifar10,
    coco,
    embedded,
    fashion_mnist,
    folder,
    huggingface,
    imagenet64,
    latents,
    webdataset,
)
from scalelong.data.base import DataError, MemorySource, Shape, Source, check, load_source, register, to_float, to_uint8
from scalelong.data.download import cache_dir
from scalelong.data.loader import Batch, make_loader, sample_to_item

__all__ = [
    "Batch",
    "DataError",
    "MemorySource",
    "Shape",
    "Source",
    "cache_dir",
    "check",
    "load_source",
    "make_loader",
    "register",
    "sample_to_item",
    "to_float",
    "to_uint8",
]
