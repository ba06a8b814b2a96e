from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from scalelong.data import DataError, load_source
from scalelong.data.loader import DeviceLoader

from .conftest import noise

NAMES = ["COCO_train2014_000000000009.jpg", "COCO_train2014_000000000025.jpg"]
CAPTIONS = {9: ["a dog", "the  dog sits\n", "one dog"], 25: ["two cats", "cats"]}


def write_official(folder: Path, **changes: Any) -> Path:
    table = {
        "images": [{"id": 25, "file_name": NAMES[1]}, {"id": 9, "file_name": NAMES[0]}],
        "annotations": [
            {"id": 100 * image + number, "image_id": image, "caption": caption}
            for image, captions in CAPTIONS.items()
            for number, caption in enumerate(captions)
        ],
    } | changes
    (folder / "annotations").mkdir(exist_ok=True)
    (folder / "annotations" / "captions_train2014.json").write_text(json.dumps(table))
    return folder


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    (tmp_path / "train2014").mkdir()
    for number, name in enumerate(NAMES):
        Image.fromarray(noise(number, 30, 40, 3)).save(tmp_path / "train2014" / name)
    return tmp_path


def test_official_captions(coco: Path) -> None:
    source = load_source(f"coco:{write_official(coco)}", image_size=16)
    assert (len(source), source.shape) == (2, (3, 16, 16))
    assert source.captions == ["a dog", "the dog sits", "one dog", "two cats", "cats"]
    assert source.caption_counts is not None
    assert source.caption_counts.tolist() == [3, 2]
    batch = DeviceLoader(source, seed=0, flip=False).batch(torch.arange(200))
    words = {0: "dog", 1: "cats"}
    pairs = zip(batch.items.tolist(), batch.captions.tolist(), strict=True)
    assert all(words[item] in source.captions[row] for item, row in pairs)
    assert set(batch.captions.tolist()) == {0, 1, 2, 3, 4}
    moved = [
        {"id": number, "image_id": 9 if number < 2 else 25, "caption": caption}
        for number, caption in enumerate(source.captions)
    ]
    other = load_source(f"coco:{write_official(coco, annotations=moved)}", image_size=16)
    assert other.captions == source.captions
    assert other.fingerprint != source.fingerprint  # one dog is now said of the cats


def test_karpathys_split_takes_restval_for_training(coco: Path) -> None:
    images = [
        {"filepath": "train2014", "filename": name, "split": split, "sentences": [{"raw": split}]}
        for name, split in zip(NAMES, ("train", "restval"), strict=True)
    ]
    (coco / "dataset_coco.json").write_text(json.dumps({"images": images}))
    assert load_source(f"coco:{coco}").captions == ["train", "restval"]
    with pytest.raises(DataError, match="names no image of this split"):
        load_source(f"coco:{coco}", split="val")
    with pytest.raises(DataError, match="has train, val, test, not 'dev'"):
        load_source(f"coco:{coco}", split="dev")


def test_captions_that_do_not_match_the_images_are_refused(coco: Path) -> None:
    def refused(match: str) -> None:
        with pytest.raises(DataError, match=match):
            load_source(f"coco:{coco}")

    refused(r"holds neither annotations/captions_train2014\.json nor dataset_coco\.json")
    extra = [{"id": 3, "file_name": "gone.jpg"}, {"id": 9, "file_name": NAMES[0]}, {"id": 25, "file_name": NAMES[1]}]
    write_official(coco, images=extra)
    refused(r"1 of 3 images are not below .*, the first is train2014/gone\.jpg")
    write_official(coco, annotations=[{"id": 1, "image_id": 9, "caption": "a dog"}])
    refused(r"1 of 2 images have no caption, the first is train2014/COCO_train2014_000000000025\.jpg")
    write_official(coco, images=extra[1:2])
    refused("caption of id 25, not in its list of images")
    (coco / "annotations" / "captions_train2014.json").write_text('{"images": [')
    refused("is not readable JSON")
    (coco / "annotations" / "captions_train2014.json").write_text("[]")
    refused("is not a caption file of COCO")
    with pytest.raises(DataError, match=r"nowhere holds neither"):
        load_source(f"coco:{coco / 'nowhere'}")
