"""Images from Hugging Face datasets: a name on the hub, a folder written by save_to_disk, or a folder of parquet files."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from PIL import Image

from scalelong.data.base import DataError, Request, Root, hashed_items, register
from scalelong.data.folder import SPLIT_NAMES
from scalelong.data.images import PictureSource, open_rgb

WINDOW = 4096  # rows of a stream held in memory at a time, still encoded

_IMAGE_NAMES = ("image", "img", "images", "jpg", "png")
_LABEL_NAMES = ("label", "labels", "fine_label", "class", "category")
_CAPTION_NAMES = ("caption", "captions", "text", "prompt", "sentence", "sentences")


class _RowSource(PictureSource):
    """Rows with encoded images and optional labels and captions."""

    _column: str  # of the images

    def _decode(self, item: int, cell: dict[str, Any] | None) -> Image.Image:
        where = self.where(item)
        if cell is None:
            raise DataError(f"{where}: the row has no image; filter such rows out")
        if cell.get("bytes") is not None:
            return open_rgb(io.BytesIO(cell["bytes"]), where)
        return open_rgb(Path(cell["path"]), f"{where} ({cell['path']})")

    def _filled(self, cells: list[Any], column: str, what: str) -> list[Any]:
        if None in cells:
            row = cells.index(None)
            raise DataError(f"{self.name} row {row}: column {column!r} has no {what}; filter such rows out")
        return cells

    def _set_labels(self, cells: list[Any], column: str, names: list[str]) -> None:
        labels = torch.tensor(self._filled(cells, column, "label"))
        self.set_labels(labels, names, f"{self.name} column {column!r}")


@register("hf:NAME_OR_PATH", "a Hugging Face data set, downloaded")
class HuggingFaceSource(_RowSource):
    """Rows decoded when read, with the same crop and resize as files."""

    def __init__(self, request: Request) -> None:
        self.name = f"hf:{request.path}"
        rows = _load(request.path, request.split, request.root)
        if len(rows) == 0:
            raise DataError(f"{self.name}: split {request.split!r} has no rows; choose another data.split")
        self._column = _image_column(rows, self.name)
        self._rows = rows.cast_column(self._column, _library().Image(decode=False))
        label, names = _label_column(rows)
        if label is not None:
            self._set_labels(list(rows[label]), label, names)
        for name in _CAPTION_NAMES:
            if name in rows.features and name != self._column and self.captions is None:
                first = [cell[0] if isinstance(cell, list) and cell else cell for cell in rows[name]]
                self.captions = first if all(isinstance(cell, str) for cell in first) else None
        self.set_size(request.image_size)

    def __len__(self) -> int:
        return len(self._rows)

    def open(self, item: int) -> Image.Image:
        return self._decode(item, self._rows[item][self._column])

    def _contents(self) -> Iterator[bytes]:
        for item in hashed_items(len(self)):
            cell = self._rows[item][self._column] or {}
            yield cell.get("bytes") or str(cell.get("path")).encode()


@register("hf-stream:NAME_OR_PATH", "a Hugging Face data set larger than the disk, streamed")
class StreamedSource(_RowSource):
    """A stream, shuffled in windows because it has no random access; labels and captions are read first."""

    max_workers = 0  # each process would stream everything again, and Arrow's threads may hang after a fork
    window: int

    def __init__(self, request: Request, window: int = WINDOW) -> None:
        name, _, rows = request.path.partition("#")
        if rows and (not rows.isdigit() or int(rows) < 1):
            raise DataError(
                f"data.name: hf-stream:{name}#{rows}: what follows # must be a number of rows, got {rows!r}"
            )
        self.name, self.window = f"hf-stream:{name}", window
        stream = _load(name, request.split, None, streaming=True)
        stream = stream.to_iterable_dataset() if hasattr(stream, "to_iterable_dataset") else stream
        self._column = _image_column(stream, self.name)
        self._stream = stream.cast_column(self._column, _library().Image(decode=False)).select_columns([self._column])
        self._read_annotations(stream, int(rows) if rows else None, request.split)
        self._cursor: tuple[int, Iterator[Any]] | None = None  # number of the next window, and the rows from there on
        self._windows: dict[int, list[Any]] = {}
        self._lock = Lock()
        self.set_size(request.image_size)

    def __len__(self) -> int:
        return self._count

    def open(self, item: int) -> Image.Image:
        number, place = divmod(item, self.window)
        with self._lock:  # a stream has one position
            rows = self._windows.get(number) or self._read_window(number)
        if place >= len(rows):
            raise DataError(f"{self.where(item)}: the stream ended before; it has changed, or #ROWS is too many")
        return self._decode(item, rows[place][self._column])

    def _read_window(self, number: int) -> list[Any]:
        """Read one window, continuing the stream if possible; two windows are cached."""
        following, rows = self._cursor or (0, iter(self._stream))
        if following != number:
            rows = iter(self._stream.skip(number * self.window))
        found = list(islice(rows, self.window))
        self._cursor = (number + 1, rows)
        self._windows = dict([*self._windows.items(), (number, found)][-2:])
        return found

    def _read_annotations(self, stream: Any, rows: int | None, split: str) -> None:
        """Set labels, captions and the number of rows, without reading images."""
        label, names = _label_column(stream)
        texts = [name for name in _CAPTION_NAMES if _dtype(stream.features.get(name)) in ("string", "large_string")]
        caption = next((name for name in texts if name != self._column), None)
        columns = [name for name in (label, caption) if name is not None]
        table = list(islice(stream.select_columns(columns), rows)) if columns else []
        stated = getattr((stream.info.splits or {}).get(split), "num_examples", None)  # counting would read the stream
        self._count = len(table) if columns else int(rows or stated or 0)
        if not self._count:
            raise DataError(f"data.name: {self.name} does not say how many rows it has; write {self.name}#ROWS")
        if caption is not None:
            self.captions = self._filled([row[caption] for row in table], caption, "caption")
        if label is not None:
            self._set_labels([row[label] for row in table], label, names)

    def _form(self) -> object:
        return (self.shape, len(self), self.window)

    def _contents(self) -> Iterator[bytes]:
        yield self.open(0).tobytes()  # more would read the stream


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError("data.name: hf: needs Hugging Face datasets; pip install 'scalelong[datasets]'") from error
    return datasets


def _load(name: str, split: str, root: Root, streaming: bool = False) -> Any:
    """Load the rows of one split; errors become a DataError with a remedy."""
    datasets = _library()
    path = Path(name).expanduser()
    datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False  # older versions would run a dataset script
    options = {"cache_dir": None if root is None else str(root), "streaming": streaming}
    remedy = "write it again" if path.is_dir() else "not a folder, so check the name on the hub and the network"
    try:
        if not path.is_dir():
            return datasets.load_dataset(name, split=split, **options)
        if (path / "dataset_dict.json").is_file():
            splits = datasets.load_from_disk(str(path))
            if split not in splits:
                raise DataError(f"data.split: hf:{path} has no {split!r}; it has {', '.join(splits)}")
            return splits[split]
        if (path / "state.json").is_file():
            return datasets.load_from_disk(str(path))
        return datasets.load_dataset("parquet", data_files=_parquet_files(path, split), split="train", **options)
    except DataError:
        raise
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"data.name: hf:{name} cannot be loaded ({error}); {remedy}") from error


def _parquet_files(path: Path, split: str) -> list[str]:
    """The files of one split, by name or folder (`train-00000.parquet`, `train/0.parquet`)."""
    files = sorted(path.rglob("*.parquet"))
    if not files:
        raise DataError(f"data.name: hf:{path} holds neither a saved dataset nor parquet files; check the path")
    splits: dict[str, list[str]] = {}
    for file in files:
        words = [*file.relative_to(path).parts[:-1], file.stem.split("-")[0]]
        splits.setdefault(next((word for word in words if word in SPLIT_NAMES), ""), []).append(str(file))
    if set(splits) == {""}:
        splits = {"train": splits[""]}
    if split not in splits:
        raise DataError(f"data.split: hf:{path} has no {split!r}; it has {', '.join(sorted(splits))}")
    return splits[split]


def _image_column(rows: Any, where: str) -> str:
    """The image column: of type Image, or else encoded bytes."""

    def encoded(name: str, feature: Any) -> bool:
        return "bytes" in feature if isinstance(feature, dict) else name in _IMAGE_NAMES and _dtype(feature) == "binary"

    features = rows.features.items()
    images = [name for name, feature in features if isinstance(feature, _library().Image)]
    images = images or [name for name, feature in features if encoded(name, feature)]
    if not images:
        raise DataError(f"{where}: no image column among {', '.join(rows.features)}; cast one with datasets.Image()")
    return next((name for name in _IMAGE_NAMES if name in images), images[0])


def _label_column(rows: Any) -> tuple[str | None, list[str]]:
    """The column of labels and its class names, if any."""
    classed = [name for name, feature in rows.features.items() if isinstance(feature, _library().ClassLabel)]
    whole = [name for name in _LABEL_NAMES if _dtype(rows.features.get(name)).startswith(("int", "uint"))]
    column = next((name for name in (*_LABEL_NAMES, *classed) if name in classed), None) or next(iter(whole), None)
    return column, list(rows.features[column].names) if column in classed else []


def _dtype(feature: Any) -> str:
    return str(getattr(feature, "dtype", None))
