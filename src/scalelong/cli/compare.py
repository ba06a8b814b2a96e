"""`scalelong compare`. Torch is imported only to train."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import tyro

from scalelong.cli.arguments import RunFolders
from scalelong.errors import require
from scalelong.report import compare_runs, read_runs, tables, write_report
from scalelong.runs.presets import get_preset


@dataclass(frozen=True)
class Compare:
    """Compare runs: mean ± sd over seeds, and steps and seconds to reach a given loss or quality.

    Example: scalelong compare runs/none-seed0 runs/cs-seed0 --loss 0.05

    Example: scalelong compare --preset digits-demo --methods none cs:0.7 ls --seeds 0 1 2 --out runs/compare
    """

    runs: RunFolders = ()  # run folders, folders of run folders, or files of an OscillationProbe
    preset: str = ""  # first train this preset with every method and seed; run again to resume
    methods: tuple[str, ...] = ("none", "cs", "ls")  # with --preset; METHOD:KAPPA sets kappa, for example cs:0.5
    seeds: tuple[int, ...] = (0, 1, 2)  # with --preset
    steps: int | None = None  # with --preset; default: the preset's
    out: str = ""  # with --preset: the folder of the runs; default: runs/compare-PRESET
    loss: float | None = None  # target loss; default: the worst final loss, which all reach
    metric_value: float | None = None  # target quality; default: the worst final one
    csv: str = ""  # write the table to this file, and the pairs next to it
    report: str = ""  # also write an HTML report to this file


def main(arguments: list[str]) -> None:
    """Train missing runs, then compare."""
    command = tyro.cli(Compare, args=arguments, prog="scalelong compare")
    targets = {"loss": command.loss, "metric-value": command.metric_value}
    for flag, value in targets.items():
        require(value is None or math.isfinite(value), flag, "a finite number", value)
    folders: list[str | Path] = [*command.runs]
    if command.preset:
        from scalelong.stability.sweep import sweep, train_in_turn

        configs = sweep(get_preset(command.preset), command.methods, command.seeds, command.steps)
        out = Path(command.out or f"runs/compare-{command.preset}")
        train_in_turn(configs, out)
        folders += [out / name for name in configs]
    if os.environ.get("RANK", "0") != "0":
        return  # under torchrun the first rank compares
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
