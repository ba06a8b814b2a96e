"""Generate the overview table of docs/claims.md: every figure and table of the paper, our measurement and the verdict.

Called by scripts/figures_table.py. Measurements and verdicts come from experiments/results; only the paper's claims and the
reasons for missing measurements are written here.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from scalelong.report.speedup import Curve, describe, speed_up

sys.path[:0] = [str(Path(__file__).parents[1] / "experiments" / folder) for folder in ("study", "")]

from plot import baselines, comparable  # noqa: E402
from results import read_meta  # noqa: E402
from settings import load  # noqa: E402
from study_rates import END, best_rates, found_rates  # noqa: E402

RESULTS = Path(__file__).parents[1] / "experiments" / "results"
STUDIED = "a-seed1"  # a piece of the study with the paper's recipe
PUBLISHED = ("ls", "cs kappa=0.7")  # the paper's methods, as the study names them
SCALE = "U-ViT of width 256, depth 12, patch 4, CIFAR-10, batch 128"
COMMAND = "`python experiments/study/piece.py`"
QUEUED = "no sufficiently long runs yet; queued in `experiments/study/queue.yaml`"
PAPER = (  # item, claim, and a result folder (without its scale), a column of the study, or why there is no measurement
    ("Fig. 1", "CS and LS reduce feature oscillation, rsqrt2 less so", "fig01-oscillation"),
    ("Figs. 2 and 4", "diagrams of the UNet and of LS", "no measurement; see `scalelong inspect`"),
    ("Fig. 3", "size of x_t and eps; CS and LS are more robust to extra noise", "fig03-distributions"),
    ("Fig. 5", "CS and LS train 1.5x faster", "study: test_loss"),
    ("Fig. 6", "the gain is larger for small batches and deep networks", f"{QUEUED} (d)"),
    ("Fig. 7", "LS learns coefficients near the curve of CS", "fig07-learned-kappa"),
    ("Fig. 7", "", "study: coefficients"),
    ("Figs. 8 to 10", "sample images", "[ours](reproduce.md) are from far shorter runs; not judged visually"),
    ("Fig. 11", "block norms exceed 1 and grow during training", "fig11-block-norms"),
    ("Fig. 12", "Fig. 1 holds for every seed", "fig12-seeds"),
    ("Fig. 13", "kappa above 1 hurts", "fig13-amplify"),
    ("Table 1", "lower FID with CS and LS in every setting", "study: fid"),
    ("Table 2", "LS is robust to its design, and better than one learnable kappa per skip", f"{QUEUED} (e)"),
    ("Table 3", "scaling block outputs instead (ReZero, stable-tau) is worse", "table3-block-outputs"),
    ("Table 3", "", "study: rates"),
    ("Table 4", "the direction of CS matters", "table4-direction"),
    (
        "Tables 5 and 6",
        "datasets and settings",
        "[presets](train.md) of the same names, checked by `tests/runs/test_settings.py`",
    ),
    ("Lemma 3.2, Theorems 3.1, 3.3, 3.4", "theory", "[checked numerically](theory.md), statement by statement"),
)


def overview() -> str:
    lines = ["| item | claim | measured | verdict | seeds | setting | command |", "|---|---|---|---|---|---|---|"]
    for item, claim, source in PAPER:
        study, _, column = source.partition(": ")
        of_study = {"coefficients": _learned, "rates": _rates}.get(column, partial(_study, column))
        measured = of_study() if study == "study" else _folders(source)
        found = list(measured) or [(source, "", "", "", "")]
        for number, row in enumerate(found):
            cells = (item, "" if number else claim, *row)
            lines.append("| " + " | ".join(cell.replace("|", "&#124;") for cell in cells) + " |")
    return "\n".join(lines)


def _folders(name: str) -> Iterator[tuple[str, str, str, str, str]]:
    """Measurement (first statement), verdict, seeds, setting and command of an experiment, for each scale."""
    for folder in sorted(RESULTS.glob(f"{name}-*")):
        summary = json.loads((folder / "summary.json").read_text())
        claims = summary["claims"]
        agree = sum(claim["agrees"] is True for claim in claims)
        verdict = "agrees" if agree == len(claims) else "**disagrees**" if not agree else "mixed"
        page = f"[all](figures.md), {agree} of {len(claims)} statements agree"
        yield (
            f"{claims[0]['measured']} ({page})",
            verdict,
            _seeds(folder),
            summary["setting"],
            f"`{command(folder.name)}`",
        )


def command(folder: str) -> str:
    """The current command that writes a result folder NAME-SCALE; summary.json has the one used at its commit."""
    name, _, scale = folder.rpartition("-")
    return f"python experiments/run.py {name}" + ("" if scale == "cpu" else f" --scale {scale}")


def _seeds(folder: Path) -> str:
    seeds: set[str] = set()
    for path in folder.glob("*.csv"):
        with path.open() as file:
            seeds |= {row["seed"] for row in csv.DictReader(file) if row.get("seed")}
    return str(len(seeds)) if seeds else "1"


def _learned() -> Iterator[tuple[str, str, str, str, str]]:
    """The coefficients at the end of every long run of LS, and the nearest curve of CS."""
    fit = load("fig07-learned-kappa").measure
    assert fit is not None
    said, close = [], []
    pieces = read_meta(RESULTS / "study")["pieces"]
    for path in sorted(RESULTS.glob("study/*/ls-seed*.jsonl")):
        last = [row for row in map(json.loads, path.read_text().splitlines()) if "coefficients" in row][-1]
        found = fit.fit_cs(last["coefficients"])
        near = f"R² = {found.r_squared:.2f}" if found.r_squared >= 0 else "R² below 0"
        kappas = ", ".join(f"{kappa:.2f}" for kappa in last["coefficients"])
        seed = path.stem.removeprefix("ls-seed")
        run = f"seed {seed}, rate {pieces[path.parent.name]['settings']['lr']:g}, {last['step']:,} steps"
        said.append(f"{run}: {kappas} (nearest CS: kappa {found.kappa:.2f}, {near})")
        close.append(found.r_squared > 0.9)
    verdict = "agrees" if all(close) else "mixed" if any(close) else "**disagrees**"
    yield "; ".join(said), verdict, str(len(said)), f"{SCALE}; mean on test images", COMMAND


def _rates() -> Iterator[tuple[str, str, str, str, str]]:
    """The methods of the study, each at its own best rate."""
    said = best_rates(found_rates(STUDIED), {})
    yield f"each at its best rate: {said}", "inconclusive: one seed", "1", f"{SCALE}, {END:,} steps", COMMAND


def _study(column: str) -> Iterator[tuple[str, str, str, str, str]]:
    """One column of the long runs of the paper's methods, relative to the unscaled run of the same seed, per protocol."""
    rows = comparable(RESULTS / "study", STUDIED)
    pieces: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        pieces[re.sub(r"-seed\d+.*$", "", row["experiment"])].append(row)
    what = {"test_loss": "test loss", "fid": "FID-10k"}[column]
    for piece, own in pieces.items():
        curves = _curves(own, column)
        base = {key: (name, str(seed)) for key, (name, seed) in baselines(own).items()}
        for method in (method for method in PUBLISHED if any(method == m for m, _ in curves)):
            mine = {seed: curve for (m, seed), curve in curves.items() if m == method and (m, int(seed)) in base}
            found = speed_up([(curve, curves[base[method, int(seed)]]) for seed, curve in mine.items()])
            if found is not None:
                verdict = "see text" if found.lead.ahead_at_end else "**disagrees**"
                if column == "fid" and found.lead.within_noise:
                    verdict = "inconclusive: within noise"
                if len(mine) == 1:
                    verdict = "inconclusive: one seed"
                scale = f"piece {piece}: {SCALE}"
                said = describe(method, "none", what, found)
                yield said, verdict, str(len(mine)), scale, COMMAND


def _curves(rows: list[dict[str, str]], column: str) -> dict[tuple[str, str], Curve]:
    found: dict[tuple[str, str], list[tuple[int, float, float]]] = defaultdict(list)
    for row in rows:
        if row.get(column):
            point = (int(row["step"]), float(row[column]), float(row["seconds"]))
            found[row["method"], row["seed"]].append(point)
    return {key: Curve(*map(list, zip(*sorted(points), strict=True))) for key, points in found.items()}
