"""Which item stands at which place of a run: a function of the seed and the place."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from scalelong.random import random_bits, uniform


@lru_cache(maxsize=4)
def _permutation(seed: int, n: int, epoch: int) -> Tensor:
    """The order of one epoch: the items sorted by a random key per place."""
    place = torch.arange(epoch * n, (epoch + 1) * n)
    return torch.argsort(random_bits(seed, "order", place), stable=True)


def sample_to_item(seed: int, n: int, index: Tensor) -> Tensor:
    """The item at each global sample index; every epoch of n samples is a fresh permutation."""
    if n < 1:
        raise ValueError(f"data: a source needs at least one item, got {n}")
    index = index.to(device="cpu", dtype=torch.int64)
    if index.numel() and int(index.min()) < 0:
        raise ValueError(f"data: a sample index cannot be negative, got {int(index.min())}")
    epochs, places = torch.div(index, n, rounding_mode="floor"), index % n
    items = torch.empty_like(index)
    for epoch in sorted(set(epochs.tolist())):
        here = epochs == epoch
        items[here] = _permutation(seed, n, epoch)[places[here]]
    return items


def flip_mask(seed: int, index: Tensor) -> Tensor:
    """True where the sample is mirrored: one random bit per global index."""
    return random_bits(seed, "flip", index) < 0


def caption_rows(seed: int, index: Tensor, items: Tensor, counts: Tensor | None) -> Tensor:
    """Which caption each sample gets, as rows of the list of all; items with several get one at random by index."""
    if counts is None:
        return items
    first = counts.cumsum(0) - counts
    chosen = (uniform(seed, "caption", index) * counts[items]).long()
    return first[items] + chosen.minimum(counts[items] - 1)
