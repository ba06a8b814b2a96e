"""CelebA, aligned and cropped: faces of 178 x 218, of which the centre 140 x 140 pixels are kept."""

from __future__ import annotations

import re
from pathlib import Path

from PIL import Image

from scalelong.data.base import DataError
from scalelong.data.folder import image_files
from scalelong.data.images import FileSource
from scalelong.data.registry import Request, register

CROP = 140
SIZE = 64
IMAGES = "img_align_celeba"
PARTITIONS = ("list_eval_partition.txt", "list_eval_partition.csv")
SPLITS = {"train": 0, "val": 1, "test": 2}


@register(
    "celeba:PATH", "the aligned CelebA images, the centre 140 x 140 pixels resized to 64 x 64", shape=(3, SIZE, SIZE)
)
class CelebASource(FileSource):
    """The folder of aligned images; with the official partition file beside it, one split of them."""

    def __init__(self, request: Request) -> None:
        root = Path(request.path).expanduser()
        self.name = f"celeba:{request.path}"
        self.folder = root
        while (self.folder / IMAGES).is_dir():  # some archives nest it twice
            self.folder /= IMAGES
        self.files = _chosen(image_files(self.folder), root, request.split)
        self.image_size = request.image_size or SIZE
        self.shape = self.common_shape()

    def open(self, item: int) -> Image.Image:
        """The centre 140 x 140 pixels."""
        image = super().open(item)
        width, height = image.size
        if min(width, height) < CROP:
            raise DataError(
                f"{self.where(item)}: {width} x {height} pixels, but {CROP} are cropped from the centre; use the aligned "
                "and cropped images of 178 x 218, or folder: for other ones"
            )
        left, top = (width - CROP) // 2, (height - CROP) // 2
        return image.crop((left, top, left + CROP, top + CROP))

    def _form(self) -> object:
        return (self.shape, CROP)


def _chosen(files: list[str], root: Path, split: str) -> list[str]:
    """The files of one split according to the partition file; without one, all are training data."""
    partition = next((root / name for name in PARTITIONS if (root / name).is_file()), None)
    if partition is None:
        if split != "train":
            raise DataError(f"data.split: {root} has no {PARTITIONS[0]}, so only 'train' is known, not {split!r}")
        return files
    if split not in SPLITS:
        raise DataError(f"data.split: CelebA has {', '.join(SPLITS)}, not {split!r}")
    existing, chosen = set(files), []
    for number, line in enumerate(partition.read_text().splitlines(), 1):
        words = re.split(r"[,\s]+", line.strip())
        if words in ([""], ["image_id", "partition"]):
            continue
        if len(words) != 2 or words[1] not in ("0", "1", "2"):
            raise DataError(
                f"{partition} line {number}: expected a file name and 0, 1 or 2, got {line!r}; get it again"
            )
        if words[1] == str(SPLITS[split]):
            if words[0] not in existing:
                raise DataError(f"{partition} line {number}: {words[0]} is not among the images; restore it")
            chosen.append(words[0])
    if not chosen:
        raise DataError(f"{partition}: names no image of split {split!r}; get it again")
    return chosen
