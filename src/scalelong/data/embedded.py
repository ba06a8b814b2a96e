"""Bundled datasets: scikit-learn's digits, and emoji (built by `scripts/build_emoji.py`)."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from scalelong.data.base import MemorySource, Request, reading, register
from scalelong.data.download import Expected, bad_files
from scalelong.data.images import resized

ASSETS = Path(__file__).parent / "assets"
SHEET, TABLE = "emoji32.webp", "emoji32.json"
SIZE = 32
FILES = {
    SHEET: Expected(2_067_208, "c1d926661c29fb8a7ee2313a9620126d5be1ed435a212b960c8f09afc54e221c"),
    TABLE: Expected(59_874, "c22af5ca92899bd0abe76c8f0e544e2dfdaf55e535434709696d15b5b8126ed2"),
}


@register("digits", "scikit-learn's handwritten digits, 8 x 8, 10 classes", splits=("train",), shape=(1, 8, 8))
def load_digits(request: Request) -> MemorySource:
    """1,797 8 x 8 images, rescaled from 0 .. 16 to 0 .. 255."""
    found = find_spec("sklearn")  # slow to import; read its data file directly
    if found is None or not found.submodule_search_locations:
        raise ImportError("data.name: digits needs scikit-learn; pip install scikit-learn")
    table = np.loadtxt(Path(found.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    pixels = np.rint(table[:, :-1].reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = torch.from_numpy(table[:, -1].astype(np.int64))
    source = MemorySource("digits", torch.from_numpy(pixels), labels, [str(digit) for digit in range(10)])
    return resized(source, request.image_size)


@register(
    "emoji32",
    "1,911 emoji, 32 x 32, with 10 classes and captions",
    splits=("train", "seen", "unseen"),
    check=lambda _request: bad_files(ASSETS, FILES, "install the package again"),
    shape=(3, SIZE, SIZE),
)
def load_emoji(request: Request) -> MemorySource:
    """Label: category; caption: Unicode name. "unseen" has new combinations of words of "seen"; "train" is both."""
    table = json.loads((ASSETS / TABLE).read_text(encoding="utf-8"))
    with reading(f"{ASSETS / SHEET}: unreadable", "install the package again"), Image.open(ASSETS / SHEET) as image:
        sheet = np.array(image.convert("RGB"))
    rows, columns = sheet.shape[0] // SIZE, sheet.shape[1] // SIZE
    tiles = sheet.reshape(rows, SIZE, columns, SIZE, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, SIZE, SIZE)
    items = list(range(len(table["captions"])))
    if request.split != "train":
        unseen = set(table["unseen"])
        items = [item for item in items if (item in unseen) == (request.split == "unseen")]
    images, labels = torch.from_numpy(tiles[items]), torch.tensor(table["labels"])[items]
    captions = [table["captions"][item] for item in items]
    return resized(MemorySource("emoji32", images, labels, table["classes"], captions), request.image_size)
