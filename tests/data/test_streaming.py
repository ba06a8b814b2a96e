from __future__ import annotations

import pickle
from pathlib import Path
from threading import current_thread
from typing import Any

import numpy as np
import pytest
import torch

from scalelong.data import StreamLoader, load_source
from scalelong.data.errors import DataError
from scalelong.data.loader import load_images
from scalelong.data.streaming import StreamedSource

from .conftest import noise
from .test_huggingface import table

datasets = pytest.importorskip("datasets")


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    folder = tmp_path / "parquet"
    folder.mkdir()
    captions = [f"picture {number}" for number in range(20)]
    rows = table(20, text=captions)
    for part in range(2):
        rows.select(range(10 * part, 10 * part + 10)).to_parquet(str(folder / f"train-{part:05d}.parquet"))
    return folder


def test_a_stream_is_read_window_by_window(parquet: Path) -> None:
    source = StreamedSource(str(parquet), window=6)
    assert (len(source), source.shape, source.class_names) == (20, (3, 10, 12), ["cat", "dog"])
    assert source.captions is not None
    assert source.captions[13] == "picture 13"
    order = source.order(3, torch.arange(40))
    for epoch in (order[:20], order[20:]):
        assert [sorted(part.tolist()) for part in torch.split(epoch, 6)] == [
            list(range(first, min(first + 6, 20))) for first in (0, 6, 12, 18)
        ]
    assert not torch.equal(order[:20], order[20:])
    for item in (0, 19, 7):  # forward, to the end, and back
        assert np.array_equal(source.read(item).permute(1, 2, 0).numpy(), noise(item, 10, 12, 3))


def test_resuming_gives_the_same_batches(parquet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = StreamedSource(str(parquet), window=6)
    loader = StreamLoader(source, seed=3, workers=4)
    assert (loader.workers, loader.by_thread) == (0, True)  # no process: Arrow's threads may hang in a forked one
    index = [torch.arange(first, first + 5) for first in range(0, 30, 5)]
    readers = set()
    read_many = source.read_many
    monkeypatch.setattr(source, "read_many", lambda items: readers.add(current_thread()) or read_many(items))
    whole = list(loader.batches(index))
    assert len(readers) == 1 and current_thread() not in readers
    assert len(whole) == len(index)
    resumed = list(StreamLoader(StreamedSource(str(parquet), window=6), seed=3, workers=0).batches(index[3:]))
    for one, other in zip(whole[3:], resumed, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.items, other.items)


def test_streams_without_light_columns_need_a_number_of_rows(parquet: Path, tmp_path: Path) -> None:
    table(6).remove_columns(["id", "label"]).to_parquet(str(tmp_path / "bare.parquet"))
    folder = tmp_path / "bare"
    folder.mkdir()
    (tmp_path / "bare.parquet").rename(folder / "train.parquet")
    with pytest.raises(DataError, match=r"does not say how many rows it has; write .*#ROWS"):
        load_source(f"hf-stream:{folder}")
    source: Any = load_source(f"hf-stream:{folder}#7")
    assert (len(source), source.labels, source.captions) == (7, None, None)
    with pytest.raises(DataError, match="the stream ended before"):
        source.read(6)
    assert len(load_source(f"hf-stream:{parquet}#5")) == 5
    with pytest.raises(DataError, match="after # comes the number of rows"):
        load_source(f"hf-stream:{parquet}#many")


@pytest.mark.parametrize(("column", "what"), [("label", "label"), ("text", "caption")])
def test_rows_without_a_label_or_a_caption_are_named(tmp_path: Path, column: str, what: str) -> None:
    rows = table(4, text=[f"picture {number}" for number in range(4)])
    features = rows.features
    cells = [None if number == 2 else cell for number, cell in enumerate(rows[column])]
    rows = rows.remove_columns(column).add_column(column, cells, feature=features[column])
    rows.to_parquet(str(tmp_path / "train.parquet"))
    with pytest.raises(DataError, match=rf"row 2: column '{column}' has no {what}; filter such rows out"):
        load_source(f"hf-stream:{tmp_path}")


def test_threads_may_read_a_stream_and_a_copy_of_it(parquet: Path) -> None:
    source = pickle.loads(pickle.dumps(StreamedSource(str(parquet), window=3)))
    images = load_images(source)
    assert all(np.array_equal(images[k].permute(1, 2, 0).numpy(), noise(k, 10, 12, 3)) for k in range(20))
