"""Generate the study's summary, tables and figure in README.md, docs/index.md and docs/should-i-use-it.md.

python scripts/study_table.py            # write them from experiments/results and benchmarks/results
python scripts/study_table.py --check    # fail if they are out of date
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments" / "study"))

from figures_table import DOCS, RESULTS, fill  # noqa: E402
from plot import AGAIN, Curve, baselines, comparable, relative, smoothed  # noqa: E402
from study_rates import found_rates, rate_table  # noqa: E402

PIECE = "a-seed1"  # pieces of this network and training are compared
CURVES = RESULTS / "study" / "curves.csv"
STEPS = range(10_000, 1_000_000, 10_000)
NAMES = {
    "none": "unscaled",
    AGAIN: "unscaled, repeated with newer kernels",
    "cs kappa=0.7": "CS, kappa = 0.7",
    "ls": "LS",
    "ls start=0.95": "LS, start = 0.95",
    "universal kappa=0.5": "universal, kappa = 0.5",
    "stable_tau tau=0.1": "stable-tau, tau = 0.1",
    "rezero": "ReZero",
}
MILD = "ls start=0.95"
LEVEL_LOSS, LEVEL_FID = 0.2, 2.1  # percent, points: the difference between two unscaled runs of one seed


@dataclass(frozen=True)
class Pair:
    """A method and the unscaled run on the same batches."""

    method: str
    seed: int
    loss: Curve  # training loss relative to unscaled in percent, mean over the previous 5,000 steps
    fid: Curve
    base_fid: Curve

    @property
    def last(self) -> int:
        return max(self.loss)

    @property
    def level_at(self) -> int | None:
        """The first step at which the method is not behind."""
        return next((step for step in sorted(self.loss) if self.loss[step] <= 0), None)


def pairs(like: str = PIECE) -> dict[str, list[Pair]]:
    """Map each method to its longest pair per seed, among pieces with the same network and training settings as `like`.

    The unscaled run comes from the same piece, or else from the longest one with the same seed.
    """
    runs: dict[tuple[str, str, int], dict[str, Curve]] = {}
    rows = comparable(RESULTS / "study", like)
    bases = baselines(rows)
    for row in rows:
        run = runs.setdefault((row["experiment"], row["method"], int(row["seed"])), {"train_loss": {}, "fid": {}})
        for column, curve in run.items():
            if row[column]:
                curve[int(row["step"])] = float(row[column])
    found: dict[str, dict[int, Pair]] = {}
    for (piece, method, seed), run in runs.items():
        if (method, seed) not in bases:
            continue
        unscaled = bases[method, seed][0]
        others = [base for (_, name, s), base in runs.items() if (name, s) == (unscaled, seed)]
        base = runs.get((piece, unscaled, seed)) or max(others, key=lambda each: len(each["train_loss"]))
        loss = relative(smoothed(run["train_loss"]), smoothed(base["train_loss"]))
        pair = Pair(method, seed, loss, run["fid"], base["fid"])
        known = found.setdefault(method, {})
        if loss and (seed not in known or known[seed].last < pair.last):
            known[seed] = pair
    return {method: [each[seed] for seed in sorted(each)] for method, each in found.items()}


def name(method: str) -> str:
    return NAMES.get(method, f"`{method}`")


def at_end(found: list[Pair], end: int) -> tuple[float, float, float, int]:
    """Mean loss in percent, FID, unscaled FID and the number of seeds, over the runs that reach this step."""
    there = [pair for pair in found if pair.last >= end and end in pair.fid and end in pair.base_fid]
    means = (fmean(values) for values in zip(*((p.loss[end], p.fid[end], p.base_fid[end]) for p in there), strict=True))
    return (*means, len(there))  # type: ignore[return-value]


def last_step(found: list[Pair]) -> int:
    """The last step with loss and FID for both the method and the unscaled network."""
    return max(step for pair in found for step in pair.fid if step in pair.loss and step in pair.base_fid)


def verdict(loss: float, fid: float, base: float) -> str:
    """Compare with the unscaled network; "better" and "worse" need loss and FID to agree."""
    places = {_sign(loss, LEVEL_LOSS), _sign(fid - base, LEVEL_FID)}
    if places == {0}:
        return "on par with"
    return "inconclusive against" if places >= {-1, 1} else "better than" if -1 in places else "worse than"


def _sign(value: float, limit: float) -> int:
    return 0 if abs(value) < limit else 1 if value > 0 else -1


SHORT = {
    "on par with": "on par",
    "better than": "better",
    "worse than": "worse",
    "inconclusive against": "inconclusive",
}


def headline(found: Mapping[str, list[Pair]]) -> str:
    """The main methods as a table, and how to read it."""
    end = last_step(found["cs kappa=0.7"])
    steps = [step for step in (10_000, 30_000) if step < end]
    columns = " | ".join(f"{step // 1000}k" for step in (*steps, end))
    lines = [
        f"| training loss vs. unscaled after | {columns} | FID vs. unscaled | verdict | seeds |",
        "|---" * (len(steps) + 5) + "|",
    ]
    for method in ("cs kappa=0.7", "ls", MILD, "universal kappa=0.5"):
        if method not in found or last_step(found[method]) < end:
            continue
        loss, fid, base, seeds = at_end(found[method], end)
        whole = [pair for pair in found[method] if pair.last >= end]  # the same seeds in every column
        early = [f"{fmean(pair.loss[step] for pair in whole):+.2f}%" for step in steps]
        cells = [
            name(method),
            *early,
            f"{loss:+.2f}%",
            f"{fid:.1f} vs. {base:.1f}",
            SHORT[verdict(loss, fid, base)],
            str(seeds),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    level = [pair.level_at for pair in found["cs kappa=0.7"]]
    crossing = f" CS catches up with the unscaled network at {as_range(level)} steps ({plural(len(level), 'seed')})."
    about = "U-ViT of width 256 and depth 12 on CIFAR-10, batch 128, on the batches of an unscaled run with the same kernels."
    return "\n".join(lines) + f"\n\n{about}{crossing if None not in level else ''}{repeat(found)}"


def repeat(found: Mapping[str, list[Pair]]) -> str:
    """The run-to-run difference of two unscaled runs with one seed."""
    if AGAIN not in found:
        return ""
    loss, fid, base, _ = at_end(found[AGAIN], last_step(found[AGAIN]))
    return (
        f" Two unscaled runs with the same seed but different kernels end {abs(loss):.2f}% apart in loss, with FID {fid:.1f} "
        f"and {base:.1f}: treat smaller differences as noise."
    )


def plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def as_range(values: list[int | None]) -> str:
    low, high = (f"{f(v for v in values if v is not None):,}" for f in (min, max))
    return low if low == high else f"{low} to {high}"


def loss_table(found: Mapping[str, list[Pair]]) -> str:
    last = max(pair.last for each in found.values() for pair in each)
    steps = [step for step in STEPS if step <= last]
    lines = [f"| loss | seed | {' | '.join(f'{step // 1000}k' for step in steps)} |", "|---" * (len(steps) + 2) + "|"]
    for method, each in found.items():
        for pair in each:
            cells = [f"{pair.loss[step]:+.2f}%" if step in pair.loss else "" for step in steps]
            if any(cells):
                lines.append(f"| {name(method)} | {pair.seed} | {' | '.join(cells)} |")
    return "\n".join(lines)


def fid_table(found: Mapping[str, list[Pair]]) -> str:
    """FID at fixed steps and at the end of each run, per method and seed."""
    rows: dict[tuple[str, int], Curve] = {}
    for method, each in found.items():
        for pair in each:
            rows.setdefault(("none", pair.seed), pair.base_fid)
            rows[method, pair.seed] = pair.fid
    steps = [10_000, 25_000, 50_000, 100_000]
    lines = ["| FID-10k | seed | 10k | 25k | 50k | 100k | last |", "|---|---|---|---|---|---|---|"]
    for (method, seed), fid in sorted(rows.items(), key=lambda row: (["none", *found].index(row[0][0]), row[0][1])):
        cells = [f"{fid[step]:.1f}" if step in fid else "" for step in steps]
        last = max(fid, default=0)
        cells.append("" if last in (0, *steps) else f"{fid[last]:.1f} at {last:,}")
        if fid:
            lines.append(f"| {name(method)} | {seed} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cost_table() -> str:
    """Milliseconds per step of the trainer by batch size and method."""
    lines = ["| ms per training step of U-ViT-S/2, H200 (quartiles) | none | CS | LS |", "|---|---|---|---|"]
    found = json.loads((ROOT / "benchmarks" / "results" / "growth.json").read_text())["rows"]
    rows = {(row["value"], row["method"]): row for row in found if row["factor"] == "batch"}
    for batch in dict.fromkeys(batch for batch, _ in rows):
        cells = []
        for method in ("none", "cs", "ls"):
            row, plain = rows[batch, method], rows[batch, "none"]
            over = "" if method == "none" else f", {row['ms'] / plain['ms'] - 1:+.1%}"
            cells.append(f"{row['ms']:.2f} ({row['ms_low']:.2f} to {row['ms_high']:.2f}){over}")
        lines.append(f"| batch {batch} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    found, digest = pairs(), hashlib.sha256(CURVES.read_bytes()).hexdigest()
    for page in (ROOT / "README.md", DOCS / "index.md"):
        fill(page, "headline", headline(found))
    from study_advice import advice
    from study_picture import PICTURE, draw, picture_digest

    page, rates = DOCS / "should-i-use-it.md", found_rates(PIECE)
    fill(page, "advice", advice(found, rates))
    fill(page, "rates", rate_table(rates, NAMES))
    fill(page, "costs", cost_table())
    fill(page, "study", f"{loss_table(found)}\n\n{fid_table(found)}")
    if "--check" not in sys.argv:
        draw(found, digest)
    elif picture_digest() != digest:
        sys.exit(f"{PICTURE.relative_to(ROOT)} is out of date; run scripts/study_table.py")


if __name__ == "__main__":
    main()
