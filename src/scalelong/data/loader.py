"""Sample order and transfer to the device.

Order, flips and captions are functions of (seed, global sample index), independent of batch size, workers and resuming.
Shapes: n items, B batch, C channels, H x W pixels.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from scalelong.data.base import DataError, Device, Source, threaded
from scalelong.data.workers import PREFETCH, Worker
from scalelong.errors import require
from scalelong.progress import Progress
from scalelong.random import random_bits, uniform

logger = logging.getLogger(__name__)

_MOST_REPLACED = 3  # restarts of dead or hanging workers

_Reply = tuple[Tensor, Tensor, Tensor]  # global indices, items, what was read


@lru_cache(maxsize=8)
def _permutation(seed: int, first: int, size: int) -> Tensor:
    """Sort by one random key per global index first .. first + size - 1."""
    return torch.argsort(random_bits(seed, "order", torch.arange(first, first + size)), stable=True)


def sample_to_item(seed: int, n: int, index: Tensor, window: int | None = None) -> Tensor:
    """The item at each global sample index; every epoch is a new permutation, within consecutive windows.

    >>> sample_to_item(0, 5, torch.arange(10))
    tensor([3, 4, 0, 1, 2, 1, 4, 3, 0, 2])
    """
    if n < 1:
        raise ValueError(f"data: a source needs at least one item, got {n}")
    window = min(window or n, n)
    index = index.to(device="cpu", dtype=torch.int64)
    if index.numel() and int(index.min()) < 0:
        raise ValueError(f"data: a sample index cannot be negative, got {int(index.min())}")
    places = index % n
    windows = places // window * window  # first place of each window
    starts = index - places + windows  # its global index
    items = torch.empty_like(index)
    for start in set(starts.tolist()):
        here, first = starts == start, start % n
        items[here] = first + _permutation(seed, start, min(window, n - first))[places[here] - first]
    return items


def flip_mask(seed: int, index: Tensor) -> Tensor:
    """True where the sample is mirrored: one random bit per global index."""
    return random_bits(seed, "flip", index) < 0


def caption_rows(seed: int, index: Tensor, items: Tensor, counts: Tensor | None) -> Tensor:
    """Row of each sample's caption; items with several captions get a random one by index."""
    if counts is None:
        return items
    first = counts.cumsum(0) - counts
    chosen = (uniform(seed, "caption", index) * counts[items]).long()
    return first[items] + chosen.minimum(counts[items] - 1)


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch on the device.

    >>> from scalelong.data import load_source
    >>> make_loader(load_source("digits"), seed=0).batch(torch.arange(2)).images.shape
    torch.Size([2, 1, 8, 8])
    """

    images: Tensor  # float32 (B, C, H, W), on the device: pixels in [-1, 1], or latents
    labels: Tensor | None  # int64 (B,), on the device
    index: Tensor  # int64 (B,) global sample indices, on the device
    items: Tensor  # int64 (B,) rows of the source, on the CPU
    captions: Tensor  # int64 (B,) rows of the source's captions, on the CPU


class Loader:
    """Turn global sample indices into batches on the device."""

    worker_timeout = 300.0  # seconds before a hanging worker is replaced

    def __init__(self, source: Source, seed: int, device: Device = "cpu", flip: bool = True) -> None:
        if len(source) == 0:
            raise DataError(f"{source.name}: no items; check data.name")
        self.source, self.seed, self.flip = source, seed, flip
        self.device = torch.device(device)

    def _stored(self, items: Tensor) -> Tensor:
        """Items as stored, read in this process."""
        return self.source.read_many(items.tolist())

    def batch(self, index: Tensor) -> Batch:
        """The batch of these global sample indices, read in this process."""
        items = self.items(index)
        return self._finish(index.to(device="cpu", dtype=torch.int64), items, self._stored(items))

    def batches(self, index_batches: Iterable[Tensor]) -> Iterator[Batch]:
        """One batch per tensor of global sample indices, in that order."""
        return map(self.batch, index_batches)

    def items(self, index: Tensor) -> Tensor:
        """The items at these global sample indices."""
        return sample_to_item(self.seed, len(self.source), index, self.source.window)

    def _finish(self, index: Tensor, items: Tensor, stored: Tensor) -> Batch:
        """Convert stored items to a batch; shared by both loaders, which are bit-identical."""

        def put(tensor: Tensor) -> Tensor:
            return tensor.to(self.device, non_blocking=True)

        places, mirrored = put(index), put(flip_mask(self.seed, index)) if self.flip else None
        images = self.source.prepare(put(stored), self.seed, places, mirrored)
        labels = None if self.source.labels is None else put(self.source.labels[items])
        captions = caption_rows(self.seed, index, items, self.source.caption_counts)
        return Batch(images, labels, places, items, captions)


class DeviceLoader(Loader):
    """Keep all items on the device as stored; a batch is a gather."""

    def __init__(self, source: Source, seed: int, device: Device = "cpu", flip: bool = True) -> None:
        super().__init__(source, seed, device, flip)
        self._images = load_images(source).to(self.device)

    def _stored(self, items: Tensor) -> Tensor:
        return self._images[items.to(self.device, non_blocking=True)]


class StreamLoader(Loader):
    """Prefetch items in worker processes, or in a thread if the source does not support processes."""

    def __init__(
        self,
        source: Source,
        seed: int,
        device: Device = "cpu",
        flip: bool = True,
        workers: int = 2,
        worker_timeout: float = 300.0,
    ) -> None:
        super().__init__(source, seed, device, flip)
        self.worker_timeout, self.replaced = worker_timeout, 0
        require(workers >= 0, "data.workers", "at least 0", workers)
        self.workers = workers if source.max_workers is None else min(workers, source.max_workers)
        self.by_thread = workers > self.workers == 0

    def batches(self, index_batches: Iterable[Tensor]) -> Iterator[Batch]:
        """One batch per index tensor; prefetches up to max(workers, 1) * 2 of them."""
        requests = ((index.to(device="cpu", dtype=torch.int64), self.items(index)) for index in index_batches)
        if self.workers:
            replies = self._from_workers(requests)
        else:
            replies = ((index, items, self._stored(items)) for index, items in requests)
        for reply in _read_ahead(replies) if self.by_thread else replies:
            yield self._finish(*reply)

    def _from_workers(self, requests: Iterator[tuple[Tensor, Tensor]]) -> Iterator[_Reply]:
        """Read round-robin from the workers; replace one that dies or hangs and repeat its requests."""
        workers = [Worker(self.source) for _ in range(self.workers)]
        asked: deque[tuple[Worker, Tensor, Tensor]] = deque()

        def ask(worker: Worker) -> None:
            if (request := next(requests, None)) is not None:
                worker.ask(request[1].tolist())
                asked.append((worker, *request))

        try:
            for worker in workers * PREFETCH:
                ask(worker)
            while asked:
                worker, index, items = asked.popleft()
                while failure := self._wait_for(worker):
                    self.replaced += 1
                    sentence = f"data.workers: a worker process {failure}, at {self.source.where(int(items[0]))}"
                    if self.replaced > _MOST_REPLACED:
                        raise DataError(f"{sentence}; {self.replaced} have failed, try fewer data.workers or 0")
                    logger.warning("%s; starting another one at the same position", sentence)
                    worker.start()
                stored = worker.take()
                ask(worker)
                yield index, items, stored.pin_memory() if self.device.type == "cuda" else stored
        finally:
            for worker in workers:
                worker.stop()

    def _wait_for(self, worker: Worker) -> str:
        """Wait for a worker's reply; return the reason if it died or hung."""
        started = time.monotonic()
        while not worker.pipe.poll(0.2):
            if time.monotonic() - started > self.worker_timeout:
                return f"has not answered for {self.worker_timeout:g} s"
        return "" if worker.receive() else f"died ({worker.cause()})"


