from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scalelong.data import DataError, MemorySource, Source, load_source, make_loader, sample_to_item, to_float
from scalelong.data.loader import Batch, DeviceLoader, StreamLoader, caption_rows, flip_mask

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def folder_source(image_folder: Path) -> Source:
    return load_source(image_folder, image_size=8)


def toy(n: int = 11) -> MemorySource:
    images = torch.randint(0, 256, (n, 3, 4, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return MemorySource("toy", images, torch.arange(n) % 3, ["a", "b", "c"])


def index_batches(*sizes: int, start: int = 0) -> Iterator[Tensor]:
    for size in sizes:
        yield torch.arange(start, start + size)
        start += size


def assert_equal(one: Batch, other: Batch) -> None:
    assert torch.equal(one.images, other.images)
    assert torch.equal(one.index, other.index)
    assert torch.equal(one.items, other.items)
    if one.labels is None or other.labels is None:
        assert one.labels is other.labels
    else:
        assert torch.equal(one.labels, other.labels)


@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_every_epoch_is_a_permutation(n: int) -> None:
    for epoch in (0, 1, 5, 10_000):
        items = sample_to_item(3, n, torch.arange(epoch * n, (epoch + 1) * n))
        assert sorted(items.tolist()) == list(range(n))


def test_epochs_and_seeds_differ() -> None:
    orders = [
        sample_to_item(seed, 50, torch.arange(epoch * 50, (epoch + 1) * 50))
        for seed in (0, 1, -5)
        for epoch in (0, 1, 2)
    ]
    assert len({tuple(order.tolist()) for order in orders}) == 9


def test_order_does_not_depend_on_batching() -> None:
    n, everything = 7, torch.arange(40)
    whole = sample_to_item(1, n, everything)
    one_by_one = torch.cat([sample_to_item(1, n, everything[k : k + 1]) for k in range(40)])
    mixed = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(whole, one_by_one)
    assert torch.equal(whole[mixed], sample_to_item(1, n, mixed))
    assert sample_to_item(1, n, everything[:0]).shape == (0,)


def test_order_is_pinned() -> None:
    """A change here breaks the resuming of every run."""
    assert sample_to_item(0, 10, torch.arange(20)).tolist() == [
        *(3, 4, 0, 6, 9, 1, 8, 2, 5, 7),
        *(9, 3, 1, 7, 6, 0, 5, 4, 8, 2),
    ]


def test_first_item_is_spread_evenly() -> None:
    first = torch.cat([sample_to_item(seed, 4, torch.tensor([0])) for seed in range(800)])
    counts = torch.bincount(first, minlength=4)
    assert counts.min() > 150  # 200 expected, standard deviation 12


def test_nonsense_indices_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        sample_to_item(0, 5, torch.tensor([2, -1]))
    with pytest.raises(ValueError, match="at least one item"):
        sample_to_item(0, 0, torch.tensor([0]))


def test_batch_fields_match_the_source() -> None:
    source = toy()
    batch = DeviceLoader(source, seed=4, flip=False).batch(torch.arange(5, 30))
    assert torch.equal(batch.items, sample_to_item(4, 11, torch.arange(5, 30)))
    assert torch.equal(batch.images, to_float(source.images[batch.items]))
    assert source.labels is not None and batch.labels is not None
    assert torch.equal(batch.labels, source.labels[batch.items])
    assert (batch.images.dtype, batch.index.tolist()) == (torch.float32, list(range(5, 30)))


def test_flips_mirror_the_images() -> None:
    source, index = toy(), torch.arange(400)
    plain = DeviceLoader(source, seed=4, flip=False).batch(index).images
    batch = DeviceLoader(source, seed=4).batch(index).images
    mirrored = flip_mask(4, index)
    assert torch.equal(batch[mirrored], plain[mirrored].flip(-1))
    assert torch.equal(batch[~mirrored], plain[~mirrored])
    assert 150 < int(mirrored.sum()) < 250
    assert not torch.equal(mirrored, flip_mask(5, index))
    per_item = [len(set(mirrored[sample_to_item(4, 11, index) == item].tolist())) for item in range(11)]
    assert per_item == [2] * 11  # over the epochs, every image comes flipped and unflipped


@pytest.mark.parametrize("workers", [0, 2])
def test_streamed_equals_resident(folder_source: Source, workers: int) -> None:
    sizes = [5, 1, 16, 30, 3]
    resident = DeviceLoader(folder_source, seed=9)
    streamed = StreamLoader(folder_source, seed=9, workers=workers)
    pairs = zip(resident.batches(index_batches(*sizes)), streamed.batches(index_batches(*sizes)), strict=True)
    seen = []
    for one, other in pairs:
        assert_equal(one, other)
        assert_equal(one, streamed.batch(one.index))
        seen.append(len(one.index))
    assert seen == sizes


def test_batching_and_resuming_change_nothing(folder_source: Source) -> None:
    loader = DeviceLoader(folder_source, seed=2)
    whole = loader.batch(torch.arange(60))
    parts = list(loader.batches(index_batches(7, 13, 40)))
    assert torch.equal(whole.images, torch.cat([part.images for part in parts]))
    late = next(StreamLoader(folder_source, seed=2, workers=0).batches(index_batches(20, start=40)))
    assert torch.equal(late.images, whole.images[40:])
    assert torch.equal(late.items, whole.items[40:])


def test_index_iterator_is_consumed_lazily(folder_source: Source) -> None:
    taken = []

    def endless() -> Iterator[Tensor]:
        for step in count():
            taken.append(step)
            yield torch.arange(4 * step, 4 * step + 4)

    loader = StreamLoader(folder_source, seed=0, workers=2)
    batches = list(islice(loader.batches(endless()), 3))
    assert [int(batch.index[0]) for batch in batches] == [0, 4, 8]
    assert len(taken) <= 3 + 2 * 2 + 1


def test_global_generator_is_left_alone(folder_source: Source) -> None:
    before = torch.get_rng_state()
    list(StreamLoader(folder_source, seed=0, workers=2).batches(index_batches(4)))
    list(DeviceLoader(folder_source, seed=0).batches(index_batches(4)))
    assert torch.equal(before, torch.get_rng_state())


def readers() -> list[int]:
    return [child.pid for child in multiprocessing.active_children() if child.name == "scalelong-reader"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_dies_or_hangs_is_replaced_at_its_position(folder_source: Source, number: int) -> None:
    sizes = [4] * 12
    expected = DeviceLoader(folder_source, seed=9).batches(index_batches(*sizes))
    loader = StreamLoader(folder_source, seed=9, workers=2, worker_timeout=0.5)
    for position, (one, other) in enumerate(zip(expected, loader.batches(index_batches(*sizes)), strict=True)):
        assert_equal(one, other)
        if position == 3:
            os.kill(readers()[0], number)
    assert loader.replaced == (1 if number in (signal.SIGKILL, signal.SIGSTOP) else 0)
    assert readers() == []


def test_workers_that_die_again_and_again_end_the_run(folder_source: Source) -> None:
    batches = StreamLoader(folder_source, seed=9, workers=1).batches(index_batches(*[4] * 100))
    with pytest.raises(DataError, match=r"data\.workers: a worker process died \(killed by SIGKILL.*; 4 have failed"):
        for _ in batches:
            os.kill(readers()[0], signal.SIGKILL)
    assert readers() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_file_is_named_when_read(image_folder: Path, workers: int) -> None:
    (image_folder / "dog" / "bad.png").write_bytes(b"no picture")
    source = load_source(image_folder, image_size=8)
    with pytest.raises(DataError, match=r"^\S*bad\.png: unreadable image"):
        list(StreamLoader(source, seed=0, workers=workers).batches(index_batches(10, 13)))
    with pytest.raises(DataError, match=r"bad\.png"):
        DeviceLoader(source, seed=0)


def test_unlabelled_sources_have_no_labels() -> None:
    source = MemorySource("plain", torch.zeros(3, 1, 4, 4, dtype=torch.uint8))
    assert DeviceLoader(source, seed=0).batch(torch.arange(3)).labels is None


def test_make_loader_chooses_by_size(folder_source: Source) -> None:
    assert folder_source.nbytes == 22 * 3 * 8 * 8
    assert isinstance(make_loader(folder_source, 0), DeviceLoader)
    streamed = make_loader(folder_source, 0, workers=0, resident_limit_bytes=folder_source.nbytes - 1)
    assert isinstance(streamed, StreamLoader)
    with pytest.raises(ValueError, match="workers"):
        StreamLoader(folder_source, 0, workers=-1)
    with pytest.raises(DataError, match="no items"):
        make_loader(MemorySource("none", torch.zeros(0, 3, 4, 4, dtype=torch.uint8)), 0)


@CUDA
def test_gpu_gives_the_same_bits(folder_source: Source) -> None:
    here = DeviceLoader(folder_source, seed=9)
    for there in (DeviceLoader(folder_source, 9, "cuda"), StreamLoader(folder_source, 9, "cuda", workers=2)):
        for one, other in zip(here.batches(index_batches(5, 30)), there.batches(index_batches(5, 30)), strict=True):
            assert other.images.is_cuda and other.index.is_cuda
            assert torch.equal(one.images, other.images.cpu())
            assert torch.equal(one.items, other.items)


def test_one_of_several_captions_is_chosen_by_seed_and_index() -> None:
    counts = torch.tensor([1, 3, 2])
    index = torch.arange(600)
    items = index % 3
    rows = caption_rows(5, index, items, counts)
    assert set(rows[items == 0].tolist()) == {0}
    assert set(rows[items == 1].tolist()) == {1, 2, 3}
    assert set(rows[items == 2].tolist()) == {4, 5}
    assert torch.equal(rows[100:], caption_rows(5, index[100:], items[100:], counts))
    assert not torch.equal(rows, caption_rows(6, index, items, counts))
    assert caption_rows(5, index, items, None) is items
