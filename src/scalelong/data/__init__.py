"""Sources of images and the loader.

A new source is one file like `cifar10.py` that calls `register`, and its name in the first import below.
"""

from scalelong.data import cifar10, embedded, fashion_mnist, folder, huggingface, imagenet64, latents, webdataset  # noqa: F401
from scalelong.data.base import DataError, MemorySource, Shape, Source, to_float, to_uint8
from scalelong.data.download import cache_dir
from scalelong.data.loader import Batch, DeviceLoader, StreamLoader, make_loader, sample_to_item
from scalelong.data.registry import SOURCES, check, load_source, register

__all__ = [
    "SOURCES",
    "Batch",
    "DataError",
    "DeviceLoader",
    "MemorySource",
    "Shape",
    "Source",
    "StreamLoader",
    "cache_dir",
    "check",
    "load_source",
    "make_loader",
    "register",
    "sample_to_item",
    "to_float",
    "to_uint8",
]
