"""How the time and the memory of our training step grow: depth, tokens, batch, activation checkpointing, ranks; none, cs, ls.

    python benchmarks/growth.py --out benchmarks/results/growth.json            # around U-ViT-S/2, on a GPU
    python benchmarks/growth.py --cpu --out benchmarks/results/growth_cpu.json  # around a small network, one thread

One factor changes at a time. Windows of the three methods take turns, so their ratios hold on a machine that others use.
Memory is that of the activations kept for the backward pass, and on a GPU also the peak of the whole step. There every
network is a process; some of them compile at the same time, and all are timed one after another. Rows are written after
every such group.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import tyro
from measure import Step, about, in_turn, saved_bytes, spread, wait_for_turn, windows, write

from scalelong.data import MemorySource, make_loader
from scalelong.diffusion import draw_time_and_noise
from scalelong.runs.settings import DataSettings, ModelSettings, RunConfig, ScalingSettings, TrainingSettings
from scalelong.training import get_preset
from scalelong.training.build import build_model, build_objective
from scalelong.training.fast import speed_up
from scalelong.training.optimizers import EMA
from scalelong.training.step import Pending, Stepper, autocast, sample_indices

METHODS = ("none", "cs", "ls")


@dataclass(frozen=True)
class Benchmark:
    factors: tuple[str, ...] = ("batch", "depth", "tokens", "checkpointing", "preset", "ranks")
    compile: str = "step"  # of the step on a GPU: off, default, reduce-overhead, step
    windows: int = 9
    steps: int = 0  # in a window; 0: on a GPU 10 of the base network and fewer of larger ones, 1 on a CPU
    at_once: int = 12  # networks that compile at the same time on a GPU
    memory: float = 100.0  # GiB that they may hold together
    cpu: bool = False
    out: str = ""
    worker: str = ""  # a case and its method as JSON: this process measures one network on a GPU and prints its row


@dataclass(frozen=True)
class Case:
    """A network and a batch; the defaults are those of U-ViT-S/2 on CIFAR-10."""

    dim: int = 512
    heads: int = 8
    depth: int = 12
    size: int = 32  # of the images
    patch: int = 2
    batch: int = 128
    checkpointing: bool = False

    @property
    def tokens(self) -> int:
        return (self.size // self.patch) ** 2

    @property
    def activations(self) -> float:
        """Relative to U-ViT-S/2 at batch 128, without checkpointing."""
        return self.batch * self.tokens * self.depth * self.dim / (128 * 256 * 12 * 512)


SMALL = Case(dim=64, heads=4, size=16, batch=16)
VALUES = {"depth": (12, 20, 32), "tokens": (64, 256, 1024), "batch": (32, 64, 128, 512)}
SMALL_VALUES = {"depth": (12, 16, 20, 24, 28, 32), "tokens": (16, 64, 256), "batch": (8, 16, 32, 64)}


def cases(factor: str, base: Case, small: bool) -> dict[Any, Case]:
    """The networks by the value of the factor."""
    if factor == "checkpointing":
        return {flag: dataclasses.replace(base, checkpointing=flag) for flag in (False, True)}
    if factor == "preset":  # what the page on cost at scale needs; not on a CPU
        model = get_preset("imagenet64-uvit-l4").model
        large = Case(model.dim, model.heads, model.depth, 64, model.patch_size)
        return (
            {} if small else {f"imagenet64-uvit-l4, {n} images": dataclasses.replace(large, batch=n) for n in (16, 128)}
        )
    values = (SMALL_VALUES if small else VALUES)[factor]
    key = {"tokens": "size"}.get(factor, factor)
    sizes = [int(value**0.5) * base.patch if factor == "tokens" else value for value in values]
    return {value: dataclasses.replace(base, **{key: size}) for value, size in zip(values, sizes, strict=True)}


def config_of(case: Case, method: str, mode: str) -> RunConfig:
    model = ModelSettings("uvit", patch_size=case.patch, dim=case.dim, depth=case.depth, heads=case.heads,
                          checkpointing=case.checkpointing)  # fmt: skip
    training = TrainingSettings(steps=10**6, batch_size=case.batch, compile=mode)  # type: ignore[arg-type]
    return RunConfig(DataSettings("random"), model, ScalingSettings(method), training=training)


class Measured:
    """The step of one case, with its data, average and guard's numbers as in the training loop."""

    def __init__(self, case: Case, method: str, mode: str, device: torch.device, ranks: int = 1) -> None:
        self.config, shape = config_of(case, method, mode), (3, case.size, case.size)
        self.rank, self.ranks = (dist.get_rank() if ranks > 1 else 0), ranks
        images = torch.randint(0, 256, (1000, *shape), dtype=torch.uint8)
        self.loader = make_loader(MemorySource("random", images), 0, device)
        self.model, self.objective = build_model(self.config, shape).to(device), build_objective(self.config)
        self.ema = EMA(self.model)
        self.stepper = Stepper(self.config, self.model, self.objective, device, ranks)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        if mode == "step":
            self.stepper, self.ema = speed_up(self.stepper, self.ema)
        self.before: list[Pending] = []

    def step(self, number: int) -> None:
        indices = [sample_indices(self.config, number, 0, self.rank, self.ranks)]
        pending = self.stepper.compute(number, self.loader.batches(indices))
        if self.before:
            self.before.pop().read()
        self.before.append(pending)
        self.stepper.update(pending)
        self.ema.update(number)
        self.stepper.clear()

    def activation_bytes(self) -> int:
        batch = self.loader.batch(sample_indices(self.config, 1, 0, 0, 1))
        t, noise = draw_time_and_noise(self.objective.process, 0, batch.index, batch.images.shape[1:])

        def loss() -> torch.Tensor:
            with autocast(self.stepper.device, self.stepper.dtype):
                return self.objective.loss(self.model, batch.images, noise, t).mean()

        return saved_bytes(loss, list(self.model.parameters()))


