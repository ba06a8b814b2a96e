"""Where images come from, and which of them is drawn when."""

from scalelong.data.base import MemorySource, Source
from scalelong.data.cache import Problem, cache_dir
from scalelong.data.check import check
from scalelong.data.errors import DataError
from scalelong.data.images import to_float, to_uint8
from scalelong.data.loader import Batch, DeviceLoader, Loader, StreamLoader, make_loader
from scalelong.data.order import sample_to_item
from scalelong.data.sources import KNOWN, load_source, pixels_of

__all__ = [
    "KNOWN",
    "Batch",
    "DataError",
    "DeviceLoader",
    "Loader",
    "MemorySource",
    "Problem",
    "Source",
    "StreamLoader",
    "cache_dir",
    "check",
    "load_source",
    "make_loader",
    "pixels_of",
    "sample_to_item",
    "to_float",
    "to_uint8",
]
