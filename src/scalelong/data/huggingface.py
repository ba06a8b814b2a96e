"""Images from Hugging Face datasets: a name on the hub, a folder written by save_to_disk, or a folder of parquet files."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from scalelong.data.base import checked_labels, sampled_items, update_with_annotations
from scalelong.data.errors import DataError
from scalelong.data.folder import SPLIT_NAMES
from scalelong.data.images import open_rgb
from scalelong.data.pictures import PictureSource

_IMAGE_NAMES = ("image", "img", "images", "jpg", "png")
_LABEL_NAMES = ("label", "labels", "fine_label", "class", "category")
_CAPTION_NAMES = ("caption", "captions", "text", "prompt", "sentence", "sentences")


class HuggingFaceSource(PictureSource):
    """Rows are decoded when they are asked for, with the same crop and resize as files."""

    def __init__(
        self, name: str, image_size: int | None = None, split: str = "train", root: str | Path | None = None
    ) -> None:
        self.name = f"hf:{name}"
        rows = _load(name, split, None if root is None else str(root))
        if len(rows) == 0:
            raise DataError(f"{self.name}: split {split!r} has no rows; choose another data.split", "missing")
        self._column = image_column(rows, self.name)
        self._rows = rows.cast_column(self._column, library().Image(decode=False))
        self.image_size = image_size
        self.labels, self.class_names = _labels(rows, self.name)
        self.num_classes = len(self.class_names)
        self.captions = _captions(rows, self._column)
        self.shape = self.common_shape()

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, item: int) -> str:
        return f"{self.name} row {item}"

    def open(self, item: int) -> Image.Image:
        return cell_image(self._cell(item), self.where(item))

    def _cell(self, item: int) -> dict[str, Any] | None:
        cell: dict[str, Any] | None = self._rows[item][self._column]
        return cell

    def _digest(self) -> str:
        """Over the number of rows, labels, captions, and the encoded images of evenly spaced rows."""
        digest = hashlib.sha256(repr((self.shape, len(self))).encode())
        for item in sampled_items(len(self)):
            cell = self._cell(item) or {}
            digest.update(cell.get("bytes") or str(cell.get("path")).encode())
        update_with_annotations(digest, self.labels, self.captions)
        return digest.hexdigest()


def cell_image(cell: dict[str, Any] | None, where: str) -> Image.Image:
    """Decode one undecoded cell of an image column."""
    if cell is None:
        raise DataError(f"{where}: the row has no image; filter such rows out", "missing")
    if cell.get("bytes") is not None:
        return open_rgb(io.BytesIO(cell["bytes"]), where)
    return open_rgb(Path(cell["path"]), f"{where} ({cell['path']})")


def library() -> Any:
    """Hugging Face datasets, which is an extra."""
    try:
        import datasets
    except ImportError as error:
        raise DataError("data.name: hf: needs Hugging Face datasets; pip install 'scalelong[datasets]'") from error
    return datasets


def _load(name: str, split: str, cache: str | None, streaming: bool = False) -> Any:
    """The rows of one split; whatever the library raises becomes a DataError that says what to do."""
    datasets = library()
    path = Path(name).expanduser()
    remedy = (
        "write it again"
        if path.is_dir()
        else "there is no such folder, so it was looked for on the hub: check the name and the network, or save it "
        "with save_to_disk where there is one and pass that path"
    )
    try:
        if path.is_dir():
            return _load_local(datasets, path, split, cache, streaming)
        return datasets.load_dataset(name, split=split, cache_dir=cache, streaming=streaming)
    except DataError:
        raise
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"data.name: hf:{name} cannot be loaded ({error}); {remedy}", "unreadable") from error


def open_stream(name: str, split: str) -> Any:
    """The rows of one split as a stream that nothing is stored of."""
    rows = _load(name, split, None, streaming=True)
    return rows.to_iterable_dataset() if hasattr(rows, "to_iterable_dataset") else rows


def _load_local(datasets: Any, path: Path, split: str, cache: str | None, streaming: bool) -> Any:
    if (path / "dataset_dict.json").is_file():
        splits = datasets.load_from_disk(str(path))
        if split not in splits:
            raise DataError(f"data.split: hf:{path} has no {split!r}; it has {', '.join(splits)}", "missing")
        return splits[split]
    if (path / "state.json").is_file():
        return datasets.load_from_disk(str(path))
    files = _parquet_files(path, split)
    return datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=cache, streaming=streaming)


def _parquet_files(path: Path, split: str) -> list[str]:
    """The files of one split, told by their name or folder (`train-00000.parquet`, `train/0.parquet`)."""
    files = sorted(path.rglob("*.parquet"))
    if not files:
        raise DataError(
            f"data.name: hf:{path} holds neither a saved dataset nor parquet files; check the path", "missing"
        )

    def split_of(file: Path) -> str | None:
        words = [*file.relative_to(path).parts[:-1], file.stem.split("-")[0]]
        return next((word for word in words if word in SPLIT_NAMES), None)

    splits = {split_of(file) for file in files}
    if splits == {None} and split == "train":
        return [str(file) for file in files]
    chosen = [str(file) for file in files if split_of(file) == split]
    if not chosen:
        have = ", ".join(sorted(name or "train" for name in splits))
        raise DataError(f"data.split: hf:{path} has no {split!r}; it has {have}", "missing")
    return chosen


def image_column(rows: Any, where: str) -> str:
    """The column that holds the pictures."""
    datasets = library()
    images = [name for name, feature in rows.features.items() if isinstance(feature, datasets.Image)]
    images = images or [
        name
        for name, feature in rows.features.items()
        if (isinstance(feature, dict) and "bytes" in feature) or (name in _IMAGE_NAMES and _dtype(feature) == "binary")
    ]
    named = [name for name in _IMAGE_NAMES if name in images]
    if not images:
        raise DataError(f"{where}: no image column among {', '.join(rows.features)}; cast one with datasets.Image()")
    return named[0] if named else images[0]


def label_column(rows: Any) -> tuple[str | None, list[str]]:
    """The column of labels, if there is one, and the class names that it knows."""
    datasets = library()
    classed = [name for name, feature in rows.features.items() if isinstance(feature, datasets.ClassLabel)]
    whole = [name for name in _LABEL_NAMES if str(_dtype(rows.features.get(name))).startswith(("int", "uint"))]
    column = next((name for name in (*_LABEL_NAMES, *classed) if name in classed), None) or next(iter(whole), None)
    return column, list(rows.features[column].names) if column in classed else []


def _labels(rows: Any, where: str) -> tuple[Tensor | None, list[str]]:
    """Labels and class names; both empty where there is no label column."""
    column, names = label_column(rows)
    if column is None:
        return None, []
    labels = torch.tensor(filled(list(rows[column]), column, "label", where), dtype=torch.int64)
    names = names or [str(k) for k in range(int(labels.max()) + 1)]
    return checked_labels(labels, len(names), f"{where} column {column!r}"), names


def filled(cells: list[Any], column: str, what: str, where: str) -> list[Any]:
    """The cells of a column, refused where one is empty."""
    if None in cells:
        raise DataError(f"{where} row {cells.index(None)}: column {column!r} has no {what}; filter such rows out")
    return cells


def _captions(rows: Any, image_column: str) -> list[str] | None:
    """The text of each row (the first, where a row has several)."""
    for name in _CAPTION_NAMES:
        if name not in rows.features or name == image_column:
            continue
        cells = list(rows[name])
        first = [cell[0] if isinstance(cell, list) and cell else cell for cell in cells]
        if all(isinstance(cell, str) for cell in first):
            return first
    return None


def caption_column(rows: Any, image_column: str) -> str | None:
    """The first column of plain text with a name that captions have."""
    names = [name for name in _CAPTION_NAMES if name != image_column]
    return next((name for name in names if _dtype(rows.features.get(name)) in ("string", "large_string")), None)


def _dtype(feature: Any) -> Any:
    return getattr(feature, "dtype", None)
