from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from scalelong.data import load_source


def test_digits_are_scikit_learns() -> None:
    source, bunch = load_source("digits"), load_digits()
    assert (len(source), source.shape, source.num_classes) == (1797, (1, 8, 8), 10)
    assert source.images is not None and source.labels is not None
    assert np.array_equal(source.labels.numpy(), bunch.target)
    assert np.abs(source.images[:, 0].numpy() - bunch.images * 255 / 16).max() <= 0.5
    assert (int(source.images.min()), int(source.images.max())) == (0, 255)
    assert source.fingerprint == load_source("digits").fingerprint


def test_image_size_resizes_sets_in_memory() -> None:
    small = load_source("digits", image_size=16)
    assert small.shape == (1, 16, 16)
    plain = load_source("digits")
    assert small.images is not None and plain.images is not None
    means = [source.images.float().mean((1, 2, 3)) for source in (small, plain)]
    assert torch.corrcoef(torch.stack(means))[0, 1] > 0.98
    assert small.fingerprint != plain.fingerprint
    assert load_source("emoji32", image_size=16).captions == load_source("emoji32").captions


def test_wrong_arguments_name_their_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.name: unknown 'emoji'; did you mean 'emoji32'"):
        load_source("emoji")
    with pytest.raises(ValueError, match=r"data\.split: digits has no 'test'; it has train"):
        load_source("digits", split="test")
    for size in (0, -3):
        with pytest.raises(ValueError, match=r"data\.image_size"):
            load_source("digits", image_size=size)
    with pytest.raises(ValueError, match="holds no images"):
        load_source(tmp_path)


def test_a_folder_is_loaded_by_its_path_or_prefix(image_folder: Path) -> None:
    by_path, by_prefix = load_source(image_folder, image_size=8), load_source(f"folder:{image_folder}", image_size=8)
    assert by_path.fingerprint == by_prefix.fingerprint
    assert len(by_path) == 22
