"""Train none, rsqrt2, cs and ls from the same seed on embedded digits, and compare them: about three minutes on two cores.

Example: scalelong demo --out runs/demo --steps 600
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from tqdm import tqdm

from scalelong.report.html import write_report
from scalelong.report.plots import plot_comparison, stack_grids
from scalelong.runs.reader import Run, read_run
from scalelong.training import RunConfig, get_preset, read_events

METHODS = ("none", "rsqrt2", "cs", "ls")


@dataclass(frozen=True)
class Demo:
    """What is on the command line."""

    out: str = "runs/demo"  # folder of the four runs and the pictures; the same command again resumes
    steps: int = 600
    seed: int = 0


def main(arguments: list[str]) -> None:
    """Train, tabulate, draw."""
    command = tyro.cli(Demo, args=arguments, prog="scalelong demo", description=__doc__)
    out = Path(command.out)
    configs = {method: demo_config(method, command.steps, command.seed) for method in METHODS}
    started = time.perf_counter()
    _train_all(configs, out)
    runs = [read_run(out / method) for method in METHODS]
    plot_comparison(runs, out / "comparison.png")
    stack_grids(runs, out / "samples.png")
    print(f"\nFour U-ViTs of 12 blocks, {command.steps} steps on 1,797 real digits, same seed and data:\n")
    print(comparison_table(runs))
    report = write_report(runs, out / "report.html")
    print(
        f"\nreport   {report}\ncurves   {out / 'comparison.png'}\nsamples  {out / 'samples.png'}\nruns     {out}/<method>"
    )
    print(f"in all   {time.perf_counter() - started:.0f} s")


def demo_config(method: str, steps: int, seed: int) -> RunConfig:
    """The demo's preset with this method."""
    preset = get_preset("digits-demo")
    return dataclasses.replace(
        preset,
        scaling=dataclasses.replace(preset.scaling, method=method),
        training=dataclasses.replace(
            preset.training, steps=steps, seed=seed, checkpoint_every=steps, sample_every=max(1, steps // 7)
        ),
    )


def comparison_table(runs: list[Run]) -> str:
    """Final loss, oscillation of the middle block and spread of the gradient norm of each run."""
    lines = [
        "method   final loss   feature oscillation   gradient-norm spread   images/s",
        "-" * 76,
    ]
    for run in runs:
        _, speed = run.column("train", "images_per_second")
        lines.append(
            f"{run.label:8} {run.final_loss():10.4f} {run.oscillation():21.4f} {run.gradient_spread():22.3f} "
            f"{sum(speed) / len(speed):10.0f}"
        )
    lines.append(
        "oscillation: mean |change of the middle block's norm on a fixed batch| / mean norm, lower is steadier"
    )
    return "\n".join(lines)


def _train_all(configs: dict[str, RunConfig], out: Path) -> None:
    """As many runs at a time as there are cores, with a bar for each read from what the runs write."""
    cores = min(len(configs), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(cores, mp_context=context) as pool:
        futures = {method: pool.submit(_train_one, config, out / method) for method, config in configs.items()}
        _show_progress(futures, configs, out)
        for future in futures.values():
            future.result()


def _train_one(config: RunConfig, folder: Path) -> None:
    import torch

    from scalelong.cli.train import oscillation_probe
    from scalelong.training import Trainer

    torch.set_num_threads(1)
    trainer = Trainer(config, folder)
    trainer.observers.append(oscillation_probe(trainer, every=config.training.log_every))
    trainer.run()


def _show_progress(futures: dict[str, Future[None]], configs: dict[str, RunConfig], out: Path) -> None:
    bars = {
        method: tqdm(total=config.training.steps, desc=method.ljust(6), unit="step", position=i, disable=None)
        for i, (method, config) in enumerate(configs.items())
    }
    while not all(future.done() for future in futures.values()):
        time.sleep(0.5)
        for method, bar in bars.items():
            _advance(bar, out / method)
    for method, bar in bars.items():
        _advance(bar, out / method)
        bar.close()


def _advance(bar: Any, folder: Path) -> None:
    if (folder / "metrics.jsonl").is_file():
        records = [record for record in read_events(folder)[0] if record["kind"] == "train"]
        if records:
            bar.set_postfix(loss=f"{records[-1]['loss']:.4f}", refresh=False)
            bar.update(records[-1]["step"] - bar.n)
