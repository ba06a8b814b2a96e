"""Generate docs/experiments.md: question, settings, main numbers, seeds, verdict, cost, command and figure per experiment.

python scripts/experiments_page.py            # write it from experiments/*/settings.yaml and experiments/results
python scripts/experiments_page.py --check    # fail if it is out of date
"""

from __future__ import annotations

import csv
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from claims_table import _seeds, command
from figures_table import DOCS, RESULTS, ROOT, copy, fill

sys.path.insert(0, str(ROOT / "experiments"))
from settings import Experiment, load, names, scales

PAGE = DOCS / "experiments.md"
PICTURES = {
    "auto-kappa-cpu": "figures/auto-kappa.png",
    "study": "study.png",
    "cifar10-uvit-s2-batch64": "cifar10-batch64-none.png",
}


def results_of(name: str) -> list[Path]:
    """The result folders of an experiment: one per scale that was run, or those written by its own program."""
    known = [RESULTS / f"{name}-{scale}" for scale in scales(name)] or sorted(RESULTS.glob(f"{name}*"))
    return [folder for folder in known if any(folder.glob("*"))]


def table() -> str:
    """One row per experiment and scale."""
    lines = ["| experiment | question | seeds | verdict | minutes |", "|---|---|---|---|---|"]
    for name in names():
        found = results_of(name)
        rows = [(folder.name, _count(folder), _verdict(folder, load(name).page), _minutes(folder)) for folder in found]
        for shown, seeds, verdict, minutes in rows or [(name, "", "not run yet", "")]:
            cells = (f"[{shown}](#{name})", load(name).question, seeds, verdict, minutes)
            lines.append(f"| {' | '.join(_escaped(cell) for cell in cells)} |")
    return "\n".join(lines)


def gallery() -> str:
    """One section per experiment."""
    return "\n\n".join("\n".join(section(load(name))) for name in names())


def section(experiment: Experiment) -> Iterator[str]:
    yield f"## {experiment.name}"
    yield ""
    where = f" [Discussion]({experiment.page})." if experiment.page else ""
    yield _escaped(experiment.question) + where
    yield ""
    at_scale = [load(experiment.name, scale) for scale in scales(experiment.name) or [""]]
    commands = [each.command or command(f"{each.name}-{each.scale}") for each in at_scale]
    wrapped = (textwrap.wrap(line, 100, break_long_words=False, break_on_hyphens=False) for line in commands)
    yield from ["```bash", *(" \\\n    ".join(lines) for lines in wrapped), "```"]
    for folder in results_of(experiment.name):
        yield ""
        yield f"**{folder.name}**: {_escaped(_setting(folder))}"
        if numbers := _numbers(experiment, folder):
            yield from ["", _escaped(numbers)]
        picture, own = PICTURES.get(folder.name, f"figures/{folder.name}.png"), list(folder.glob("*.png"))
        if own and folder.name not in PICTURES:
            copy(own[0], DOCS / "assets" / picture)
        if own or folder.name in PICTURES:
            yield from ["", f"![{folder.name}](assets/{picture}){{ width=480 loading=lazy }}"]


def _summary(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def _pieces(folder: Path) -> list[dict[str, Any]]:
    """The pieces of the study."""
    path = folder / "meta.json"
    return list(json.loads(path.read_text())["pieces"].values()) if path.is_file() else []


def _setting(folder: Path) -> str:
    if pieces := _pieces(folder):
        steps = max(piece["settings"]["steps"] for piece in pieces)
        return f"small U-ViTs on CIFAR-10, up to {steps:,} steps; {pieces[0]['device']}, commits in `meta.json`."
    if not (summary := _summary(folder)):
        return f"files in `experiments/results/{folder.name}`."
    words = ", ".join(f"{key} {value}" for key, value in summary.get("settings", {}).items() if key != "seeds")
    return f"{summary.get('setting') or words}; {summary['device']}, commit {summary['commit']}."


def _numbers(experiment: Experiment, folder: Path) -> str:
    """The measurement of the first claim or, without claims, the first measure of every run."""
    if claims := _summary(folder).get("claims"):
        return f"{claims[0]['measured'][0].upper()}{claims[0]['measured'][1:]}."
    path = folder / "runs.csv"
    rows = list(csv.DictReader(path.open())) if path.is_file() else []
    measure = next((each for each in experiment.measures if rows and each in rows[0]), "")
    found: dict[str, list[float]] = {}
    for row in rows if measure else ():
        found.setdefault(next(iter(row.values())), []).append(float(row[measure]))
    said = "; ".join(f"{run}: {fmean(each):.5f} ± {stdev(each):.5f}" for run, each in found.items() if len(each) > 1)
    return f"{measure.replace('_', ' ').capitalize()} of {said}." if said else ""


def _count(folder: Path) -> str:
    if pieces := _pieces(folder):
        return str(len({run["seed"] for piece in pieces for run in piece["settings"]["runs"]}))
    return _seeds(folder)


def _verdict(folder: Path, page: str) -> str:
    if not (folder / "summary.json").is_file():
        return f"[discussion]({page})"
    claims = [claim["agrees"] for claim in _summary(folder).get("claims", ())]
    if not claims:
        return "not a claim of the paper"
    if None in claims:
        return "inconclusive: one seed"
    return f"{sum(claims)} of {len(claims)} statements agree"


def _minutes(folder: Path) -> str:
    """Total minutes of all runs."""
    if pieces := _pieces(folder):
        return f"{sum(piece['minutes'] for piece in pieces):.0f}"
    path = folder / "runs.csv"
    rows = list(csv.DictReader(path.open())) if path.is_file() else []
    seconds = sum(float(row.get("seconds", 0)) for row in rows) or _summary(folder).get("seconds", 0)
    return f"{seconds / 60:.0f}" if seconds else ""


def _escaped(text: str) -> str:
    return text.replace("|", "&#124;")


def main() -> None:
    fill(PAGE, "table", table())
    fill(PAGE, "gallery", gallery())


if __name__ == "__main__":
    main()
