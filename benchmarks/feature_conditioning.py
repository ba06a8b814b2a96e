"""Cost of conditioning on features: training steps with and without it, interleaved in windows.

    python benchmarks/feature_conditioning.py --out benchmarks/results/feature_conditioning_cpu.json

Windows alternate between the two, so that a machine that slows down slows both; the fastest of each kind are compared. The
arithmetic that is added is also counted, relative to that of the plain network: it does not depend on the machine.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from measure import about, write
from torch.utils.flop_counter import FlopCounterMode

from scalelong.training import RunConfig, Trainer, get_preset
from scalelong.training.step import sample_indices


@dataclass(frozen=True)
class Benchmark:
    """Command-line options."""

    preset: str = ""  # default: digits-demo on a CPU, cifar10-uvit-s2 on a GPU
    windows: int = 8  # of each kind
    steps: int = 20  # in a window
    compile: str = "off"  # off, default, reduce-overhead
    out: str = ""


def main() -> None:
    command = tyro.cli(Benchmark, description=__doc__)
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        torch.set_num_threads(1)
    preset = get_preset(command.preset or ("cifar10-uvit-s2" if on_gpu else "digits-demo"))
    clock = time.perf_counter if on_gpu else time.process_time
    with tempfile.TemporaryDirectory() as folder:
        trainers = {
            kind: Trainer(configured(preset, kind == "conditioned", command.compile), Path(folder) / kind)
            for kind in ("plain", "conditioned")
        }
        seconds: dict[str, list[float]] = {kind: [] for kind in trainers}
        for window in range(command.windows + 1):  # the first is a warm-up
            for kind, trainer in trainers.items():
                started = clock()
                run_window(trainer, window, command.steps)
                if window:
                    seconds[kind].append((clock() - started) / command.steps)
        flops = {kind: forward_flops(trainer) for kind, trainer in trainers.items()}
    best = {kind: min(values) for kind, values in seconds.items()}
    result = {
        **about(torch.device("cuda" if on_gpu else "cpu")),
        "compile": command.compile,
        **{f"{kind}_ms_per_step": value * 1e3 for kind, value in best.items()},
        "overhead": best["conditioned"] / best["plain"] - 1,
        "overhead_in_flops": flops["conditioned"] / flops["plain"] - 1,
        "spread_of_plain_windows": max(seconds["plain"]) / best["plain"] - 1,
        "within_1_percent": best["conditioned"] / best["plain"] <= 1.01,
    }
    print(json.dumps(result, indent=1))
    write(command.out, result)


def configured(preset: RunConfig, conditioning: bool, compile_mode: str) -> RunConfig:
    training = dataclasses.replace(preset.training, steps=10**6, compile=compile_mode)
    return dataclasses.replace(
        preset, training=training, features=dataclasses.replace(preset.features, conditioning=conditioning)
    )


def run_window(trainer: Trainer, window: int, steps: int) -> None:
    for step in range(window * steps + 1, (window + 1) * steps + 1):
        index = sample_indices(trainer.config, step, 0, 0, 1)
        pending = trainer.stepper.compute(step, trainer.loader.batches([index]))
        trainer.stepper.update(pending)
        trainer.ema.update(step)
        trainer.stepper.clear()
    pending.read()


def forward_flops(trainer: Trainer) -> int:
    """Of the network itself, on one batch of 32."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        trainer.model(**trainer.probe_inputs())
    return counter.get_total_flops()


if __name__ == "__main__":
    main()
