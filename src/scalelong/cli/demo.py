"""`scalelong demo`."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from scalelong.report import compare_runs, read_run, tables, write_report
from scalelong.runs.presets import get_preset


@dataclass(frozen=True)
class Demo:
    """Train none, rsqrt2, cs and ls from one seed on embedded digits, and compare them: three minutes on two cores.

    Example: scalelong demo --out runs/demo --steps 600
    """

    out: str = "runs/demo"  # folder of the four runs and the pictures; the same command again resumes
    steps: int = 600
    seed: int = 0


def main(arguments: list[str]) -> None:
    """Train, tabulate, plot."""
    command = tyro.cli(Demo, args=arguments, prog="scalelong demo")
    from scalelong.report.plots import plot_comparison, stack_grids
    from scalelong.stability.sweep import sweep, train_in_parallel

    methods, out, started = ("none", "rsqrt2", "cs", "ls"), Path(command.out), time.perf_counter()
    preset, every = get_preset("digits-demo"), max(1, command.steps // 7)
    training = replace(preset.training, checkpoint_every=command.steps, sample_every=every)
    configs = sweep(replace(preset, training=training), methods, [command.seed], command.steps)
    train_in_parallel(dict(zip(methods, configs.values(), strict=True)), out)
    runs = [read_run(out / method) for method in methods]
    plot_comparison(runs, out / "comparison.png")
    stack_grids(runs, out / "samples.png")
    print(f"\nFour U-ViTs of 12 blocks, {command.steps} steps on 1,797 real digits, same seed and data:\n")
    print(tables.aligned(tables.measures_table(compare_runs(runs))))
    print("oscillation: mean |change of the middle block's norm on a fixed batch| / mean norm, lower is steadier")
    print(f"\nreport   {write_report(runs, out / 'report.html')}\ncurves   {out / 'comparison.png'}")
    print(f"samples  {out / 'samples.png'}\nruns     {out}/<method>\nin all   {time.perf_counter() - started:.0f} s")
