"""Any folder of images; sub-folders, where there are two or more, are the classes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from scalelong.data.errors import DataError
from scalelong.data.images import EXTENSIONS
from scalelong.data.pictures import FileSource

SPLIT_NAMES = frozenset({"train", "val", "valid", "validation", "test"})


class FolderSource(FileSource):
    """Files are read when they are asked for: decoded, cropped to the centre square, resized, RGB."""

    def __init__(self, path: str | Path, image_size: int | None = None, split: str = "train") -> None:
        root = Path(path).expanduser()
        self.folder = split_folder(root, split)
        self.name = f"folder:{path}"
        self.files = image_files(self.folder)
        self.image_size = image_size
        self.captions = None
        self.class_names = _classes(self.files, self.folder)
        self.num_classes = len(self.class_names)
        self.labels = _labels(self.files, self.class_names)
        self.shape = self.common_shape()


def split_folder(root: Path, split: str) -> Path:
    """`root`/`split` where all sub-folders are splits; else `root` itself, which is then all training data."""
    children = (
        {child.name for child in root.iterdir() if _visible(child) and child.is_dir()} if root.is_dir() else set()
    )
    if children and children <= SPLIT_NAMES:
        if split not in children:
            raise DataError(f"data.split: {root} has no {split!r}; it has {', '.join(sorted(children))}", "missing")
        return root / split
    if split != "train":
        raise DataError(
            f"data.split: {root} has no sub-folder {split!r}; use 'train', or make train/ and {split}/", "missing"
        )
    return root


def image_files(folder: Path) -> list[str]:
    """All image files below `folder`, as sorted relative paths with forward slashes."""
    if not folder.is_dir():
        raise DataError(f"data.name: {folder} is not an existing folder; check the path", "missing")
    files = sorted(_walk(folder))
    if not files:
        raise DataError(
            f"data.name: {folder} holds no images ({', '.join(sorted(EXTENSIONS))}); check the path, "
            f"or use hf:{folder} if it was saved by Hugging Face datasets",
            "missing",
        )
    return files


def _walk(folder: Path) -> Iterator[str]:
    seen = set()
    for directory, children, names in os.walk(folder, followlinks=True):
        place = Path(directory).resolve()
        if place in seen:
            children.clear()  # a link back to where we have been
            continue
        seen.add(place)
        children[:] = sorted(child for child in children if not child.startswith((".", "__MACOSX")))
        for name in names:
            if not name.startswith(".") and Path(name).suffix.lower() in EXTENSIONS:
                yield (Path(directory) / name).relative_to(folder).as_posix()


def _visible(path: Path) -> bool:
    return not path.name.startswith((".", "__MACOSX"))


def _classes(files: list[str], folder: Path) -> list[str]:
    """The first-level sub-folders, sorted; none where images lie at the top or in one sub-folder only."""
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
