"""`scalelong theory`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from scalelong.files import check_writable


@dataclass(frozen=True)
class Theory:
    """Check the paper's lemma and theorems numerically: findings, one figure per statement, JSON and CSV.

    Example: scalelong theory --out runs/theory
    """

    out: str = "runs/theory"  # folder of the figures, theory.json, theory.csv and theory.md
    quick: bool = False  # fewer, smaller networks: takes seconds, too coarse to quote
    seed: int = 0


def main(arguments: list[str]) -> None:
    """Verify, print, plot."""
    command = tyro.cli(Theory, args=arguments, prog="scalelong theory")
    from scalelong.lab import as_text, draw, verdicts, verify_theory, write

    out, started = Path(command.out), time.perf_counter()
    check_writable(out)
    studies = verify_theory(command.quick, command.seed)
    out.mkdir(parents=True, exist_ok=True)
    files = write(studies, out)
    print(verdicts(studies), end="\n\n")
    print(as_text([finding for study in studies for finding in study.findings]))
    for study in studies:
        print(f"picture  {draw(study, out)}")
    print(f"numbers  {', '.join(map(str, files))}\ntotal    {time.perf_counter() - started:.0f} s")
