"""Any folder of image files."""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from scalelong.data.base import DataError, Request, register
from scalelong.data.images import EXTENSIONS, FileSource

logger = logging.getLogger(__name__)

SPLIT_NAMES = frozenset({"train", "val", "valid", "validation", "test"})
_HIDDEN = (".", "__MACOSX")
_UNREAD = frozenset({".avif", ".heic", ".heif", ".jxl", ".jp2", ".jfif", ".tga", ".exr", ".dng", ".psd"})  # images too


@register("folder:PATH", "any folder of images; two or more sub-folders are classes")
class FolderSource(FileSource):
    """Image files as RGB; two or more subfolders are classes."""

    def __init__(self, request: Request) -> None:
        self.folder = split_folder(Path(request.path).expanduser(), request.split)
        self.name = f"folder:{request.path}"
        self.files = image_files(self.folder)
        homes = [name.rpartition("/")[0].partition("/")[0] for name in self.files]  # "" for the folder itself
        classes = sorted({*homes} - {""})
        if classes and "" in homes:
            loose = self.folder / self.files[homes.index("")]
            raise DataError(f"{loose}: an image next to the subfolder {classes[0]!r}; move all images into subfolders")
        if len(classes) > 1:
            number = {name: label for label, name in enumerate(classes)}
            self.set_labels(torch.tensor([number[home] for home in homes]), classes)
        self.set_size(request.image_size)


def split_folder(root: Path, split: str) -> Path:
    """`root`/`split` if all subfolders are splits; else `root`, which is then all training data."""
    entries = root.iterdir() if root.is_dir() else ()
    children = {child.name for child in entries if not child.name.startswith(_HIDDEN) and child.is_dir()}
    if children and children <= SPLIT_NAMES:
        if split not in children:
            raise DataError(f"data.split: {root} has no {split!r}; it has {', '.join(sorted(children))}")
        return root / split
    if split != "train":
        raise DataError(f"data.split: {root} has no sub-folder {split!r}; use 'train', or make train/ and {split}/")
    return root


def image_files(folder: Path) -> list[str]:
    """All image files below `folder`, as sorted relative paths with forward slashes."""
    if folder.is_file():
        raise DataError(f"data.name: {folder} is a file; unpack it into a folder, or use webdataset:{folder} for a tar")
    if not folder.is_dir():
        raise DataError(f"data.name: {folder} is not an existing folder; check the path")
    found = sorted(_walk(folder))
    files = [name for name in found if _suffix(name) in EXTENSIONS]
    if others := Counter(suffix for suffix in map(_suffix, found) if suffix not in EXTENSIONS):
        shown = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(others.items()))
        _warn_once(f"{folder}: {shown} not read; convert them to PNG or JPEG to use them")
    if not files:
        kinds = ", ".join(sorted(EXTENSIONS))
        raise DataError(f"data.name: {folder} holds no images ({kinds}); check the path, or use hf:{folder}")
    return files


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)


def _suffix(name: str) -> str:
    return Path(name).suffix.lower()


def _walk(folder: Path) -> Iterator[str]:
    seen = set()
    for directory, children, names in os.walk(folder, followlinks=True):
        place = Path(directory).resolve()
        if place in seen:
            children.clear()  # a link cycle
            continue
        seen.add(place)
        children[:] = sorted(child for child in children if not child.startswith(_HIDDEN))
        for name in names:
            if not name.startswith(".") and _suffix(name) in EXTENSIONS | _UNREAD:
                yield (Path(directory) / name).relative_to(folder).as_posix()
