"""The emoji that ship with the package: one lossless sheet of 32 x 32 tiles and a JSON of names and categories."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from scalelong.data.base import MemorySource
from scalelong.data.cache import Expected
from scalelong.data.errors import DataError
from scalelong.data.held_out import held_out

ASSETS = Path(__file__).parent / "assets"
SHEET, TABLE = "emoji32.webp", "emoji32.json"
SIZE = 32
SPLITS = ("train", "seen", "unseen")
ALGORITHM = "sha256"
FILES = {
    SHEET: Expected(2_067_208, "c1d926661c29fb8a7ee2313a9620126d5be1ed435a212b960c8f09afc54e221c"),
    TABLE: Expected(59_481, "9200bc60db6675cfc1151f249b4569f1771ce4055bca684478f8a5b8ef03e278"),
}


def pack(tiles: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], columns: int) -> Image.Image:
    """Tiles (n, S, S, 3) as one sheet, row by row; the unused places stay white."""
    count, size = len(tiles), tiles.shape[1]
    rows = -(-count // columns)
    grid = np.full((rows * columns, size, size, 3), 255, dtype=np.uint8)
    grid[:count] = tiles
    sheet = grid.reshape(rows, columns, size, size, 3).transpose(0, 2, 1, 3, 4)
    return Image.fromarray(sheet.reshape(rows * size, columns * size, 3))


def load_emoji(split: str = "train") -> MemorySource:
    """1911 images; label = category, caption = Unicode name in lower case.

    "unseen" are new combinations of words that "seen", the rest, has elsewhere; "train" is both.
    """
    table = json.loads((ASSETS / TABLE).read_text(encoding="utf-8"))
    try:
        with Image.open(io.BytesIO((ASSETS / SHEET).read_bytes())) as image:
            sheet = np.array(image.convert("RGB"))
    except OSError as error:
        raise DataError(f"{ASSETS / SHEET}: unreadable ({error}); install the package again", "unreadable") from error
    rows, columns = sheet.shape[0] // SIZE, sheet.shape[1] // SIZE
    tiles = sheet.reshape(rows, SIZE, columns, SIZE, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, SIZE, SIZE)
    labels, captions = torch.tensor(table["labels"]), table["captions"]
    unseen = set(held_out(captions, table["labels"])) if split != "train" else set()
    items = [item for item in range(len(captions)) if split == "train" or (item in unseen) == (split == "unseen")]
    images = torch.from_numpy(tiles[items])
    return MemorySource("emoji32", images, labels[items], table["classes"], [captions[item] for item in items])
