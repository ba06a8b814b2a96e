"""Images per second that the loader reads from tar shards, beside two plain peers that read the same images.

The peers: a folder of the same PNG files read with Pillow in a plain torch DataLoader, and the shards read from front to
back with tarfile and Pillow, as sequential readers of shards do. All have the same number of worker processes.

python benchmarks/loader.py --out benchmarks/results/loader.json
chrt -r 10 python benchmarks/loader.py --out benchmarks/results/loader.json   # on a machine that runs other programs, too
"""

from __future__ import annotations

import io
import os
import resource
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from measure import about
from measure import write as write_result
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from scalelong.data import load_source
from scalelong.data.loader import StreamLoader


@dataclass(frozen=True)
class Benchmark:
    images: int = 20_000
    size: int = 32
    per_shard: int = 2_500
    batch_size: int = 128
    workers: int = 2
    repeats: int = 3
    out: str = ""


class Folder(Dataset[Tensor]):
    """The plain peer: one file per image."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, item: int) -> Tensor:
        with Image.open(self.files[item]) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


class Sequential(IterableDataset[Tensor]):
    """The other peer: each worker reads its share of the shards from front to back."""

    def __init__(self, shards: list[Path]) -> None:
        self.shards = shards

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for shard in self.shards[first::step]:
            with tarfile.open(shard, "r|") as archive:
                for member in archive:
                    content = archive.extractfile(member)
                    assert content is not None
                    with Image.open(io.BytesIO(content.read())) as image:
                        yield torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def write(folder: Path, command: Benchmark) -> tuple[list[Path], list[Path]]:
    """Write the same images (emoji) as files and as shards."""
    source = load_source("emoji32", image_size=command.size)
    contents = []
    for item in range(len(source)):
        content = io.BytesIO()
        Image.fromarray(source.read(item).permute(1, 2, 0).numpy()).save(content, "PNG")
        contents.append(content.getvalue())
    files, shards = [], []
    (folder / "files").mkdir()
    for start in range(0, command.images, command.per_shard):
        shards.append(folder / f"{len(shards):03d}.tar")
        with tarfile.open(shards[-1], "w") as archive:
            for number in range(start, min(start + command.per_shard, command.images)):
                content = contents[number % len(contents)]
                entry = tarfile.TarInfo(f"{number:06d}.png")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
                files.append(folder / "files" / entry.name)
                files[-1].write_bytes(content)
    return files, shards


def cpu_seconds() -> float:
    """Of this process and of the workers that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def rate(batches: Callable[[], Iterator[int]], repeats: int) -> tuple[list[float], list[float]]:
    """Images per second, and per second of CPU time, of each repeat; the workers' start is included.

    The second figure does not count the time in which other programs had the cores.
    """
    rates, by_cpu = [], []
    for _ in range(repeats):
        started, used = time.perf_counter(), cpu_seconds()
        total = sum(batches())
        rates.append(total / (time.perf_counter() - started))
        by_cpu.append(total / (cpu_seconds() - used))
    return rates, by_cpu


def main() -> None:
    command = tyro.cli(Benchmark, description=__doc__)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        files, shards = write(Path(place), command)
        source = load_source(f"webdataset:{place}/*.tar", root=Path(place) / "cache")
        loader = StreamLoader(source, seed=0, workers=command.workers)
        index = list(torch.split(torch.arange(command.images), command.batch_size))
        options = {"batch_size": command.batch_size, "num_workers": command.workers}
        ways: dict[str, Callable[[], Iterator[int]]] = {
            "shards, in random order (scalelong)": lambda: (len(batch.images) for batch in loader.batches(index)),
            "folder, in random order (torch DataLoader)": lambda: (
                len(batch) for batch in DataLoader(Folder(files), shuffle=True, **options)
            ),
            "shards, from front to back (tarfile)": lambda: (
                len(batch) for batch in DataLoader(Sequential(shards), **options)
            ),
        }
        rows = []
        for name, batches in ways.items():
            rates, by_cpu = rate(batches, command.repeats)
            best = {"images_per_second": max(rates), "images_per_cpu_second": max(by_cpu)}
            rows.append({"what": name, **best, "all": rates, "all_by_cpu": by_cpu})
            print(f"{max(rates):8,.0f} images/s {max(by_cpu):8,.0f} per second of one core  {name}", flush=True)
    settings = {key: value for key, value in vars(command).items() if key != "out"}
    cores = {"cores": len(os.sched_getaffinity(0)), "real_time_priority": os.sched_getscheduler(0) != os.SCHED_OTHER}
    write_result(command.out, {**about(torch.device("cpu")), **settings, **cores, "rows": rows})


if __name__ == "__main__":
    main()
