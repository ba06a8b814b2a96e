"""Cost of the oscillation probe at its default interval: training steps with and without it, interleaved in one run.

    python benchmarks/probe_overhead.py --out benchmarks/results/probe_overhead_cpu.json

Windows of steps alternate between the two, so that a machine that slows down slows both; the fastest of each kind are
compared, and the spread of the plain windows shows how reliable that comparison is. A window contains exactly one
measurement of the probe, which is also timed on its own: its share of a window's plain time is the overhead.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import tyro
from measure import about, write
from torch import nn

from scalelong.runs.reader import PROBE_EVERY
from scalelong.stability import OscillationProbe
from scalelong.training import RunConfig, Trainer, get_preset
from scalelong.training.step import sample_indices


@dataclass(frozen=True)
class Benchmark:
    """Command-line options."""

    preset: str = ""  # default: digits-demo on a CPU, cifar10-uvit-s2 at batch 64 with CUDA graphs on a GPU
    windows: int = 8  # of each kind
    folder: str = "runs/probe-overhead"
    out: str = ""


def main() -> None:
    command = tyro.cli(Benchmark, description=__doc__)
    on_gpu = torch.cuda.is_available()
    trainer = Trainer(
        configured(command.preset or ("cifar10-uvit-s2" if on_gpu else "digits-demo"), on_gpu), command.folder
    )
    clock = time.perf_counter if on_gpu else time.process_time
    seconds: dict[str, list[float]] = {"plain": [], "probed": []}
    probe = TimedProbe(OscillationProbe(trainer.model, trainer.probe_inputs(), every=PROBE_EVERY), clock)
    run_window(trainer, 0, probe)
    probe.seconds.clear()
    for window in range(1, 2 * command.windows + 1):
        kind = "probed" if window % 2 else "plain"
        started = clock()
        run_window(trainer, window, probe if kind == "probed" else None)
        seconds[kind].append((clock() - started) / PROBE_EVERY)
    plain, probed, measurement = min(seconds["plain"]), min(seconds["probed"]), median(probe.seconds)
    share = measurement / (PROBE_EVERY * plain)
    result = {
        **about(torch.device("cuda" if on_gpu else "cpu")),
        "every": PROBE_EVERY,
        "blocks": len(probe.probe.blocks),
        "plain_ms_per_step": plain * 1e3,
        "probed_ms_per_step": probed * 1e3,
        "measurement_ms": measurement * 1e3,
        "overhead": share,
        "overhead_from_windows": probed / plain - 1,
        "spread_of_plain_windows": max(seconds["plain"]) / plain - 1,
        "windows": command.windows,
        "within_2_percent": share <= 0.02,
    }
    print(json.dumps(result, indent=1))
    write(command.out, result)


class TimedProbe:
    """A probe that notes how long its measurements take."""

    def __init__(self, probe: OscillationProbe, clock: Callable[[], float]) -> None:
        self.probe, self.clock, self.seconds = probe, clock, list[float]()

    def __call__(self, step: int, model: nn.Module) -> None:
        if step % self.probe.every == 0 and torch.cuda.is_available():
            torch.cuda.synchronize()  # what came before is not the probe's
        started = self.clock()
        if self.probe(step, model) is not None:
            self.seconds.append(self.clock() - started)


def configured(name: str, on_gpu: bool) -> RunConfig:
    """The preset; on a GPU at the paper's smaller batch with CUDA graphs, where a step is shortest."""
    preset = get_preset(name)
    training = dataclasses.replace(preset.training, steps=10**6)
    if on_gpu:
        training = dataclasses.replace(training, batch_size=64, compile="reduce-overhead")
    else:
        torch.set_num_threads(1)
    return dataclasses.replace(preset, training=training)


def run_window(trainer: Trainer, window: int, probe: TimedProbe | None) -> None:
    """As many steps as lie between two measurements, and one measurement if there is a probe."""
    for number in range(1, PROBE_EVERY + 1):
        step = window * PROBE_EVERY + number
        index = sample_indices(trainer.config, step, 0, 0, 1)
        pending = trainer.stepper.compute(step, trainer.loader.batches([index]))
        trainer.stepper.update(pending)
        trainer.ema.update(step)
        if probe is not None:
            probe(step, trainer.model)
        trainer.stepper.clear()
        pending.read()


if __name__ == "__main__":
    main()
