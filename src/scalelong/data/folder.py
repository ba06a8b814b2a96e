"""Folders of image files: any folder, CelebA (aligned and cropped), MS-COCO with captions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from scalelong.data.base import DataError, Request, reading, register
from scalelong.data.download import read_json
from scalelong.data.images import EXTENSIONS, FileSource

SPLIT_NAMES = frozenset({"train", "val", "valid", "validation", "test"})
_HIDDEN = (".", "__MACOSX")


@register("folder:PATH", "any folder of images; two or more sub-folders are classes")
class FolderSource(FileSource):
    """Image files as RGB; two or more sub-folders are the classes."""

    def __init__(self, request: Request) -> None:
        self.folder = split_folder(Path(request.path).expanduser(), request.split)
        self.name = f"folder:{request.path}"
        self.files = image_files(self.folder)
        homes = [name.rpartition("/")[0].partition("/")[0] for name in self.files]  # "" for the folder itself
        classes = sorted({*homes} - {""})
        if classes and "" in homes:
            loose = self.folder / self.files[homes.index("")]
            raise DataError(f"{loose}: an image beside the sub-folder {classes[0]!r}; put all into sub-folders")
        if len(classes) > 1:
            number = {name: label for label, name in enumerate(classes)}
            self.set_labels(torch.tensor([number[home] for home in homes]), classes)
        self.set_size(request.image_size)


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
        kinds = ", ".join(sorted(EXTENSIONS))
        raise DataError(f"data.name: {folder} holds no images ({kinds}); check the path, or use hf:{folder}")
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


CELEBA_CROP = 140  # pixels of the 178 x 218 kept at the centre
CELEBA_SIZE = 64
CELEBA_SPLITS = {"train": "0", "val": "1", "test": "2"}


@register(
    "celeba:PATH",
    "the aligned CelebA images, the centre 140 x 140 pixels resized to 64 x 64",
    shape=(3, CELEBA_SIZE, CELEBA_SIZE),
)
class CelebASource(FileSource):
    """The folder of aligned images; with the official partition file beside it, one split of them."""

    def __init__(self, request: Request) -> None:
        root = self.folder = Path(request.path).expanduser()
        self.name = f"celeba:{request.path}"
        while (self.folder / "img_align_celeba").is_dir():  # some archives nest it twice
            self.folder /= "img_align_celeba"
        self.files = _partition(image_files(self.folder), root, request.split)
        self.set_size(request.image_size or CELEBA_SIZE)

    def open(self, item: int) -> Image.Image:
        """The centre 140 x 140 pixels."""
        image = super().open(item)
        width, height = image.size
        if min(width, height) < CELEBA_CROP:
            fault = f"{width} x {height} pixels, but {CELEBA_CROP} are cropped from the centre"
            raise DataError(f"{self.where(item)}: {fault}; use the aligned 178 x 218 images, or folder:")
        left, top = (width - CELEBA_CROP) // 2, (height - CELEBA_CROP) // 2
        return image.crop((left, top, left + CELEBA_CROP, top + CELEBA_CROP))

    def _form(self) -> object:
        return (self.shape, CELEBA_CROP)


def _partition(files: list[str], root: Path, split: str) -> list[str]:
    """The files of one split according to the partition file; without one, all are training data."""
    tables = [file for file in (root / "list_eval_partition.txt", root / "list_eval_partition.csv") if file.is_file()]
    if not tables:
        if split != "train":
            raise DataError(f"data.split: {root} has no partition file, so only 'train' is known, not {split!r}")
        return files
    if split not in CELEBA_SPLITS:
        raise DataError(f"data.split: CelebA has {', '.join(CELEBA_SPLITS)}, not {split!r}")
    table, existing, chosen = tables[0], set(files), []
    for number, line in enumerate(table.read_text().splitlines(), 1):
        words = re.split(r"[,\s]+", line.strip())
        if words in ([""], ["image_id", "partition"]):
            continue
        if len(words) != 2 or words[1] not in CELEBA_SPLITS.values():
            raise DataError(f"{table} line {number}: expected a file name and 0, 1 or 2, got {line!r}; get it again")
        if words[1] == CELEBA_SPLITS[split]:
            if words[0] not in existing:
                raise DataError(f"{table} line {number}: {words[0]} is not among the images; restore it")
            chosen.append(words[0])
    if not chosen:
        raise DataError(f"{table}: names no image of split {split!r}; get it again")
    return chosen


KARPATHY = "dataset_coco.json"
KARPATHY_SPLITS = {"train": ("train", "restval"), "val": ("val",), "test": ("test",)}

_Entry = tuple[str, list[str]]  # a path below the folder, its captions


@register("coco:PATH", "MS-COCO with the official caption files or Karpathy's split; several captions an image")
class CocoSource(FileSource):
    """Images with several captions each, all of them in `captions`."""

    def __init__(self, request: Request) -> None:
        self.folder = Path(request.path).expanduser()
        self.name = f"coco:{request.path}"
        entries = _entries(self.folder, request.split)
        self.files = [file for file, _ in entries]
        self.captions = [" ".join(caption.split()) for _, captions in entries for caption in captions]
        self.caption_counts = torch.tensor([len(captions) for _, captions in entries])
        self.set_size(request.image_size)


def _entries(folder: Path, split: str) -> list[_Entry]:
    """The files and captions of a split, sorted by file; captions and images that do not match are refused."""
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
