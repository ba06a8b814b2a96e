"""Sources of images and the loader.

A new source is one file like `cifar10.py` that calls `register`, and its name in the import below.
"""

from scalelong.data import celeba, cifar10, coco, embedded, fashion_mnist, folder, huggingface, imagenet64, webdataset  # noqa: F401
from scalelong.data.base import (
    SOURCES,
    DataError,
    MemorySource,
    Problem,
    Shape,
    Source,
    check,
    expected_shape,
    load_source,
    register,
    to_float,
    to_uint8,
)
from scalelong.data.download import cache_dir, fetch
from scalelong.data.images import save_grid, threaded
from scalelong.data.latents import decoder, original_images
from scalelong.data.loader import Batch, DeviceLoader, Loader, StreamLoader, caption_rows, make_loader, sample_to_item
from scalelong.data.text import TextEncoder, encode_captions, encode_text

__all__ = [
    "SOURCES",
    "Batch",
    "DataError",
    "DeviceLoader",
    "Loader",
    "MemorySource",
    "Problem",
    "Shape",
    "Source",
    "StreamLoader",
    "TextEncoder",
    "cache_dir",
    "caption_rows",
    "check",
    "decoder",
    "encode_captions",
    "encode_text",
    "expected_shape",
    "fetch",
    "load_source",
    "make_loader",
    "original_images",
    "register",
    "sample_to_item",
    "save_grid",
    "threaded",
    "to_float",
    "to_uint8",
]
