"""The Frechet distance of 2048 features: seconds alone, and in two processes at once, with one thread and with all.

python benchmarks/frechet.py --out benchmarks/results/frechet.json
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context

import torch
import tyro
from measure import about, write

from scalelong.evaluation import frechet


@dataclass(frozen=True)
class Benchmark:
    features: int = 2048
    samples: int = 6000
    processes: int = 2
    out: str = ""


def main() -> None:
    command = tyro.cli(Benchmark, description=__doc__)
    rows = []
    for processes in (1, command.processes):
        for threads in ("one thread", "all threads"):
            with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
                jobs = [pool.submit(_seconds, command, threads == "all threads") for _ in range(processes)]
                seconds = max(job.result() for job in jobs)
            rows.append({"processes": processes, "threads": threads, "seconds": seconds})
            print(rows[-1], flush=True)
    write(command.out, {**about(torch.device("cpu")), "rows": rows})


def _seconds(command: Benchmark, all_threads: bool) -> float:
    torch.set_num_threads(os.cpu_count() or 1)
    if all_threads:
        frechet._one_thread = _as_it_is
    torch.manual_seed(0)
    gaussians = []
    for _ in range(2):
        x = torch.randn(command.samples, command.features, dtype=torch.float64)
        gaussians += [x.mean(0), torch.cov(x.T)]
    started = time.perf_counter()
    frechet.frechet_distance(*gaussians)
    return time.perf_counter() - started


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


if __name__ == "__main__":
    main()
