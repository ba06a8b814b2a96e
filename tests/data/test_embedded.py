from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from scalelong.data import MemorySource, embedded, load_source
from scalelong.data.download import bad_files

SCRIPT = Path(__file__).parents[2] / "scripts" / "build_emoji.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_emoji", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT_MODULE = load_script()
held_out, words = SCRIPT_MODULE.held_out, SCRIPT_MODULE.words


@pytest.fixture(scope="module")
def source() -> MemorySource:
    return load_source("emoji32")


def test_asset_is_whole_and_small() -> None:
    assert bad_files(embedded.ASSETS, embedded.FILES, "") == []
    assert sum((embedded.ASSETS / name).stat().st_size for name in embedded.FILES) < 4_000_000
    assert "Apache License 2.0" in (embedded.ASSETS / "EMOJI_LICENSE.md").read_text()


def test_counts(source: MemorySource) -> None:
    assert (len(source), source.shape, source.num_classes) == (1911, (3, 32, 32), 10)
    assert source.labels is not None
    counts = dict(zip(source.class_names, torch.bincount(source.labels).tolist(), strict=True))
    assert counts["Flags"] == 270
    assert counts["Smileys & Emotion"] == 169
    assert counts["Component"] == 5
    assert source.fingerprint == load_source("emoji32").fingerprint


@pytest.mark.parametrize(
    ("caption", "category", "strong", "weak"),
    [
        ("grinning face", "Smileys & Emotion", "rg", "b"),
        ("red apple", "Food & Drink", "r", "gb"),
        ("green heart", "Smileys & Emotion", "g", "rb"),
        ("frog face", "Animals & Nature", "rg", "b"),
        ("japan flag", "Flags", "r", "gb"),
        ("blue heart", "Smileys & Emotion", "b", "r"),
    ],
)
def test_caption_label_and_pixels_belong_together(
    source: MemorySource, caption: str, category: str, strong: str, weak: str
) -> None:
    assert source.captions is not None and source.labels is not None
    item = source.captions.index(caption)
    assert source.class_names[int(source.labels[item])] == category
    centre = dict(zip("rgb", source.images[item, :, 14:18, 14:18].float().mean((1, 2)).tolist(), strict=True))
    assert min(centre[channel] for channel in strong) > max(centre[channel] for channel in weak) + 30


def test_images_are_on_white(source: MemorySource) -> None:
    darkest = source.images.amin((1, 2, 3))
    assert int(darkest.max()) < 200  # no tile is blank
    corners = source.images[:, :, [0, 0, -1, -1], [0, -1, 0, -1]].amin((1, 2))
    assert (corners == 255).float().mean() > 0.7  # not black, as transparent pixels would be
    assert all(caption == caption.lower() and caption.strip() for caption in source.captions or [])


def test_sheet_holds_tiles_in_reading_order() -> None:
    tiles = np.arange(5 * 4 * 4 * 3, dtype=np.uint8).reshape(5, 4, 4, 3)
    sheet = np.asarray(SCRIPT_MODULE.pack(tiles, columns=2))
    assert sheet.shape == (12, 8, 3)
    assert np.array_equal(sheet[4:8, 4:8], tiles[3])
    assert (sheet[8:, 4:] == 255).all()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
def test_script_builds_the_shipped_asset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["build_emoji.py", "--output", str(tmp_path)])
    SCRIPT_MODULE.main()
    assert json.loads((tmp_path / embedded.TABLE).read_text()) == json.loads(
        (embedded.ASSETS / embedded.TABLE).read_text()
    )
    with Image.open(tmp_path / embedded.SHEET) as built, Image.open(embedded.ASSETS / embedded.SHEET) as shipped:
        assert np.array_equal(np.asarray(built), np.asarray(shipped))


def test_digits_are_scikit_learns() -> None:
    source, bunch = load_source("digits"), load_digits()
    assert (len(source), source.shape, source.num_classes) == (1797, (1, 8, 8), 10)
    assert source.images is not None and source.labels is not None
    assert np.array_equal(source.labels.numpy(), bunch.target)
    assert np.abs(source.images[:, 0].numpy() - bunch.images * 255 / 16).max() <= 0.5
    assert (int(source.images.min()), int(source.images.max())) == (0, 255)
    assert source.fingerprint == load_source("digits").fingerprint


def test_held_out_captions_are_new_combinations_of_remaining_words() -> None:
    captions = ["red apple", "green apple", "red flag", "green flag", "an apple", "a flag", "red", "green"]
    chosen = held_out(captions, [0] * len(captions), seen=2)
    assert chosen
    staying = Counter(word for item, caption in enumerate(captions) if item not in chosen for word in words(caption))
    assert all(staying[word] >= 2 for item in chosen for word in words(captions[item]))
    assert all(len(words(captions[item])) >= 2 for item in chosen)


def test_shipped_unseen_items_are_those_of_the_script() -> None:
    table = json.loads((embedded.ASSETS / embedded.TABLE).read_text())
    assert table["unseen"] == held_out(table["captions"], table["labels"])


def test_the_emojis_splits_share_words_but_no_caption() -> None:
    seen, unseen = load_source("emoji32", split="seen"), load_source("emoji32", split="unseen")
    assert len(seen) + len(unseen) == len(load_source("emoji32")) == 1911
    known = Counter(word for caption in seen.captions for word in words(caption))
    assert all(known[word] >= 3 for caption in unseen.captions for word in words(caption))
    assert not {words(caption) for caption in seen.captions} & {words(caption) for caption in unseen.captions}
    assert seen.fingerprint != unseen.fingerprint
    assert int(unseen.labels.bincount().max()) == 16
    assert "large green square" in unseen.captions
    assert "green" in known
