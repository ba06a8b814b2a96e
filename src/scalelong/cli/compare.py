"""Compare runs: mean ± sd over seeds, and the steps and seconds that each method needs to a given loss or quality.

Example: scalelong compare runs/none-seed0 runs/cs-seed0 --loss 0.05

Example: scalelong compare --preset digits-demo --methods none cs:0.7 ls --seeds 0 1 2 --out runs/compare
"""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from accelerate import PartialState

from scalelong.cli.arguments import RunFolders
from scalelong.cli.train import oscillation_probe
from scalelong.report import Comparison, compare_runs, read_runs, write_report
from scalelong.report.compare import Race
from scalelong.report.html import Targets
from scalelong.report.notes import notes
from scalelong.report.numbers import number
from scalelong.report.sentences import findings, seeds_words
from scalelong.report.tables import aligned, arrivals_table, measures_table, pairs_table, write_csv
from scalelong.training import RunConfig, Trainer, get_preset
from scalelong.training.checks import check_config


@dataclass(frozen=True)
class Compare:
    """What is on the command line."""

    runs: RunFolders = ()  # folders of runs, or folders that hold runs
    preset: str = ""  # train this preset with every method and seed first; the same command again resumes
    methods: tuple[str, ...] = ("none", "cs", "ls")  # with --preset; METHOD:KAPPA sets kappa, for example cs:0.5
    seeds: tuple[int, ...] = (0, 1, 2)  # with --preset
    steps: int | None = None  # with --preset; default: the preset's
    out: str = ""  # with --preset: the folder of the runs; default: runs/compare-PRESET
    loss: float | None = None  # the loss to reach; default: the worst final one, which all reach
    metric_value: float | None = None  # the quality to reach; default: the worst last one
    csv: str = ""  # write the table here, and the pairs beside it
    report: str = ""  # write the HTML report here too


def main(arguments: list[str]) -> None:
    """Train what is missing, then compare."""
    command = tyro.cli(Compare, args=arguments, prog="scalelong compare", description=__doc__)
    for flag, value in (("loss", command.loss), ("metric-value", command.metric_value)):
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{flag}: must be a finite number, got {value}")
    ranks = PartialState(cpu=not torch.cuda.is_available())  # as the trainer does: the first one decides for all
    trained = _train_missing(command, ranks) if command.preset else []
    folders: list[str | Path] = [*command.runs, *trained]
    if not ranks.is_main_process:
        return
    if not folders:
        raise ValueError("runs: none given; name folders of runs, or say --preset to train some")
    runs, refused = read_runs(folders)
    comparison = compare_runs(runs)
    races = _races(comparison, command)
    print(_text(comparison, races, refused))
    if command.csv:
        print(f"\ntable    {command.csv}\npairs    {write_csv(comparison, races, Path(command.csv))}")
    if command.report:
        targets = Targets(command.loss, command.metric_value)
        print(f"report   {write_report(runs, command.report, refused, targets)}")


def configurations(command: Compare) -> dict[str, RunConfig]:
    """The run of every method and seed, by the name of its folder."""
    preset = get_preset(command.preset)
    steps = preset.training.steps if command.steps is None else command.steps
    configs = {}
    for name in command.methods:
        method, _, kappa = name.partition(":")
        scaling = dataclasses.replace(preset.scaling, method=method)
        if kappa:
            scaling = dataclasses.replace(scaling, kappa=_kappa(name, kappa))
        for seed in command.seeds:
            training = dataclasses.replace(preset.training, steps=steps, seed=seed)
            config = dataclasses.replace(preset, scaling=scaling, training=training)
            configs[f"{name.replace(':', '')}-seed{seed}"] = check_config(config)
    return configs


def _kappa(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"methods: {name!r} has no number after the colon; write for example cs:0.5") from None


def _train_missing(command: Compare, ranks: PartialState) -> list[Path]:
    """One run after the other, so that their seconds compare."""
    out = Path(command.out or f"runs/compare-{command.preset}")
    configs = configurations(command)
    for position, (name, config) in enumerate(configs.items(), 1):
        if ranks.is_main_process:
            print(f"run {position} of {len(configs)}: {name}", file=sys.stderr)
        trainer = Trainer(config, out / name)
        trainer.observers.append(oscillation_probe(trainer, every=config.training.log_every))
        trainer.run()
        if trainer.stopping:
            raise RuntimeError(f"stopped in {name} at step {trainer.step}; the same command again goes on from there")
    return [out / name for name in configs]


def _races(comparison: Comparison, command: Compare) -> list[Race]:
    if command.metric_value is not None and not comparison.metrics:
        raise ValueError("metric-value: no run holds an evaluation; scalelong evaluate RUN adds one")
    metrics = [comparison.metric_race(metric, command.metric_value) for metric in comparison.metrics]
    return [race for race in (comparison.loss_race(command.loss), *metrics) if race is not None]


def _text(comparison: Comparison, races: list[Race], refused: list[str]) -> str:
    parts = [aligned(measures_table(comparison))]
    for race in [race for race in races if len(race.arrivals) > 1]:
        why = race.protocol if race.asked else f"{race.protocol}; the worst that any run ends with"
        parts.append(f"To reach {race.what} {number(race.target)} ({why}):")
        parts += [aligned(arrivals_table(race)), aligned(pairs_table(race))]
    told = [text for _, text in findings(comparison, races[0] if races else None)]
    parts.append("\n".join([*told, seeds_words(comparison), *notes(comparison, refused)]))
    return "\n\n".join(parts)
