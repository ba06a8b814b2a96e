"""Generate the tables of docs/figures.md, claims.md, features.md, should-i-use-it.md, mup.md and reproduce.md from results.

python scripts/figures_table.py            # write them
python scripts/figures_table.py --check    # fail if they are out of date
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from claims_table import command, overview

from scalelong.stability.transfer import optima, summary

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments" / "transfer"))

from settings import load  # noqa: E402
from sweep import STORED, read_results  # noqa: E402

RESULTS, DOCS = ROOT / "experiments" / "results", ROOT / "docs"
FIGURES = (
    "fig01-oscillation",
    "fig03-distributions",
    "fig07-learned-kappa",
    "fig11-block-norms",
    "fig12-seeds",
    "fig13-amplify",
    "table3-block-outputs",
    "table4-direction",
)
VERDICTS = {True: "yes", False: "**no**", None: "inconclusive: one seed"}
MEASURED = {
    "conditional-gpu": {
        "run": "run",
        "guidance": "guidance",
        "value": "FID",
        "images": "images",
        "final_loss": "final loss",
    },
    "text-to-emoji-gpu": {
        "images": "images from",
        "guidance": "guidance",
        "n": "images",
        "first (all)": "top-1",
        "± (all)": "±",
        "five (all)": "top-5",
        "first (seen)": "top-1, second judge",
        "± (seen)": "± ",
        "five (seen)": "top-5, second judge",
    },
    "head-start-cifar": {
        "measure": "measure",
        "run": "run",
        "mean": "mean ± sd",
        "minus none, lr 0.002": "minus none, same seed",
    },
    "features-cpu": {
        "run": "run",
        "test_loss": "test loss",
        "test_loss minus none": "minus none",
        "test_loss minus plain": "minus plain",
        "probe": "probe accuracy, %",
        "probe minus none": "minus none",
        "probe minus plain": "minus plain",
        "gate": "gate, by seed",
        "chosen": "block and noise level, by seed",
    },
}


def claims_table(name: str) -> str:
    """The paper's claims next to our measurements, for every scale that was run."""
    lines = []
    for scale in ("cpu", "cifar", "gpu"):
        path = RESULTS / f"{name}-{scale}" / "summary.json"
        if not path.is_file():
            continue
        summary = json.loads(path.read_text())
        lines += [_origin(path.parent.name, summary), "", "| the paper | measured | agrees |", "|---|---|---|"]
        rows = [(claim["paper"], claim["measured"], VERDICTS[claim["agrees"]]) for claim in summary["claims"]]
        lines += [f"| {' | '.join(_escaped(cell) for cell in row)} |" for row in rows]
        lines += ["", _picture(f"{name}-{scale}"), ""]
    return "\n".join(lines).strip()


def measured_table(folder: str, columns: Mapping[str, str]) -> str:
    """The rows of one experiment with the given columns (key -> heading), and its figure."""
    summary = json.loads((RESULTS / folder / "summary.json").read_text())
    lines = [_origin(folder, summary), "", f"| {' | '.join(columns.values())} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(_cell(row[key]) for key in columns)} |" for row in summary["table"]]
    return "\n".join([*lines, "", _picture(folder)])


def _origin(folder: str, summary: dict[str, Any]) -> str:
    return f"`{command(folder)}`, {summary['device']}, commit {summary['commit']}:\n{summary['setting']}."


def _picture(folder: str) -> str:
    (picture,) = (RESULTS / folder).glob("*.png")
    copy(picture, DOCS / "assets" / "figures" / f"{folder}.png")
    return f"![{', '.join(folder.rsplit('-', 1))}](assets/figures/{folder}.png)"


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    digits = 0 if value.is_integer() else 1 if value >= 10 else 3 if value >= 0.1 else 4
    return f"{value:.{digits}f}"


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


