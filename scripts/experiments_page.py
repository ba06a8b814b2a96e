"""docs/experiments.md: every experiment with its question, settings, seeds, verdict, command and picture.

python scripts/experiments_page.py            # writes it from experiments/ and experiments/results
python scripts/experiments_page.py --check    # fails if it is not current
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

from claims_table import _seeds
from figures_table import DOCS, RESULTS, ROOT, fill

EXPERIMENTS = ROOT / "experiments"
PAGE = DOCS / "experiments.md"
DISCUSSED = {  # page of the numbers, by the beginning of the folder's name
    **dict.fromkeys(("fig", "table"), "figures.md"),
    "study": "should-i-use-it.md#the-long-runs",
    "auto-kappa": "should-i-use-it.md#which-kappa",
    "after-norm": "use.md#behind-the-norms",
    "conditional": "reproduce.md#classes-of-cifar-10",
    "text-to-emoji": "reproduce.md#emoji-from-captions-that-were-never-trained-on",
    "cifar10-uvit-s2-batch64": "reproduce.md#unscaled-and-cs-on-cifar-10",
}
LIBRARY = (
    "auto_rules",
    "common",
    "ensemble",
    "half_precision",
    "output",
    "probe_loss",
    "text_image_probe",
    "trained_models",
)


def question(file: Path) -> str:
    """The first sentence of an experiment's docstring."""
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return re.split(r"(?<!Fig\.)(?<=[.?])\s", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0]


def results_table() -> str:
    lines = ["| experiment | question | settings | seeds | verdict | command |", "|---|---|---|---|---|---|"]
    lines += [_study_row()]
    for folder in sorted(RESULTS.glob("*/summary.json")):
        lines.append(_row(folder.parent, json.loads(folder.read_text())))
    return "\n".join(lines)


def _study_row() -> str:
    pieces = json.loads((RESULTS / "study" / "meta.json").read_text())["pieces"]
    seeds = {run["seed"] for piece in pieces.values() for run in piece["settings"]["runs"]}
    cells = (
        _name("study", "study.png"),
        "When does scaling help?",
        f"small U-ViTs on CIFAR-10, up to {max(piece['settings']['steps'] for piece in pieces.values()):,} steps; "
        f"{next(iter(pieces.values()))['device']}, commits in `meta.json`",
        str(len(seeds)),
        "[by length of training](should-i-use-it.md)",
        "`python experiments/study/piece.py`",
    )
    return f"| {' | '.join(cells)} |"


def _row(folder: Path, summary: dict[str, Any]) -> str:
    file = EXPERIMENTS / Path(summary["command"].split()[1]).name
    setting = summary.get("setting") or ", ".join(f"{k} {v}" for k, v in summary["settings"].items() if k != "seeds")
    cells = (
        _name(folder.name, f"figures/{folder.name}.png"),
        question(file),
        f"{setting}; {_device(summary)}",
        _seeds(folder),
        _verdict(summary),
        f"`{summary['command']}`",
    )
    return "| " + " | ".join(cell.replace("|", "&#124;") for cell in cells) + " |"


def _name(name: str, picture: str) -> str:
    """The name with a link to its page and, where the docs have it, its picture."""
    page = next((page for start, page in DISCUSSED.items() if name.startswith(start)), "")
    text = f"[{name}]({page})" if page else name
    picture = {"figures/auto-kappa-cpu.png": "figures/auto-kappa.png"}.get(picture, picture)
    there = (DOCS / "assets" / picture).is_file()
    return text + (f"<br>![{name}](assets/{picture}){{ width=200 loading=lazy }}" if there else "")


def _device(summary: dict[str, Any]) -> str:
    return f"{summary['device']}, commit {summary['commit']}"


def _verdict(summary: dict[str, Any]) -> str:
    claims = [claim["agrees"] for claim in summary.get("claims", ())]
    if not claims:
        return "no claim of the paper"
    if None in claims:
        return "not decided: one seed"
    return f"{sum(claims)} of {len(claims)} statements agree"


def waiting_table() -> str:
    """Experiments that have no results in the repository yet."""
    done = {Path(json.loads(path.read_text())["command"].split()[1]).stem for path in RESULTS.glob("*/summary.json")}
    files = [file for file in sorted(EXPERIMENTS.glob("*.py")) if file.stem not in {*done, *LIBRARY}]
    lines = ["| experiment | question | command |", "|---|---|---|"]
    lines += [f"| {f.stem} | {question(f)} | `python experiments/{f.name}` |" for f in files]
    return "\n".join(lines)


def main() -> None:
    fill(PAGE, "results", results_table())
    fill(PAGE, "waiting", waiting_table())


if __name__ == "__main__":
    main()
