"""CelebA, aligned and cropped."""

from __future__ import annotations

import re
from pathlib import Path

from PIL import Image

from scalelong.data.base import DataError, Request, register
from scalelong.data.folder import image_files
from scalelong.data.images import FileSource, center_crop

CROP = 140  # center crop of the 178 x 218 images
SIZE = 64
SPLITS = {"train": "0", "val": "1", "test": "2"}


@register(
    "celeba:PATH",
    "the aligned CelebA images, the centre 140 x 140 pixels resized to 64 x 64",
    shape=(3, SIZE, SIZE),
)
class CelebASource(FileSource):
    """Folder of aligned images; one split if the official partition file is present."""

    def __init__(self, request: Request) -> None:
        root = self.folder = Path(request.path).expanduser()
        self.name = f"celeba:{request.path}"
        while (self.folder / "img_align_celeba").is_dir():  # some archives nest it twice
            self.folder /= "img_align_celeba"
        self.files = _partition(image_files(self.folder), root, request.split)
        self.set_size(request.image_size or SIZE)

    def open(self, item: int) -> Image.Image:
        """The center 140 x 140 pixels."""
        image = super().open(item)
        if min(image.size) < CROP:
            fault = f"{image.width} x {image.height} pixels, but {CROP} are cropped from the centre"
            raise DataError(f"{self.where(item)}: {fault}; use the aligned 178 x 218 images, or folder:")
        return center_crop(image, CROP)

    def _form(self) -> object:
        return (self.shape, CROP)


def _partition(files: list[str], root: Path, split: str) -> list[str]:
    """The files of one split of the partition file; without one, all files are training data."""
    tables = [file for file in (root / "list_eval_partition.txt", root / "list_eval_partition.csv") if file.is_file()]
    if not tables:
        if split != "train":
            raise DataError(f"data.split: {root} has no partition file, so only 'train' is known, not {split!r}")
        return files
    if split not in SPLITS:
        raise DataError(f"data.split: CelebA has {', '.join(SPLITS)}, not {split!r}")
    table, existing, chosen = tables[0], set(files), []
    for number, line in enumerate(table.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        words = re.split(r"[,\s]+", line.strip())
        if words in ([""], ["image_id", "partition"]):
            continue
        if len(words) != 2 or words[1] not in SPLITS.values():
            raise DataError(f"{table} line {number}: expected a file name and 0, 1 or 2, got {line!r}; get it again")
        if words[1] == SPLITS[split]:
            if words[0] not in existing:
                raise DataError(f"{table} line {number}: {words[0]} is not among the images; restore it")
            chosen.append(words[0])
    if not chosen:
        raise DataError(f"{table}: names no image of split {split!r}; get it again")
    return chosen
