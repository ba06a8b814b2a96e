from __future__ import annotations

import builtins
from pathlib import Path
from threading import current_thread
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from scalelong.data import DataError, check, load_source, sample_to_item
from scalelong.data.base import Request
from scalelong.data.huggingface import StreamedSource
from scalelong.data.loader import StreamLoader, load_images

from .conftest import noise

datasets = pytest.importorskip("datasets")


def table(count: int = 6, **columns: Any) -> Any:
    """A real dataset of PNG images with class labels and captions."""
    pictures = [Image.fromarray(noise(number, 10, 12, 3)) for number in range(count)]
    features = datasets.Features(
        {"id": datasets.Value("int64"), "img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
        | dict.fromkeys(columns, datasets.Value("string"))
    )
    labels = [number % 2 for number in range(count)]
    return datasets.Dataset.from_dict(
        {"id": list(range(count)), "img": pictures, "label": labels} | columns, features=features
    )


def test_saved_dataset_makes_the_round_trip(tmp_path: Path) -> None:
    captions = [f"picture {number}" for number in range(6)]
    table(text=captions).save_to_disk(str(tmp_path / "saved"))
    source = load_source(f"hf:{tmp_path / 'saved'}")
    assert (len(source), source.shape, source.num_classes) == (6, (3, 10, 12), 2)
    assert source.labels is not None
    assert source.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert (source.class_names, source.captions) == (["cat", "dog"], captions)
    for item in range(6):
        assert np.array_equal(source.read(item).permute(1, 2, 0).numpy(), noise(item, 10, 12, 3))
    assert load_source(f"hf:{tmp_path / 'saved'}", image_size=5).read(0).shape == (3, 5, 5)


def test_fingerprint_does_not_depend_on_the_place(tmp_path: Path) -> None:
    for name, count in (("a", 6), ("b", 6), ("c", 5)):
        table(count).save_to_disk(str(tmp_path / name))
    first, second, third = (load_source(f"hf:{tmp_path / name}").fingerprint for name in "abc")
    assert first == second != third


def test_splits_of_a_saved_dictionary(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": table(4), "test": table(2)}).save_to_disk(str(tmp_path / "saved"))
    assert len(load_source(f"hf:{tmp_path / 'saved'}", split="test")) == 2
    with pytest.raises(DataError, match=r"data\.split: .*no 'val'; it has train, test"):
        load_source(f"hf:{tmp_path / 'saved'}", split="val")


def test_parquet_folder(tmp_path: Path) -> None:
    folder = tmp_path / "parquet"
    folder.mkdir()
    table(4).to_parquet(str(folder / "train-00000-of-00001.parquet"))
    table(3).to_parquet(str(folder / "test-00000-of-00001.parquet"))
    train = load_source(f"hf:{folder}", root=tmp_path / "cache")
    assert (len(train), train.class_names) == (4, ["cat", "dog"])
    assert np.array_equal(train.read(3).permute(1, 2, 0).numpy(), noise(3, 10, 12, 3))
    assert len(load_source(f"hf:{folder}", split="test", root=tmp_path / "cache")) == 3
    with pytest.raises(DataError, match=r"data\.split: .*it has test, train"):
        load_source(f"hf:{folder}", split="val", root=tmp_path / "cache")


def test_bad_rows_are_named_and_all_listed(tmp_path: Path) -> None:
    good = table(1).cast_column("img", datasets.Image(decode=False))[0]["img"]["bytes"]
    cells = [{"bytes": content, "path": None} for content in (good, good[:90], good, b"no picture")]
    rows = datasets.Dataset.from_dict({"image": cells}, features=datasets.Features({"image": datasets.Image()}))
    rows.save_to_disk(str(tmp_path / "saved"))
    name = f"hf:{tmp_path / 'saved'}"
    source = load_source(name)
    assert (source.num_classes, source.labels, source.captions) == (0, None, None)
    with pytest.raises(DataError, match="row 3: unreadable image"):
        source.read(3)
    assert [(str(problem).split(": ")[0][-5:], str(problem).split(": ")[1][:10]) for problem in check(name)] == [
        ("row 1", "truncated "),
        ("row 3", "unreadable"),
    ]


def test_unusable_datasets_are_refused(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"a": [1], "b": ["x"]}).save_to_disk(str(tmp_path / "plain"))
    with pytest.raises(DataError, match="no image column among a, b"):
        load_source(f"hf:{tmp_path / 'plain'}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="neither a saved dataset nor parquet files"):
        load_source(f"hf:{tmp_path / 'empty'}")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "x.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="cannot be loaded"):
        load_source(f"hf:{tmp_path / 'broken'}", root=tmp_path / "cache")
    unlabelled = table(2)
    unlabelled = unlabelled.map(lambda row: {"label": -1})
    unlabelled.save_to_disk(str(tmp_path / "unlabelled"))
    with pytest.raises(DataError, match=r"column 'label': item 0 has label -1, expected 0 \.\. 1"):
        load_source(f"hf:{tmp_path / 'unlabelled'}")


def test_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"pip install 'scalelong\[datasets\]'"):
        load_source(f"hf:{tmp_path}")


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
    source = StreamedSource(Request(str(parquet)), window=6)
    assert (len(source), source.shape, source.class_names) == (20, (3, 10, 12), ["cat", "dog"])
    assert source.captions is not None
    assert source.captions[13] == "picture 13"
    order = sample_to_item(3, 20, torch.arange(40), source.window)
    for epoch in (order[:20], order[20:]):
        assert [sorted(part.tolist()) for part in torch.split(epoch, 6)] == [
            list(range(first, min(first + 6, 20))) for first in (0, 6, 12, 18)
        ]
    assert not torch.equal(order[:20], order[20:])
    for item in (0, 19, 7):  # forward, to the end, and back
        assert np.array_equal(source.read(item).permute(1, 2, 0).numpy(), noise(item, 10, 12, 3))


def test_resuming_gives_the_same_batches(parquet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = StreamedSource(Request(str(parquet)), window=6)
    loader = StreamLoader(source, seed=3, workers=4)
    assert (loader.workers, loader.by_thread) == (0, True)  # no process: Arrow's threads may hang in a forked one
    index = [torch.arange(first, first + 5) for first in range(0, 30, 5)]
    readers = set()
    read_many = source.read_many
    monkeypatch.setattr(source, "read_many", lambda items: readers.add(current_thread()) or read_many(items))
    whole = list(loader.batches(index))
    assert len(readers) == 1 and current_thread() not in readers
    assert len(whole) == len(index)
    resumed = list(StreamLoader(StreamedSource(Request(str(parquet)), window=6), seed=3, workers=0).batches(index[3:]))
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
    with pytest.raises(DataError, match="must be a number of rows, got"):
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


def test_threads_may_read_a_stream(parquet: Path) -> None:
    source = StreamedSource(Request(str(parquet)), window=3)
    images = load_images(source)
    assert all(np.array_equal(images[k].permute(1, 2, 0).numpy(), noise(k, 10, 12, 3)) for k in range(20))
