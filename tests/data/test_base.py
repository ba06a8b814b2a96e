from __future__ import annotations

import pytest
import torch

from scalelong.data.base import DataError, MemorySource


def make(**changes: object) -> MemorySource:
    images = torch.arange(4 * 3 * 2 * 2, dtype=torch.uint8).view(4, 3, 2, 2)
    arguments = {"name": "toy", "images": images, "labels": torch.tensor([0, 1, 1, 0]), "class_names": ["a", "b"]}
    return MemorySource(**(arguments | changes))  # type: ignore[arg-type]


def test_reading_many_is_reading_each() -> None:
    source = make()
    assert torch.equal(source.read_many([3, 0, 3]), torch.stack([source.read(3), source.read(0), source.read(3)]))
    assert source.nbytes == source.images.numel()


def test_fingerprint_follows_the_content_and_nothing_else() -> None:
    first = make()
    assert make(name="other name").fingerprint == first.fingerprint
    changed = first.images.clone()
    changed[2, 1, 0, 1] ^= 1
    others = [
        make(images=changed),
        make(labels=torch.tensor([1, 1, 1, 0])),
        make(captions=["", "a", "", ""]),
        make(captions=["a", "", "", ""]),
        make(images=first.images.view(4, 3, 1, 4)),
    ]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 6


@pytest.mark.parametrize("bad", [-1, 2, 255])
def test_label_out_of_range_names_the_item(bad: int) -> None:
    with pytest.raises(DataError, match=rf"toy: item 2 has label {bad}, expected 0 \.\. 1 \(1 such"):
        make(labels=torch.tensor([0, 1, bad, 0]))


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(DataError, match="uint8"):
        make(images=torch.zeros(4, 2, 2, 2, dtype=torch.uint8))
    with pytest.raises(DataError, match="uint8"):
        make(images=torch.zeros(4, 3, 2, 2))
    with pytest.raises(DataError, match="3 labels for 4 images"):
        make(labels=torch.tensor([0, 1, 1]))


def test_no_labels_means_no_classes() -> None:
    source = make(labels=None)
    assert source.num_classes == 0
    assert source.labels is None
