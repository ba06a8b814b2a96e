"""MS-COCO with captions: the official annotation files, or Karpathy's split.

An image has about five captions; which one a training sample gets is a function of (seed, index).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from scalelong.data.base import DataError
from scalelong.data.images import FileSource
from scalelong.data.registry import Request, register

KARPATHY = "dataset_coco.json"
KARPATHY_SPLITS = {"train": ("train", "restval"), "val": ("val",), "test": ("test",)}

_Entry = tuple[str, list[str]]  # a path below the folder, its captions


@register("coco:PATH", "MS-COCO with the official caption files or Karpathy's split; several captions an image")
class CocoSource(FileSource):
    """Images with several captions each, all of them in `captions`."""

    captions: list[str]

    def __init__(self, request: Request) -> None:
        self.folder = Path(request.path).expanduser()
        self.name = f"coco:{request.path}"
        if not self.folder.is_dir():
            raise DataError(f"data.name: {self.folder} is not an existing folder; check the path")
        entries = _entries(self.folder, request.split)
        self.files = [file for file, _ in entries]
        self.captions = [" ".join(caption.split()) for _, captions in entries for caption in captions]
        self.caption_counts = torch.tensor([len(captions) for _, captions in entries])
        self.image_size = request.image_size
        self.shape = self.common_shape()


def _entries(folder: Path, split: str) -> list[_Entry]:
    """The files and captions of a split, sorted by file; captions and images that do not match are refused."""
    table = next(iter(sorted(folder.glob(f"annotations/captions_{split}20*.json"))), None)
    if table is not None:
        found = _official(folder, table, _json(table))
    else:
        table = next((file for file in (folder / KARPATHY, folder / "annotations" / KARPATHY) if file.is_file()), None)
        if table is None:
            raise DataError(
                f"data.name: {folder} holds neither annotations/captions_{split}2014.json nor {KARPATHY}; put one there"
            )
        if split not in KARPATHY_SPLITS:
            raise DataError(f"data.split: {table} has {', '.join(KARPATHY_SPLITS)}, not {split!r}")
        found = _karpathy(folder, _json(table), KARPATHY_SPLITS[split])
    try:
        entries = sorted(found)
    except (KeyError, TypeError) as error:
        raise DataError(f"{table}: is not a caption file of COCO (no {error}); get it again") from error
    if not entries:
        raise DataError(f"{table}: names no image of this split; choose another data.split")
    folders = [(home, folder / home) for home in {str(Path(file).parent) for file, _ in entries}]
    existing = {f"{home}/{path.name}" for home, place in folders if place.is_dir() for path in place.iterdir()}
    missing = [file for file, _ in entries if file not in existing]
    if missing:
        raise DataError(
            f"{table}: {len(missing)} of {len(entries)} images are not below {folder}, the first is {missing[0]}; the "
            "captions and the images do not belong together, or images are missing"
        )
    without = [file for file, captions in entries if not captions]
    if without:
        raise DataError(
            f"{table}: {len(without)} of {len(entries)} images have no caption, the first is {without[0]}; get it again"
        )
    return entries


def _official(folder: Path, table: Path, content: Any) -> Iterator[_Entry]:
    year = table.stem.removeprefix("captions_")  # train2014
    home = next((name for name in (year, f"images/{year}", "images") if (folder / name).is_dir()), year)
    names = {image["id"]: image["file_name"] for image in content["images"]}
    captions: dict[int, list[str]] = {}
    for note in sorted(content["annotations"], key=lambda note: note["id"]):
        captions.setdefault(note["image_id"], []).append(note["caption"])
    unlisted = captions.keys() - names.keys()
    if unlisted:
        raise DataError(
            f"{table}: {len(unlisted)} captioned image(s) such as id {min(unlisted)} are not in its list of images; "
            "the file is damaged, get it again"
        )
    for number, name in names.items():
        yield f"{home}/{name}", captions.get(number, [])


def _karpathy(folder: Path, content: Any, splits: tuple[str, ...]) -> Iterator[_Entry]:
    for image in content["images"]:
        if image["split"] in splits:
            home = image["filepath"]
            home = home if (folder / home).is_dir() else f"images/{home}"
            yield f"{home}/{image['filename']}", [sentence["raw"] for sentence in image["sentences"]]


def _json(table: Path) -> Any:
    try:
        return json.loads(table.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise DataError(f"{table}: cannot be read as JSON ({error}); get it again") from error