def rates_table(folder: str) -> str:
    """The median loss of every method over the learning rate, with the collapsed runs, and the verdicts."""
    summary = json.loads((RESULTS / folder / "summary.json").read_text())
    rows: list[dict[str, Any]] = summary["table"]
    rates = sorted({row["lr"] for row in rows})
    lines = [_origin(folder, summary), "", f"| median loss | {' | '.join(f'{rate:g}' for rate in rates)} |"]
    lines.append(f"|{'---|' * (len(rates) + 1)}")
    for name in dict.fromkeys(row["run"] for row in rows):
        own = {row["lr"]: row for row in rows if row["run"] == name}
        cells = [
            ("not finite" if row["median loss"] is None else f"{row['median loss']:.3f}")
            + (f" ({row['collapsed']} of {row['seeds']} collapsed)" if row["collapsed"] else "")
            for row in map(own.__getitem__, rates)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    claims = [f"- {c['paper']}: {VERDICTS[c['agrees']]} ({c['measured']})." for c in summary["claims"]]
    return "\n".join([*lines, "", *claims, "", _picture(folder)])


def transfer_table(over: str) -> str:
    """The best rate or kappa at every width, overall and per seed, and the loss at the best value of the base."""
    points = read_results(STORED / {"lr": "rates", "kappa": "kappas"}[over])
    names, base = {"mup": "muP", "standard": "standard"}, optima(points, over)[0].best

    def shown(value: float) -> str:
        return f"2^{math.log2(value):.0f}" if over == "lr" else f"{value:g}"

    lines = [
        f"| | width | best {over} | loss | seeds | best of each seed | loss of each seed at {shown(base)} |",
        f"|{'---|' * 7}",
    ]
    for each in optima(points, over):
        mine = [p for p in points if (p.parametrization, p.width) == (each.parametrization, each.width)]
        seeds = [[p for p in mine if p.seed == seed] for seed in sorted({p.seed for p in mine})]
        best = ", ".join(shown(found.best) for own in seeds for found in optima(own, over))
        there = ", ".join(f"{p.loss:.4f}" for own in seeds for p in own if getattr(p, over) == base and p.loss)
        cells = (names[each.parametrization], each.width, shown(each.best), f"{each.loss:.4f}", each.seeds, best, there)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    said = [line.split(maxsplit=1) for line in summary(points, over).splitlines() if "moves by" in line]
    return "\n".join([*lines, "", *(f"- {names[kind]}: {text}." for kind, text in said)])


def _escaped(text: str) -> str:
    return text.replace("|", "&#124;").replace("*", "&#42;") if "**" not in text else text


def copy(source: Path, target: Path) -> None:
    """Copy into the docs; with --check, require an identical copy."""
    if "--check" not in sys.argv:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    elif not target.is_file() or target.read_bytes() != source.read_bytes():
        sys.exit(f"{target.relative_to(ROOT)} differs from {source.relative_to(ROOT)}; run scripts/figures_table.py")


def fill(page: Path, name: str, table: str) -> None:
    """Replace the text between the begin and end markers."""
    text = page.read_text()
    pattern = re.compile(rf"(<!-- {re.escape(name)}: begin -->\n).*?(<!-- {re.escape(name)}: end -->)", re.S)
    if not pattern.search(text):
        sys.exit(f"{page.relative_to(ROOT)} has no markers for {name}")
    new = pattern.sub(lambda match: f"{match[1]}\n{table}\n\n{match[2]}", text)
    if "--check" in sys.argv and new != text:
        sys.exit(f"{page.relative_to(ROOT)}: {name} is out of date; run scripts/{Path(sys.argv[0]).name}")
    if new != text:
        page.write_text(new)


def main() -> None:
    for name in FIGURES:
        fill(DOCS / "figures.md", name, claims_table(name))
    fill(DOCS / "claims.md", "overview", overview())
    fill(DOCS / "should-i-use-it.md", "rules", rules_table())
    for scale in ("cpu", "paper"):
        fill(DOCS / "should-i-use-it.md", f"learning rates, {scale}", rates_table(f"learning-rates-{scale}"))
    for over in ("lr", "kappa"):
        fill(DOCS / "mup.md", f"transfer over {over}", transfer_table(over))
    for folder, columns in MEASURED.items():
        page = load(folder.rpartition("-")[0]).page.partition("#")[0]
        fill(DOCS / page, folder, measured_table(folder, columns))


if __name__ == "__main__":
    main()