def measure_on_a_gpu(command: Benchmark, device: torch.device) -> dict[str, Any]:
    """The row of one network, as a worker prints it."""
    given = json.loads(command.worker)
    method, case = given.pop("method"), Case(**given)
    each = Measured(case, method, command.compile, device)
    kept = each.activation_bytes()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    size = command.steps or max(3, round(10 / max(1.0, case.activations)))
    times = windows([each.step], device, command.windows, size, 6, wait_for_turn)[0]
    peak = torch.cuda.max_memory_allocated() / 2**30
    return spread(times) | {
        "peak_gib": peak, "activation_mib": kept / 2**20, "parameters": each.parameters,
    }  # fmt: skip


def gpu_rows(wanted: Sequence[tuple[str, Any, Case]], command: Benchmark) -> Iterator[list[dict[str, Any]]]:
    """Rows of (factor, value, case), group by group, measured by workers; a case of several factors is measured once."""
    options = [f"--windows={command.windows}", f"--steps={command.steps}", f"--compile={command.compile}"]
    waiting = [(case, method) for case in dict.fromkeys(case for _, _, case in wanted) for method in METHODS]
    while waiting:
        part = [waiting.pop(0)]
        while waiting and len(part) < command.at_once:
            if sum(3 + 7 * case.activations for case, _ in (*part, waiting[0])) > command.memory:  # GiB
                break
            part.append(waiting.pop(0))
        names = [json.dumps(dataclasses.asdict(case) | {"method": method}) for case, method in part]
        found = in_turn([[sys.executable, __file__, *options, f"--worker={name}"] for name in names])
        yield [
            {"factor": factor, "value": value, "method": method, **dataclasses.asdict(case)} | row
            for (case, method), row in zip(part, found, strict=True)
            for factor, value, other in wanted
            if row is not None and other == case
        ]


def cpu_rows(factor: str, value: Any, case: Case, command: Benchmark) -> list[dict[str, Any]]:
    """One row per method."""
    device = torch.device("cpu")
    rows = [{"factor": factor, "value": value, "method": method, **dataclasses.asdict(case)} for method in METHODS]
    measured = [Measured(case, method, "off", device) for method in METHODS]
    steps: list[Step] = [each.step for each in measured]
    found = windows(steps, device, command.windows, command.steps or 1, warm_up=1)
    for row, each, times in zip(rows, measured, found, strict=True):
        row["over_none"] = statistics.median(a / b for a, b in zip(times, found[0], strict=True))  # window by window
        row |= spread(times) | {"activation_mib": each.activation_bytes() / 2**20, "parameters": each.parameters}
    return rows


def ranks_rows(command: Benchmark, ranks: int) -> list[dict[str, Any]]:
    """Rows of the base case on several ranks with replicas, by torchrun on this machine."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    arguments = [__file__, "--factors", "ranks", "--windows", str(command.windows)] + ["--cpu"] * command.cpu
    done = subprocess.run([*launch, *arguments], capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def as_a_rank(command: Benchmark, base: Case, device: torch.device) -> None:
    """One of several ranks; the first prints its rows. On a CPU they are its processor time, without what it waits."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    ranks, rows = dist.get_world_size(), []
    mode = "default" if device.type == "cuda" else "off"
    for method in METHODS:
        each = Measured(base, method, mode, device, ranks)
        times = windows([each.step], device, command.windows, 10 if device.type == "cuda" else 3, warm_up=3)[0]
        about_case = {"factor": "ranks", "value": ranks, "method": method, **dataclasses.asdict(base)}
        rows.append({**about_case, **spread(times), "parameters": each.parameters})
        del each
    if dist.get_rank() == 0:
        print(json.dumps(rows), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    command = tyro.cli(Benchmark, description=__doc__)
    if command.cpu or not torch.cuda.is_available():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    base = Case() if on_gpu else SMALL
    if "WORLD_SIZE" in os.environ:
        as_a_rank(command, base, device)
        return
    if command.worker:
        print("\n" + json.dumps(measure_on_a_gpu(command, device)))
        return
    result: dict[str, Any] = {**about(device), "base": dataclasses.asdict(base) | {"tokens": base.tokens}, "rows": []}
    alone = [factor for factor in command.factors if factor != "ranks"]
    wanted = [(factor, value, case) for factor in alone for value, case in cases(factor, base, not on_gpu).items()]
    if on_gpu:
        groups = gpu_rows(wanted, command)
    else:
        groups = (cpu_rows(*each, command) for each in wanted)
    for rows in groups:
        add(result, rows, command.out)
    most = 2 if not on_gpu else torch.cuda.device_count()
    for count in (1, 2) if "ranks" in command.factors else ():
        add(result, ranks_rows(command, count) if count <= most else [], command.out)


def add(result: dict[str, Any], rows: list[dict[str, Any]], out: str) -> None:
    """Print and write more rows; on a GPU those of one network may come in two groups."""
    for row in rows:
        print(f"{row['factor']} {row['value']}, {row['method']}: {row['ms']:.1f} ms", flush=True)
    result["rows"] += rows
    write(out, result)


if __name__ == "__main__":
    main()
