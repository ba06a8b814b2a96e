"""Build the emoji set that ships with the package: `python scripts/build_emoji.py` (needs npm).

Every base image of the npm package below, without skin-tone variants: composited on white, halved to 32 x 32 with Lanczos,
in Unicode's order. The same input and library versions give the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import logging
import re
import tarfile
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from scalelong.data.download import Mirror
from scalelong.data.embedded import ASSETS, SHEET, SIZE, TABLE
from scalelong.data.images import on_white
from scalelong.files import file_digest

PACKAGE = Mirror(
    "npm", "emoji-datasource-google@16.0.0", "fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438"
)
COLUMNS = 42

logger = logging.getLogger("build_emoji")


def read_package(path: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """The entries of emoji.json in Unicode's order, and the image files by name."""
    images: dict[str, bytes] = {}
    entries: list[dict[str, Any]] = []
    with tarfile.open(path) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isreg() else None
            if content and member.name == "package/emoji.json":
                entries = json.load(content)
            elif content and member.name.startswith("package/img/google/64/"):
                images[Path(member.name).name] = content.read()
    return sorted(entries, key=lambda entry: (entry["sort_order"], entry["unified"])), images


def tile(content: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """One (32, 32, 3) image on white."""
    with Image.open(io.BytesIO(content)) as image:
        small = on_white(image).resize((SIZE, SIZE), Image.Resampling.LANCZOS)
    return np.asarray(small)


def pack(tiles: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], columns: int) -> Image.Image:
    """Tiles (n, S, S, 3) as one sheet, row by row; unused places are white."""
    count, size = len(tiles), tiles.shape[1]
    rows = -(-count // columns)
    grid = np.full((rows * columns, size, size, 3), 255, dtype=np.uint8)
    grid[:count] = tiles
    sheet = grid.reshape(rows, columns, size, size, 3).transpose(0, 2, 1, 3, 4)
    return Image.fromarray(sheet.reshape(rows * size, columns * size, 3))


def words(caption: str) -> frozenset[str]:
    """The words and numbers of a caption, in lower case."""
    return frozenset(re.findall(r"[a-z0-9]+", caption.lower()))


def held_out(captions: Sequence[str], groups: Sequence[int], seen: int = 3, per_group: int = 16) -> list[int]:
    """Items to hold out: at least two words, each in `seen` or more remaining captions; at most `per_group` a group.

    Items are chosen in the order of their captions' hashes, so the order of the list does not matter.
    """
    bags = [words(caption) for caption in captions]
    remaining = Counter(word for bag in bags for word in bag)
    twins, taken = Counter(bags), Counter[int]()
    chosen = []
    for item in sorted(range(len(captions)), key=lambda item: hashlib.sha256(captions[item].encode()).digest()):
        bag, group = bags[item], groups[item]
        known = all(remaining[word] > seen for word in bag)
        if len(bag) >= 2 and known and twins[bag] == 1 and taken[group] < per_group:
            chosen.append(item)
            remaining.subtract(bag)
            taken[group] += 1
    return sorted(chosen)


def build(archive: Path, output: Path) -> None:
    """Write the sheet and the table."""
    entries, images = read_package(archive)
    missing = [entry["image"] for entry in entries if not entry["has_img_google"] or entry["image"] not in images]
    if missing:
        raise SystemExit(f"no image for {len(missing)} entries: {missing[:5]}")
    classes = list(dict.fromkeys(entry["category"] for entry in entries))
    table = {
        "source": PACKAGE.address,
        "classes": classes,
        "labels": [classes.index(entry["category"]) for entry in entries],
        "codes": [entry["unified"] for entry in entries],
        "captions": [entry["name"].lower() for entry in entries],
    }
    table["unseen"] = held_out(table["captions"], table["labels"])
    tiles = np.stack([tile(images[entry["image"]]) for entry in entries])
    output.mkdir(parents=True, exist_ok=True)
    pack(tiles, COLUMNS).save(output / SHEET, lossless=True, quality=100, method=6, exact=True)
    (output / TABLE).write_text(json.dumps(table, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    logger.info("%d images, classes: %s", len(tiles), ", ".join(classes))
    for name in (SHEET, TABLE):
        path = output / name
        logger.info("%s  %d bytes  sha256 %s", name, path.stat().st_size, file_digest(path))


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archive", type=Path, help="the package's .tgz, if you have it already")
    parser.add_argument("--output", type=Path, default=ASSETS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        archive = arguments.archive or PACKAGE.get(Path(scratch))
        build(archive, arguments.output)


if __name__ == "__main__":
    main()
