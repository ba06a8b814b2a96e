"""MS-COCO with captions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from scalelong.data.base import DataError, Request, reading, register
from scalelong.data.download import read_json
from scalelong.data.images import FileSource

KARPATHY = "dataset_coco.json"
KARPATHY_SPLITS = {"train": ("train", "restval"), "val": ("val",), "test": ("test",)}

_Entry = tuple[str, list[str]]  # a path below the folder, its captions


@register("coco:PATH", "MS-COCO with the official caption files or Karpathy's split; several captions an image")
class CocoSource(FileSource):
    """Images with several captions each."""

    def __init__(self, request: Request) -> None:
        self.folder = Path(request.path).expanduser()
        self.name = f"coco:{request.path}"
        entries = _entries(self.folder, request.split)
        self.files = [file for file, _ in entries]
        self.captions = [" ".join(caption.split()) for _, captions in entries for caption in captions]
        self.caption_counts = torch.tensor([len(captions) for _, captions in entries])
        self.set_size(request.image_size)


def _entries(folder: Path, split: str) -> list[_Entry]:
    """The files and captions of a split, sorted by file; raises if captions and images do not match."""
    official = sorted(folder.glob(f"annotations/captions_{split}20*.json"))
    tables = [*official, *(file for file in (folder / KARPATHY, folder / "annotations" / KARPATHY) if file.is_file())]
    if not tables:
        wanted = f"annotations/captions_{split}2014.json nor {KARPATHY}"
        raise DataError(f"data.name: {folder} holds neither {wanted}; put one there")
    table = tables[0]
    if not official and split not in KARPATHY_SPLITS:
        raise DataError(f"data.split: {table} has {', '.join(KARPATHY_SPLITS)}, not {split!r}")
    content = read_json(table, "get it again")
    with reading(f"{table}: is not a caption file of COCO", "get it again"):
        content = dict(content)
        found = _official(folder, table, content) if official else _karpathy(folder, content, KARPATHY_SPLITS[split])
        entries = sorted(found)
    if not entries:
        raise DataError(f"{table}: names no image of this split; choose another data.split")
    folders = [(home, folder / home) for home in {str(Path(file).parent) for file, _ in entries}]
    existing = {f"{home}/{path.name}" for home, place in folders if place.is_dir() for path in place.iterdir()}
    missing = [file for file, _ in entries if file not in existing]
    without = [file for file, captions in entries if not captions]
    for bad, fault in ((missing, f"are not below {folder}"), (without, "have no caption")):
        if bad:
            count = f"{len(bad)} of {len(entries)} images {fault}, the first is {bad[0]}"
            raise DataError(f"{table}: {count}; get captions and images that belong together")
    return entries


def _official(folder: Path, table: Path, content: Any) -> Iterator[_Entry]:
    year = table.stem.removeprefix("captions_")  # train2014
    home = next((name for name in (year, f"images/{year}", "images") if (folder / name).is_dir()), year)
    names = {image["id"]: image["file_name"] for image in content["images"]}
    captions: dict[int, list[str]] = {number: [] for number in names}
    for note in sorted(content["annotations"], key=lambda note: note["id"]):
        if note["image_id"] not in names:
            raise DataError(f"{table}: caption of id {note['image_id']}, not in its list of images; get it again")
        captions[note["image_id"]].append(note["caption"])
    for number, name in names.items():
        yield f"{home}/{name}", captions[number]


def _karpathy(folder: Path, content: Any, splits: tuple[str, ...]) -> Iterator[_Entry]:
    for image in content["images"]:
        if image["split"] in splits:
            home = image["filepath"]
            home = home if (folder / home).is_dir() else f"images/{home}"
            yield f"{home}/{image['filename']}", [sentence["raw"] for sentence in image["sentences"]]
