"""`scalelong compare`, `report`, `diagnose` and `demo`: what the records of runs say. Torch is imported to train only."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import tyro

from scalelong.cli import RunFolder, RunFolders
from scalelong.report import compare_runs, read_run, read_runs, tables, write_report
from scalelong.runs.presets import get_preset


@dataclass(frozen=True)
class Compare:
    """Compare runs: mean ± sd over seeds, and the steps and seconds that each method needs to a given loss or quality.

    Example: scalelong compare runs/none-seed0 runs/cs-seed0 --loss 0.05

    Example: scalelong compare --preset digits-demo --methods none cs:0.7 ls --seeds 0 1 2 --out runs/compare
    """

    runs: RunFolders = ()  # run folders, or folders of run folders
    preset: str = ""  # train this preset with every method and seed first; the same command again resumes
    methods: tuple[str, ...] = ("none", "cs", "ls")  # with --preset; METHOD:KAPPA sets kappa, for example cs:0.5
    seeds: tuple[int, ...] = (0, 1, 2)  # with --preset
    steps: int | None = None  # with --preset; default: the preset's
    out: str = ""  # with --preset: the folder of the runs; default: runs/compare-PRESET
    loss: float | None = None  # the loss to reach; default: the worst final one, which all reach
    metric_value: float | None = None  # the quality to reach; default: the worst last one
    csv: str = ""  # write the table here, and the pairs beside it
    report: str = ""  # write the HTML report here too


def compare(arguments: list[str]) -> None:
    """Train what is missing, then compare."""
    command = tyro.cli(Compare, args=arguments, prog="scalelong compare")
    targets = {"loss": command.loss, "metric-value": command.metric_value}
    for flag, value in targets.items():
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{flag}: must be a finite number, got {value}")
    folders: list[str | Path] = [*command.runs]
    is_first_rank = os.environ.get("RANK", "0") == "0"
    if command.preset:
        from scalelong.stability.sweep import sweep, train_in_turn

        configs = sweep(get_preset(command.preset), command.methods, command.seeds, command.steps)
        out = Path(command.out or f"runs/compare-{command.preset}")
        is_first_rank = train_in_turn(configs, out)
        folders += [out / name for name in configs]
    if not is_first_rank:
        return
    if not folders:
        raise ValueError("runs: none given; name run folders, or pass --preset to train some")
    runs, refused = read_runs(folders)
    comparison = compare_runs(runs)
    if command.metric_value is not None and not comparison.metrics:
        raise ValueError("metric-value: no run has an evaluation; scalelong evaluate RUN adds one")
    races = comparison.races(*targets.values())
    print(tables.summary(comparison, races, refused))
    if command.csv:
        print(f"\ntable    {command.csv}\npairs    {tables.write_csv(comparison, races, Path(command.csv))}")
    if command.report:
        print(f"report   {write_report(runs, command.report, refused, *targets.values())}")


@dataclass(frozen=True)
class Report:
    """Show runs in one HTML file: curves, oscillation, coefficients, samples, and what they say in sentences.

    Example: scalelong report runs/demo/none runs/demo/cs --out report.html
    """

    runs: RunFolders = ()  # run folders, or folders of run folders
    out: str = ""  # default: report.html in the given folder, or in the current one if several are given


def report(arguments: list[str]) -> None:
    """Read runs and write the page."""
    command = tyro.cli(Report, args=arguments, prog="scalelong report")
    runs, refused = read_runs(command.runs)
    for why in refused:
        print(f"left out: {why}", file=sys.stderr)
    default = Path(command.runs[0]) / "report.html" if len(command.runs) == 1 else Path("report.html")
    path = write_report(runs, command.out or default, refused)
    print(f"{len(runs)} run(s): {path} ({path.stat().st_size / 1e6:.1f} MB)")


@dataclass(frozen=True)
class Diagnose:
    """What a run's records say about its stability: which blocks oscillate, whether gradients spike, what to try.

    Example: scalelong diagnose runs/digits-ls
    """

    run: RunFolder  # a run folder, best of a run trained with --probe-every
    json: bool = False  # print the sentences with their numbers as JSON


def diagnose(arguments: list[str]) -> None:
    """Print the diagnosis."""
    from scalelong.stability import diagnosis

    command = tyro.cli(Diagnose, args=arguments, prog="scalelong diagnose")
    found = diagnosis.diagnose(command.run)
    if command.json:
        print(json.dumps([asdict(sentence) for sentence in found], indent=1))
        return
    for sentence in found:
        print(f"{'!' if sentence.alarming else ' '} {sentence.about:10} {sentence.text}")


@dataclass(frozen=True)
class Demo:
    """Train none, rsqrt2, cs and ls from one seed on embedded digits, and compare them: three minutes on two cores.

    Example: scalelong demo --out runs/demo --steps 600
    """

    out: str = "runs/demo"  # folder of the four runs and the pictures; the same command again resumes
    steps: int = 600
    seed: int = 0


def demo(arguments: list[str]) -> None:
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
