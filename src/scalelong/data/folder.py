"""Any folder of images; two or more sub-folders are the classes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from scalelong.data.base import DataError
from scalelong.data.images import EXTENSIONS, FileSource
from scalelong.data.registry import Request, register

SPLIT_NAMES = frozenset({"train", "val", "valid", "validation", "test"})
_HIDDEN = (".", "__MACOSX")


@register("folder:PATH", "any folder of images; two or more sub-folders are classes")
class FolderSource(FileSource):
    """Image files as RGB, cropped to the centre square and resized if a size is given."""

    def __init__(self, request: Request) -> None:
        self.folder = split_folder(Path(request.path).expanduser(), request.split)
        self.name = f"folder:{request.path}"
        self.files = image_files(self.folder)
        self.image_size = request.image_size
        self.class_names = _classes(self.files, self.folder)
        self.num_classes = len(self.class_names)
        self.labels = _labels(self.files, self.class_names)
        self.shape = self.common_shape()


def split_folder(root: Path, split: str) -> Path:
    """`root`/`split` if all sub-folders are splits; else `root`, which is then all training data."""
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
    if not folder.is_dir():
        raise DataError(f"data.name: {folder} is not an existing folder; check the path")
    files = sorted(_walk(folder))
    if not files:
        raise DataError(
            f"data.name: {folder} holds no images ({', '.join(sorted(EXTENSIONS))}); check the path, "
            f"or use hf:{folder} if it was saved by Hugging Face datasets"
        )
    return files


def _walk(folder: Path) -> Iterator[str]:
    seen = set()
    for directory, children, names in os.walk(folder, followlinks=True):
        place = Path(directory).resolve()
        if place in seen:
            children.clear()  # a link back to a folder already seen
            continue
        seen.add(place)
        children[:] = sorted(child for child in children if not child.startswith(_HIDDEN))
        for name in names:
            if not name.startswith(".") and Path(name).suffix.lower() in EXTENSIONS:
                yield (Path(directory) / name).relative_to(folder).as_posix()


def _classes(files: list[str], folder: Path) -> list[str]:
    """The first-level sub-folders, sorted; none if images are at the top or in one sub-folder only."""
    parts = [PurePosixPath(name).parts for name in files]
    names = sorted({part[0] for part in parts if len(part) > 1})
    loose = next((name for name, part in zip(files, parts, strict=True) if len(part) == 1), None)
    if names and loose:
        raise DataError(
            f"{folder / loose}: an image beside the sub-folder {names[0]!r}; put every image into a class folder, "
            "or all of them into one folder"
        )
    return names if len(names) > 1 else []


def _labels(files: list[str], class_names: list[str]) -> Tensor | None:
    if not class_names:
        return None
    number = {name: label for label, name in enumerate(class_names)}
    return torch.tensor([number[name.split("/", 1)[0]] for name in files])
