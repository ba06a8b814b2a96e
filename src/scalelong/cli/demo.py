"""`scalelong demo`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from scalelong.report import compare_runs, read_run, tables, write_report
from scalelong.report.compare import Comparison
from scalelong.report.numbers import joined, number, with_sd
from scalelong.runs.presets import get_preset

METHODS = ("none", "cs", "ls")
LEVEL = 0.03  # smaller relative differences in loss count as equal
MORE = 1.5  # larger ratios of gradients count as different
MOVED = 0.05  # gates closer to 1/2 count as unchanged


@dataclass(frozen=True)
class Demo:
    """Train none, cs and ls with three seeds on digits and summarize what holds for every seed; about three minutes.

    Example: scalelong demo --out runs/demo
    """

    out: str = "runs/demo"  # output folder; run again to resume
    steps: int = 300
    seeds: tuple[int, ...] = (0, 1, 2)


def main(arguments: list[str]) -> None:
    """Train, tabulate, plot."""
    command = tyro.cli(Demo, args=arguments, prog="scalelong demo")
    from scalelong.data import load_source
    from scalelong.lab.mechanism import start_ratio
    from scalelong.report.plots import image_rows, plot_seeds
    from scalelong.stability.sweep import sweep, train_in_parallel
    from scalelong.training import load_run

    out, started, preset = Path(command.out), time.perf_counter(), get_preset("digits-demo")
    training = replace(preset.training, log_every=10, checkpoint_every=command.steps, sample_every=command.steps)
    optimizer = replace(preset.optimizer, lr=1e-3)  # lower than the preset's: less variation over seeds
    configs = sweep(replace(preset, training=training, optimizer=optimizer), METHODS, command.seeds, command.steps)
    ratios: dict[str, list[float]] = {}  # by method, a number for each seed
    for config in configs.values():
        ratios.setdefault(config.scaling.method, []).append(start_ratio(config))
    train_in_parallel(configs, out)
    runs = [read_run(out / name) for name in configs]
    comparison = compare_runs(runs)
    plot_seeds(comparison, out / "comparison.png")
    rows = {"real": load_source(preset.data.name).read_many(range(10))}
    for group in comparison.groups:
        trained = load_run(group.runs[0].folder)
        rows[group.label] = trained.sample(replace(trained.config.sampling, count=10), seed=1, progress=False)
    image_rows({label: list(images[:, 0].numpy()) for label, images in rows.items()}, out / "samples.png")
    about = f"{len(runs)} U-ViTs of 12 blocks, {command.steps} steps on 1,797 real digits"
    print(f"\n{about}; mean ± sd over seeds {', '.join(map(str, command.seeds))}:\n")
    print(tables.aligned(_table(comparison, ratios)))
    print("\n" + "\n".join(statements(comparison, ratios)))
    print(f"\nsamples  {out / 'samples.png'}\ncurves   {out / 'comparison.png'}")
    print(f"report   {write_report(runs, out / 'report.html')}\nruns     {out}/<method>-seed<n>")
    print(f"total    {time.perf_counter() - started:.0f} s")


def _table(comparison: Comparison, ratios: Mapping[str, Sequence[float]]) -> tables.Rows:
    rows = [["method", "final loss", "gradient at the start, middle / last block", "kappa, outermost to innermost"]]
    for group in comparison.groups:
        own, kappas = ratios[group.method], group.coefficients()
        loss = with_sd(comparison.measure(group, "final_loss"))
        start = f"{number(min(own), 2)} to {number(max(own), 2)}"
        rows.append([group.label, loss, start, f"{kappas[0]:.2f} .. {kappas[-1]:.2f}"])
    return rows


def statements(comparison: Comparison, ratios: Mapping[str, Sequence[float]]) -> list[str]:
    """Statements that hold for every seed; `ratios`: of the gradients at the start, by method."""
    found, base, others = [], comparison.baseline, comparison.others
    larger = [
        group.label
        for group in others
        if all(mine >= MORE * theirs for mine, theirs in zip(ratios[group.method], ratios[base.method], strict=True))
    ]
    if larger:
        found.append(
            f"- {joined(larger)}: at the start, the middle block gets at least {MORE:g} times its unscaled share of the "
            "gradient, in every seed."
        )
    losses = [
        list(zip(*(comparison.per_seed(g, "final_loss") for g in (group, base)), strict=True)) for group in others
    ]
    if all(abs(mine / theirs - 1) < LEVEL for pairs in losses for mine, theirs in pairs):
        found.append(
            f"- the losses are on par: every scaled run ends within {LEVEL:.0%} of the unscaled run with the same seed. "
            "Training this short shows neither gain nor harm; see docs/should-i-use-it.md for longer runs."
        )
    gates = [kappa for group in others if group.method == "ls" for run in group.runs for kappa in run.coefficients()]
    if gates and all(abs(kappa - 0.5) < MOVED for kappa in gates):
        found.append(
            f"- ls: the gates have hardly moved; every mean coefficient is within {MOVED:g} of its initial 1/2."
        )
    return found
