"""Measures of trained runs, their means over seeds, and the verdicts on the paper's claims."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from output import Claim, by_run
from settings import FIXED_SEED

from scalelong.backbones import as_network
from scalelong.cli.main import main as cli
from scalelong.data import load_source, to_float
from scalelong.diffusion import draw_time_and_noise
from scalelong.errors import SettingError
from scalelong.files import write_text
from scalelong.runs.reader import Run, read_run
from scalelong.training import load_run

FIXED_COUNT, CHUNK = 2048, 256
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def value_of(each: Run, measure: str, evaluate: Mapping[str, str]) -> float:
    """A measure of a run; those that need its network are kept beside the run, so that they are computed once."""
    from_records: dict[str, Callable[[], float]] = {
        "oscillation_all_blocks": lambda: fmean(each.oscillation(block) for block in each.blocks),
        "oscillation_middle": each.oscillation,
        "gradient_oscillation": lambda: fmean(each.oscillation(block, what="gradient") for block in each.blocks),
        "gradient_norm_spread": each.gradient_spread,
        "final_loss": each.final_loss,
    }
    if measure in from_records:
        return from_records[measure]()
    file, key = each.folder / "measured.json", evaluate.get(measure, measure)
    kept = json.loads(file.read_text()) if file.is_file() else {}
    if key not in kept:
        if measure in evaluate:
            if cli(["evaluate", str(each.folder), *shlex.split(key)]):
                raise SettingError(f"{each.folder}: could not be evaluated with {key}")
            kept[key] = read_run(each.folder).evaluations[-1].value
        else:
            kept[key] = fixed_loss(each.folder, "test" if measure == "test_loss" else each.config.data.split)
        write_text(file, json.dumps(kept, indent=1) + "\n")
    return float(kept[key])


@torch.no_grad()
def fixed_loss(folder: Path, split: str) -> float:
    """The loss of the averaged weights on images, times and noises that are the same for every run."""
    trained = load_run(folder, device=DEVICE)
    data = trained.config.data
    source, net = (
        load_source(data.name, image_size=data.image_size, split=split, root=data.root),
        as_network(trained.model),
    )
    losses = []
    for index in torch.arange(FIXED_COUNT).split(CHUNK):
        images = to_float(source.read_many((index % len(source)).tolist())).to(DEVICE)
        t, noise = draw_time_and_noise(trained.objective.process, FIXED_SEED, index.to(DEVICE), trained.shape)
        losses.append(trained.objective.loss(net, images, noise, t))
    return float(torch.cat(losses).mean())


def mean_and_sd(values: Sequence[float]) -> str:
    """One seed has no spread."""
    return f"{fmean(values):.5g}" + (f" ± {stdev(values):.2g}" if len(values) > 1 else "")


def averages(rows: Sequence[Mapping[str, Any]], measures: Sequence[str]) -> list[dict[str, Any]]:
    """Mean ± sd over seeds, and of the differences from the first run of the same seed, which saw the same images."""
    table = []
    for measure in measures:
        found = by_run(rows, measure)
        first = next(iter(found))
        for name, values in found.items():
            apart = [value - base for value, base in zip(values, found[first], strict=True)]
            table.append(
                {"measure": measure, "run": name, "mean": mean_and_sd(values), f"minus {first}": mean_and_sd(apart)}
            )
    return table


def judged(rows: Sequence[Mapping[str, Any]], claim: Mapping[str, Any], measure: str) -> Claim:
    """Whether some runs have a lower value than others, in every seed or on average; one seed decides nothing."""
    found, said, agrees = by_run(rows, measure), [], True
    for name, base in itertools.product(claim["lower"], claim["than"]):
        wins = [value < other for value, other in zip(found[name], found[base], strict=True)]
        said.append(f"{name} below {base} in {sum(wins)} of {len(wins)} seeds")
        agrees &= fmean(found[name]) < fmean(found[base]) if claim.get("by") == "mean" else all(wins)
    values = ", ".join(f"{name} {fmean(each):.5g}" for name, each in found.items())
    text = f"{measure.replace('_', ' ')}: {values}; {', '.join(said)}"
    return Claim(claim["paper"], text, agrees if len(wins) > 1 else None)
