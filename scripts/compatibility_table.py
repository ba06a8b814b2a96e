"""Run every model in every situation and write the table into docs/compatibility.md.

python scripts/compatibility_table.py            # write, about ten minutes
python scripts/compatibility_table.py --check    # fail if a cell is not as the page says, or the page has other rows
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from pathlib import Path

import torch
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.compatibility import SITUATIONS, Subject, limits, subjects  # noqa: E402

PAGE = ROOT / "docs" / "compatibility.md"
START, END = "<!-- table: begin -->", "<!-- table: end -->"


def cell(subject: Subject, situation: str, notes: list[str]) -> str:
    """yes, or the number of a note."""
    limit = limits().get((subject.name, situation))
    try:
        SITUATIONS[situation](subject)
    except Exception as error:
        if limit is None or not re.search(limit.error, str(error)):
            raise
        if limit.reason not in notes:
            notes.append(limit.reason)
        return f"[{notes.index(limit.reason) + 1}]"
    if limit is not None:
        raise AssertionError(f"{subject.name}, {situation}: works, but a limit is listed")
    return "yes"


def table() -> str:
    notes: list[str] = []
    lines = [f"| model | {' | '.join(SITUATIONS)} |", f"|---|{'---|' * len(SITUATIONS)}"]
    for subject in tqdm(subjects().values(), unit="model", disable=None):
        cells = [cell(subject, situation, notes) for situation in SITUATIONS]
        lines.append(f"| {subject.name} | {' | '.join(cells)} |")
    numbered = [f"[{number}] {note}.  " for number, note in enumerate(notes, start=1)]
    return "\n".join([*lines, "", *numbered])


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    page = PAGE.read_text()
    before, rest = page.split(START)
    _, after = rest.split(END)
    new = f"{before}{START}\n{table()}\n{END}{after}"
    if "--check" in sys.argv and new != page:
        sys.exit(f"{PAGE.name} is out of date: run python scripts/compatibility_table.py")
    PAGE.write_text(new)


if __name__ == "__main__":
    main()
