"""Check the paper's lemma and theorems by numbers: a table, one picture per statement, JSON and CSV.

Example: scalelong theory --out runs/theory
"""

from __future__ import annotations

import csv
import json
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from scalelong.lab import Finding, Study, verify_theory
from scalelong.lab.pictures import draw

COLUMNS = {"statement": 32, "prediction": 30, "measurement": 52, "verdict": 40}


@dataclass(frozen=True)
class Theory:
    """What is on the command line."""

    out: str = "runs/theory"  # folder of the pictures, theory.json, theory.csv and theory.md
    quick: bool = False  # small networks and few of them: a look in seconds, too coarse to quote
    seed: int = 0


def main(arguments: list[str]) -> None:
    """Verify, tabulate, draw."""
    command = tyro.cli(Theory, args=arguments, prog="scalelong theory", description=__doc__)
    out = Path(command.out)
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    studies = verify_theory(command.quick, command.seed)
    findings = [finding for study in studies for finding in study.findings]
    write(studies, findings, out)
    print(text_table(findings))
    for study in studies:
        print(f"picture  {draw(study, out)}")
    print(f"numbers  {out / 'theory.json'}, {out / 'theory.csv'}, {out / 'theory.md'}")
    print(f"in all   {time.perf_counter() - started:.0f} s")


def text_table(findings: Sequence[Finding]) -> str:
    """The rows with wrapped cells."""
    rule = "  ".join("-" * width for width in COLUMNS.values())
    lines = ["  ".join(name.ljust(width) for name, width in COLUMNS.items()), rule]
    for finding in findings:
        cells = [textwrap.wrap(asdict(finding)[name], width) for name, width in COLUMNS.items()]
        for row in range(max(map(len, cells))):
            parts = (
                (cell[row] if row < len(cell) else "").ljust(width)
                for cell, width in zip(cells, COLUMNS.values(), strict=True)
            )
            lines.append("  ".join(parts).rstrip())
        lines.append(rule)
    return "\n".join(lines)


def markdown_table(findings: Sequence[Finding]) -> str:
    """The rows for a page; bars are escaped, so that ||x|| stays in its cell."""

    def row(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', '&#124;').replace('*', '&#42;') for cell in cells)} |"

    head = [row(list(COLUMNS)), row(["---"] * len(COLUMNS))]
    return "\n".join(head + [row([asdict(finding)[name] for name in COLUMNS]) for finding in findings]) + "\n"


def write(studies: Sequence[Study], findings: Sequence[Finding], out: Path) -> None:
    """theory.json holds everything, theory.csv and theory.md the table."""
    everything = [
        {"name": study.name, "findings": [asdict(finding) for finding in study.findings], "data": study.data}
        for study in studies
    ]
    (out / "theory.json").write_text(json.dumps(everything, indent=1) + "\n")
    (out / "theory.md").write_text(markdown_table(findings))
    with (out / "theory.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(COLUMNS))
        writer.writeheader()
        writer.writerows(asdict(finding) for finding in findings)
