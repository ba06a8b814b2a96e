"""The tables of docs/figures.md and docs/stability.md from the results of the experiments.

python scripts/figures_table.py            # writes them
python scripts/figures_table.py --check    # fails if they are not those of the results
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, DOCS = ROOT / "experiments" / "results", ROOT / "docs"
FIGURES = (
    "fig01-oscillation",
    "fig03-distributions",
    "fig07-learned-kappa",
    "fig11-block-norms",
    "fig12-seeds",
    "fig13-amplify",
    "table4-direction",
)


def claims_table(name: str) -> str:
    """What the paper says beside what was measured, at every scale that was run."""
    lines = []
    for scale in ("cpu", "gpu"):
        path = RESULTS / f"{name}-{scale}" / "summary.json"
        if not path.is_file():
            continue
        summary = json.loads(path.read_text())
        lines += [
            f"`{summary['command']}`, {summary['device']}, commit {summary['commit']}:",
            f"{summary['setting']}.",
            "",
        ]
        lines += ["| the paper | measured | agrees |", "|---|---|---|"]
        rows = [
            (claim["paper"], claim["measured"], "yes" if claim["agrees"] else "**no**") for claim in summary["claims"]
        ]
        lines += [f"| {' | '.join(_escaped(cell) for cell in row)} |" for row in rows]
        (picture,) = (RESULTS / f"{name}-{scale}").glob("*.png")
        lines += ["", f"![{name}, {scale}](assets/figures/{name}-{scale}.png)", ""]
        copy(picture, DOCS / "assets" / "figures" / f"{name}-{scale}.png")
    return "\n".join(lines).strip()


def rules_table() -> str:
    """The regret of every rule in every setting."""
    folder = RESULTS / "auto-kappa-cpu"
    rows: list[dict[str, Any]] = json.loads((folder / "summary.json").read_text())["table"]
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    copy(folder / "auto_kappa.png", DOCS / "assets" / "figures" / "auto-kappa.png")
    lines = [f"| regret x 1000 (kappa) | {' | '.join(settings)} | mean |", f"|---|{'---|' * (len(settings) + 1)}"]
    places = dict.fromkeys(
        (row["choice"], row["kappa"] if row["choice"].startswith("schedule") else None) for row in rows
    )
    for choice, kappa in places:
        here = [r for r in rows if r["choice"] == choice and kappa in (None, r["kappa"])]
        cells = [f"{1000 * row['regret']:.2f} ({row['kappa']:.2f})" for row in here]
        average = sum(row["regret"] for row in here) / len(here)
        lines.append(f"| {_escaped(choice)} | {' | '.join(cells)} | {1000 * average:.2f} |")
    noise = [next(row["sd"] for row in rows if row["setting"] == setting) for setting in settings]
    lines.append(f"| sd over seeds | {' | '.join(f'{1000 * sd:.2f}' for sd in noise)} | |")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return text.replace("|", "&#124;").replace("*", "&#42;") if "**" not in text else text


def copy(source: Path, target: Path) -> None:
    """Into the docs; when only checking, it must be there already."""
    if "--check" not in sys.argv:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    elif not target.is_file() or target.read_bytes() != source.read_bytes():
        sys.exit(f"{target.relative_to(ROOT)} is not {source.relative_to(ROOT)}; run scripts/figures_table.py")


def fill(page: Path, name: str, table: str) -> None:
    """Put a table between its marks."""
    text = page.read_text()
    pattern = re.compile(rf"(<!-- {re.escape(name)}: begin -->\n).*?(<!-- {re.escape(name)}: end -->)", re.S)
    if not pattern.search(text):
        sys.exit(f"{page.relative_to(ROOT)} has no marks for {name}")
    new = pattern.sub(lambda match: f"{match[1]}\n{table}\n\n{match[2]}", text)
    if "--check" in sys.argv and new != text:
        sys.exit(f"{page.relative_to(ROOT)}: {name} is not what the results say; run scripts/figures_table.py")
    if new != text:
        page.write_text(new)


def main() -> None:
    for name in FIGURES:
        fill(DOCS / "figures.md", name, claims_table(name))
    fill(DOCS / "stability.md", "rules", rules_table())


if __name__ == "__main__":
    main()
