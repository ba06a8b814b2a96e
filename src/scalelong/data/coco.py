"""MS-COCO with captions: the official annotation files, or Karpathy's split.

An image has about five captions; which one a training sample gets is a function of (seed, index).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from scalelong.data.errors import DataError
from scalelong.data.pictures import FileSource

KARPATHY = "dataset_coco.json"
KARPATHY_SPLITS = {"train": ("train", "restval"), "val": ("val",), "test": ("test",)}

_Entry = tuple[str, list[str]]  # a file's path below the folder, its captions


class CocoSource(FileSource):
    """Images with several captions each, all of them in `captions`."""

    labels = None
    num_classes = 0
    captions: list[str]

    def __init__(self, path: str | Path, image_size: int | None = None, split: str = "train") -> None:
        self.folder = Path(path).expanduser()
        self.name = f"coco:{path}"
        if not self.folder.is_dir():
            raise DataError(f"data.name: {self.folder} is not an existing folder; check the path", "missing")
        table, entries = _entries(self.folder, split)
        _check_entries(self.folder, table, entries)
        self.files = [file for file, _ in entries]
        self.captions = [caption for _, captions in entries for caption in captions]
        self.caption_counts = torch.tensor([len(captions) for _, captions in entries])
        self.class_names = []
        self.image_size = image_size
        self.shape = self.common_shape()


def _entries(folder: Path, split: str) -> tuple[Path, list[_Entry]]:
    """The caption file of a split and what it says, sorted by file."""
    official = sorted(folder.glob(f"annotations/captions_{split}20*.json"))
    if official:
        return official[0], sorted(_official(folder, official[0]))
    table = next((file for file in (folder / KARPATHY, folder / "annotations" / KARPATHY) if file.is_file()), None)
    if table is None:
        raise DataError(
            f"data.name: {folder} holds neither annotations/captions_{split}2014.json nor {KARPATHY}; put one there",
            "missing",
        )
    if split not in KARPATHY_SPLITS:
        raise DataError(f"data.split: {table} has {', '.join(KARPATHY_SPLITS)}, not {split!r}", "missing")
    return table, sorted(_karpathy(folder, table, KARPATHY_SPLITS[split]))


def _official(folder: Path, table: Path) -> Iterator[_Entry]:
    content = _json(table)
    year = table.stem.removeprefix("captions_")  # train2014
    home = next((name for name in (year, f"images/{year}", "images") if (folder / name).is_dir()), year)
    captions: dict[int, list[str]] = {}
    try:
        names = {image["id"]: image["file_name"] for image in content["images"]}
        for note in sorted(content["annotations"], key=lambda note: note["id"]):
            captions.setdefault(note["image_id"], []).append(_clean(note["caption"]))
    except (KeyError, TypeError) as error:
        raise DataError(f"{table}: is no caption file of COCO (no {error}); get it again", "unreadable") from error
    strangers = captions.keys() - names.keys()
    if strangers:
        raise DataError(
            f"{table}: {len(strangers)} caption(ed) image(s) such as id {min(strangers)} are not in its list of images; "
            "the file is damaged, get it again"
        )
    for number, name in names.items():
        yield f"{home}/{name}", captions.get(number, [])


def _karpathy(folder: Path, table: Path, splits: tuple[str, ...]) -> Iterator[_Entry]:
    content = _json(table)
    try:
        for image in content["images"]:
            if image["split"] in splits:
                home = image["filepath"]
                home = home if (folder / home).is_dir() else f"images/{home}"
                yield f"{home}/{image['filename']}", [_clean(each["raw"]) for each in image["sentences"]]
    except (KeyError, TypeError) as error:
        raise DataError(f"{table}: is not Karpathy's split (no {error}); get it again", "unreadable") from error


def _check_entries(folder: Path, table: Path, entries: list[_Entry]) -> None:
    """Every captioned image is there, and every image has a caption."""
    if not entries:
        raise DataError(f"{table}: names no image of this split; choose another data.split", "missing")
    homes = {str(Path(file).parent) for file, _ in entries}
    there = {f"{home}/{path.name}" for home in homes if (folder / home).is_dir() for path in (folder / home).iterdir()}
    missing = [file for file, _ in entries if file not in there]
    if missing:
        raise DataError(
            f"{table}: {len(missing)} of {len(entries)} images are not below {folder}, the first is {missing[0]}; the "
            "captions and the images do not belong together, or images are missing",
            "missing",
        )
    silent = [file for file, captions in entries if not captions]
    if silent:
        raise DataError(
            f"{table}: {len(silent)} of {len(entries)} images have no caption, the first is {silent[0]}; get the file again"
        )


def _json(table: Path) -> Any:
    try:
        return json.loads(table.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise DataError(f"{table}: cannot be read as JSON ({error}); get it again", "unreadable") from error


def _clean(caption: str) -> str:
    return " ".join(caption.split())
