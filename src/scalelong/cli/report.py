"""`scalelong report`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from scalelong.cli.arguments import RunFolders
from scalelong.report import read_runs, write_report


@dataclass(frozen=True)
class Report:
    """Write an HTML report of runs: curves, oscillation, coefficients, samples and a text summary.

    Example: scalelong report runs/demo/none-seed0 runs/demo/cs-seed0 --out report.html
    """

    runs: RunFolders = ()  # run folders, folders of run folders, or files of an OscillationProbe
    out: str = ""  # default: report.html in the given folder, or in the current folder for several or a file


def main(arguments: list[str]) -> None:
    """Read runs and write the page."""
    command = tyro.cli(Report, args=arguments, prog="scalelong report")
    runs, refused = read_runs(command.runs)
    for why in refused:
        print(f"left out: {why}", file=sys.stderr)
    home = Path(command.runs[0])
    default = home / "report.html" if len(command.runs) == 1 and home.is_dir() else Path("report.html")
    path = write_report(runs, command.out or default, refused)
    print(f"{len(runs)} run(s): {path} ({path.stat().st_size / 1e6:.1f} MB)")