def _read_ahead(replies: Iterable[_Reply]) -> Iterator[_Reply]:
    """The replies in order, prefetched by a thread."""
    rest = iter(replies)
    with ThreadPoolExecutor(1) as pool:
        asked = deque(pool.submit(next, rest, None) for _ in range(PREFETCH))
        while (reply := asked.popleft().result()) is not None:
            asked.append(pool.submit(next, rest, None))
            yield reply


def load_images(source: Source) -> Tensor:
    """All items of a source as stored (n, ...); a bad file is reported here, before the run starts."""
    if source.images is not None:
        return source.images
    shape, dtype = source.stored
    images = torch.empty((len(source), *shape), dtype=dtype)
    found = threaded(source.read, range(len(source)))
    for item, image in enumerate(Progress(found, total=len(source), desc=source.name, unit="img")):
        images[item] = image
    return images


def make_loader(
    source: Source,
    seed: int,
    device: Device = "cpu",
    flip: bool = True,
    workers: int = 2,
    resident_limit_bytes: int = 2**31,
    worker_timeout: float = 300.0,
) -> Loader:
    """Return a DeviceLoader if all items fit under the limit, else a StreamLoader; batches are identical.

    >>> from scalelong.data import load_source
    >>> loader = make_loader(load_source("digits"), seed=0)
    >>> [batch.images.shape[0] for batch in loader.batches([torch.arange(8), torch.arange(8, 12)])]
    [8, 4]
    """
    if source.nbytes <= resident_limit_bytes:
        return DeviceLoader(source, seed, device, flip)
    return StreamLoader(source, seed, device, flip, workers, worker_timeout)


def augmented(images: Tensor, seed: int, index: Tensor) -> Tensor:
    """Random flips and crops of images (B, C, H, W) padded by an eighth, a function of the seed and the index (B,)."""
    height, width = images.shape[-2:]
    pad = max(1, width // 8)
    index = index.to(images.device)
    flip, down, right = uniform(seed, "augment", index, (3,)).unbind(1)
    padded = F.pad(images, (pad, pad, pad, pad), mode="reflect")
    rows = (down * (2 * pad + 1)).long()[:, None] + torch.arange(height, device=images.device)
    columns = (right * (2 * pad + 1)).long()[:, None] + torch.arange(width, device=images.device)
    columns = torch.where(flip[:, None] < 0.5, columns.flip(1), columns)
    number = torch.arange(len(images), device=images.device)[:, None, None]
    return padded.movedim(1, -1)[number, rows[:, :, None], columns[:, None, :]].movedim(-1, 1).contiguous()
