"""The paper's lemma and theorems, checked numerically on the network they are about (the matrix UNet of Eq. 3), and what
scaling is on a U-ViT (`mechanism`).

One module per statement, each with `study(quick, seed)`, which measures and judges, and `figure(data)`, which plots.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import multiprocessing
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from scalelong.files import write_text
from scalelong.lab.matrix_unet import METHODS
from scalelong.progress import Progress
from scalelong.report.colours import colour
from scalelong.report.plots import save_figure

__all__ = ["STUDIES", "Finding", "Study", "as_text", "draw", "run_study", "verdicts", "verify_theory", "write"]

STUDIES = ("lemma32", "theorem31", "theorem33", "theorem34", "mechanism")
METHOD_COLOURS = {method: colour(method) for method in METHODS}


@dataclass(frozen=True)
class Finding:
    """One row of the table: a statement, what it predicts, what was measured, and whether they agree."""

    statement: str
    prediction: str
    measurement: str
    verdict: str


@dataclass(frozen=True)
class Study:
    """All findings about one statement of the paper; `data` is what its figure plots."""

    name: str
    findings: tuple[Finding, ...]
    data: Mapping[str, Any]


COLUMNS = [field.name for field in fields(Finding)]


def judge(statement: str, prediction: str, measurement: str, supported: bool, verdict: str = "holds") -> Finding:
    """A finding with this verdict if the measurement supports it; otherwise the row says that it does not."""
    return Finding(statement, prediction, measurement, verdict if supported else "contradicted by this measurement")


def run_study(name: str, quick: bool = False, seed: int = 0) -> Study:
    """Measure and judge one of STUDIES.

    >>> [finding.verdict for finding in run_study("lemma32", quick=True).findings][:2]
    ['holds', 'holds']
    """
    study: Study = importlib.import_module(f"scalelong.lab.{name}").study(quick, seed)
    return study


def verify_theory(quick: bool = False, seed: int = 0) -> list[Study]:
    """Run every study, one process per core; the numbers do not depend on the number of cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(STUDIES), cores), context, torch.set_num_threads, (1,)) as pool:
        longest_first = ("mechanism", "theorem31", "theorem34", "theorem33", "lemma32")
        futures = {name: pool.submit(run_study, name, quick, seed) for name in longest_first}
        with Progress(total=len(futures), desc="theory", unit="study") as bar:
            while len(done := wait(futures.values(), timeout=1.0).done) < len(futures):
                bar.update(len(done) - bar.n)
                bar.refresh()
            bar.update(len(done) - bar.n)
        return [futures[name].result() for name in STUDIES]


def verdicts(studies: Sequence[Study]) -> str:
    """One line for each study: whether it holds, and how many of its findings say so.

    >>> print(verdicts([Study("lemma32", (judge("a", "b", "c", supported=True),), {})]))
    Lemma 3.2    holds (1 of 1 findings hold)
    """
    lines = []
    for study in studies:
        found = [finding.verdict for finding in study.findings]
        held, printed = (sum(verdict.startswith(kind) for verdict in found) for kind in ("holds", "fails as printed"))
        word = "holds" if held == len(found) else "holds with corrections" if held else "fails as printed"
        word = word if held + printed == len(found) else "contradicted by a measurement"
        failed = f", {printed} fail as printed" if printed else ""
        title = re.sub(r"(\d)(\d)$", r" \1.\2", study.name).capitalize()  # lemma32: Lemma 3.2
        lines.append(title.ljust(13) + f"{word} ({held} of {len(found)} findings hold{failed})")
    return "\n".join(lines)


def as_text(findings: Sequence[Finding], width: int = 100) -> str:
    """The findings, one paragraph each."""
    lines: list[str] = []
    for finding in findings:
        lines += ["", *textwrap.wrap(finding.statement, width)]
        for key in ("prediction", "measurement", "verdict"):
            indent = f"  {key.ljust(13)}"
            lines += textwrap.wrap(getattr(finding, key), width, initial_indent=indent, subsequent_indent=" " * 15)
    return "\n".join(lines[1:])


def markdown_table(findings: Sequence[Finding]) -> str:
    """The findings as a Markdown table; bars are escaped, so that ||x|| stays in its cell."""

    def row(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', '&#124;').replace('*', '&#42;') for cell in cells)} |"

    rows = [COLUMNS, ["---"] * len(COLUMNS), *map(astuple, findings)]
    return "".join(row(cells) + "\n" for cells in rows)


def write(studies: Sequence[Study], folder: Path) -> list[Path]:
    """Write theory.json (all numbers), theory.csv and theory.md (the table)."""
    findings = [finding for study in studies for finding in study.findings]
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([COLUMNS, *map(astuple, findings)])
    numbers = json.dumps([asdict(study) for study in studies], indent=1) + "\n"
    texts = {"theory.json": numbers, "theory.csv": table.getvalue(), "theory.md": markdown_table(findings)}
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def draw(study: Study, folder: Path) -> Path:
    """Write the figure of a study and return its path."""
    figure: Figure = importlib.import_module(f"scalelong.lab.{study.name}").figure(study.data)
    return save_figure(figure, folder / f"{study.name}.png", dpi=90)
