"""Test loss and linear probes of every run; an untrained network of every seed and the raw pixels as floors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from measures import DEVICE, value_of
from output import Outcome, by_run, write_csv
from probes import draw, labelled
from settings import Experiment
from tqdm import tqdm

from scalelong.data import load_source
from scalelong.evaluation import linear_probe
from scalelong.evaluation.linear_probe import LinearProbe
from scalelong.runs.reader import Run
from scalelong.skips.feature_conditioning import is_conditioned
from scalelong.training import load_run
from scalelong.training.build import build_model

FLOORS = {"untrained": "random_network", "pixels": "pixels"}


def measure(experiment: Experiment, runs: Mapping[str, Sequence[Run]], out: Path) -> Outcome:
    torch.set_num_threads(1)
    jobs = [(name, each) for name, own in runs.items() for each in own]
    rows, probes = [], {name: [] for name in runs}
    for name, each in tqdm(jobs, desc="probes", disable=None):
        probe, gate = probed(each, experiment.options, floors=name == next(iter(runs)), pixels=not rows)
        probes[name].append(probe)
        rows.append(
            {
                "run": name,
                "seed": each.seed,
                "test_loss": value_of(each, "test_loss", {}),
                "probe": probe.accuracy,
                "block": probe.block,
                "noise": probe.level,
                "gate": gate,
                **{column: getattr(probe, key) or "" for column, key in FLOORS.items()},
                "seconds": each.column("train", "seconds")[1][-1],
            }
        )
    write_csv(rows, out / "runs.csv")
    draw(probes, experiment.setting, out / "heat_maps.png")
    o = experiment.options
    sizes = (
        f"probes on {o['train']:,} training and {o['test']:,} test images, chosen on {o['images'] // 5:,} held-out ones"
    )
    return Outcome([], f"{experiment.setting}; {sizes}", {"table": averages(rows, experiment.runs)})


def probed(run: Run, options: Mapping[str, Any], floors: bool, pixels: bool) -> tuple[LinearProbe, float | str]:
    """The probe of the averaged weights on the first images of either split, and the gate of conditioned runs."""
    trained = load_run(run.folder, device=DEVICE)
    config, data = trained.config, trained.config.data
    load = partial(load_source, data.name, image_size=data.image_size, root=data.root)
    train, test = (labelled(load(split=split), options[split]) for split in ("train", "test"))
    untrained = None
    if floors:
        other = replace(config, training=replace(config.training, seed=config.training.seed + 1))
        untrained = build_model(other, trained.shape, trained.conditioning).to(DEVICE)
    gate = float(trained.model.feature_conditioning.gate) if is_conditioned(trained.model) else ""
    probe = linear_probe(
        trained.model, train, test, process=trained.objective.process, levels=options["levels"],
        images=options["images"], random_network=untrained, pixels=pixels, cache=run.folder / "features",
    )  # fmt: skip
    return probe, gate


def averages(rows: Sequence[Mapping[str, Any]], runs: Iterable[str]) -> list[dict[str, Any]]:
    """Mean ± sd over seeds, also of the differences from the first run and from the plain run of the same seed."""
    table, first = [], rows[0]["run"]
    for name in runs:
        cells: dict[str, Any] = {"run": name}
        for measure, shown in (("test_loss", loss), ("probe", percent)):
            found = by_run(rows, measure)
            cells[measure] = shown(found[name])
            for base in (first, "plain"):
                other = name.removesuffix(", conditioned") if base == "plain" else base
                apart = [value - start for value, start in zip(found[name], found[other], strict=True)]
                cells[f"{measure} minus {base}"] = shown(apart, "+") if name != other else ""
        own = [row for row in rows if row["run"] == name]
        cells["gate"] = ", ".join(f"{row['gate']:.2f}" for row in own if row["gate"] != "")
        cells["chosen"] = "; ".join(f"{row['block']} at {row['noise']:.2g}" for row in own)
        table.append(cells)
    for floor in FLOORS:
        values = [row[floor] for row in rows if row[floor] != ""]
        table.append(dict.fromkeys(table[0], "") | {"run": floor, "probe": percent(values)})
    return table


def loss(values: Sequence[float], sign: str = "") -> str:
    return f"{fmean(values):{sign}.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")


def percent(values: Sequence[float], sign: str = "") -> str:
    return f"{100 * fmean(values):{sign}.1f}" + (f" ± {100 * stdev(values):.1f}" if len(values) > 1 else "")
