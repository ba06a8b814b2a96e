"""Generate the study's summary, tables and figure in README.md, docs/index.md and docs/should-i-use-it.md.

python scripts/study_table.py            # write them from experiments/results and benchmarks/results
python scripts/study_table.py --check    # fail if they are out of date
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments" / "study"))

from figures_table import DOCS, RESULTS, fill  # noqa: E402
from plot import AGAIN, Curve, baselines, comparable, relative, smoothed  # noqa: E402
from results import read_meta  # noqa: E402
from study_rates import END, Found, best_rates, found_rates, rate_table  # noqa: E402

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
    crossing = f" CS catches up with the unscaled network at {as_range(level)} steps ({_plural(len(level), 'seed')})."
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


def _verdict(found: list[Pair]) -> str:
    return f"{verdict(*at_end(found, last_step(found))[:3])} the unscaled network"


def worst(found: list[Pair]) -> float:
    """The largest relative loss, in percent."""
    return max(max(pair.loss.values()) for pair in found)


def outcome(found: list[Pair]) -> str:
    """Final loss and FID as text."""
    end = last_step(found)
    loss, fid, base, seeds = at_end(found, end)
    return f"training loss {loss:+.2f}%, FID {fid:.1f} vs. {base:.1f} at {end:,} steps ({_plural(seeds, 'seed')})"


def _plural(count: int, what: str) -> str:
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


def advice(found: Mapping[str, list[Pair]], rates: Found) -> str:
    """The decision table: training setting, recommendation, measurement."""
    cs = found["cs kappa=0.7"]
    early = [pair.loss[10_000] for pair in cs]
    middle = [pair.loss[step] for pair in cs for step in range(40_000, 70_001, 10_000) if step in pair.loss]
    end = last_step(cs)
    loss, fid, base, seeds = at_end(cs, end)
    level = as_range([pair.level_at for pair in cs])
    short = {m: _fids(RESULTS / "cifar10-uvit-s2-batch64" / m / "metrics.jsonl") for m in ("none", "cs")}
    classes = {row["run"]: row["value"] for row in _table("conditional-gpu") if row["guidance"] == 1}
    variants = json.loads((RESULTS / "after-norm-gpu" / "summary.json").read_text())["variants"]
    plain, before, after = (
        variants[v]["test_loss"]["mean"] for v in ("none", "cs before the norm", "cs after the norm")
    )
    tuned = {float(row["kappa"]): float(row["fid"]) for row in _rows("skip_tuning.csv") if row["method"] == "cs"}
    ls = ", ".join(f"{pair.loss[pair.last]:+.2f}% (seed {pair.seed}, {pair.last:,} steps)" for pair in found["ls"])
    ls_ahead = any(pair.loss[pair.last] < 0 for pair in found["ls"])
    rows = [
        (
            "U-ViT of width 256, depth 12; batch 128, rate 2e-4; under 40,000 steps",
            "no scaling",
            f"CS 0.7 has {min(early):+.1f}% to {max(early):+.1f}% loss at 10,000 steps and catches up at {level} "
            f"({_plural(len(cs), 'seed')})",
        ),
        (
            "the same, 40,000 to 70,000 steps",
            "CS 0.7 or none",
            f"CS {min(middle):+.2f}% to {max(middle):+.2f}% training loss, within the difference of two unscaled runs; FID "
            f"inconclusive (see below)",
        ),
        (
            f"the same, {end:,} steps",
            {"better than": "CS 0.7", "worse than": "no scaling"}.get(verdict(loss, fid, base), "either"),
            f"CS {verdict(loss, fid, base)} none: loss {loss:+.2f}%, FID {fid:.1f} vs. {base:.1f} "
            f"({_plural(seeds, 'seed')})",
        ),
        (
            "U-ViT-S/2, batch 64, 8,000 steps",
            "no scaling",
            f"FID {short['none'][8000]:.1f} unscaled, {short['cs'][8000]:.1f} with CS 0.5; class-conditional "
            f"{classes['none, seed 0']:.1f} unscaled, CS 0.5 {classes['cs 0.5, seed 0']:.1f}, LS "
            f"{classes['ls, seed 0']:.1f} (1 seed each)",
        ),
        (
            "UNet with GroupNorms (DDPM's), 800 steps",
            "no scaling",
            f"CS 0.5 {100 * (before / plain - 1):+.1f}% test loss, with `after_norm` "
            f"{100 * (after / plain - 1):+.1f}% (3 seeds)",
        ),
        (
            "LS as published (gates start at 0.5)",
            "either" if ls_ahead else "not for a lower loss",
            f"final training loss: {ls}",
        ),
        (
            "a network trained without scaling",
            "no scaling",
            f"CS 0.9 at sampling time raises FID from {tuned[1.0]:.1f} to {tuned[0.9]:.1f}, CS 0.7 to "
            f"{tuned[0.7]:.1f} (1 seed)",
        ),
        (
            "a network trained with scaling",
            "the same scaling",
            "the scaling is part of the function; loading checks it",
        ),
        (
            "small U-ViT (width 64), batch 16, 500 steps, learning rates up to collapse",
            "no scaling",
            f"collapsed runs: {'; '.join(collapsed())} (3 seeds, 4 rates; [learning rates](#learning-rates))",
        ),
        block_outputs(),
        (
            f"U-ViT of width 256, depth 12; batch 128; {END:,} steps, each method at its best of up to four rates",
            "no scaling, a higher rate",
            f"{best_rates(rates, NAMES)}; [rates](#rates-of-the-long-runs)",
        ),
        (
            "300,000 steps or more; width 256 with depth 20 or more or batch 32",
            "try both",
            "the paper reports gains here; not yet measured by us (queued)",
        ),
    ]
    if mild := found.get(MILD):
        ahead = all(pair.loss[pair.last] < -LEVEL_LOSS for pair in mild)
        use = "no scaling" if not ahead else "LS with `start=0.95`" if len(mild) > 1 else "try LS with `start=0.95`"
        said = f"LS with `start=0.95` is {_verdict(mild)}: {outcome(mild)}; never worse by more than {worst(mild):.2f}%"
        rows.insert(
            0, ("U-ViT of width 256, depth 12; batch 128, rate 2e-4; any length up to 100,000 steps", use, said)
        )
    rows[4:4] = other_settings()
    lines = ["| training | use | measured |", "|---|---|---|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def collapsed() -> list[str]:
    """Collapsed runs over all learning rates, by depth."""
    claims = json.loads((RESULTS / "learning-rates-cpu" / "summary.json").read_text())["claims"]
    found = [claim for claim in claims if claim["measured"].startswith("collapsed: ")]
    depths = [re.search(r"\((.*?)\)", claim["paper"])[1] for claim in found]  # type: ignore[index]
    return [f"{d}: {claim['measured'].removeprefix('collapsed: ')}" for d, claim in zip(depths, found, strict=True)]


def block_outputs() -> tuple[str, str, str]:
    """Methods that scale the outputs of blocks, each at its best rate, against the unscaled network at its own."""
    losses: dict[str, dict[str, list[float]]] = {}
    with (RESULTS / "block-outputs-cifar" / "runs.csv").open() as file:
        for row in csv.DictReader(file):
            losses.setdefault(row["method"], {}).setdefault(row["lr"], []).append(float(row["test_loss"]))
    best = {method: min(of_rates.items(), key=lambda item: fmean(item[1])) for method, of_rates in losses.items()}
    base_rate, base = best.pop("none")
    lower, said = [], []
    for method, (rate, own) in best.items():
        wins = sum(a < b for a, b in zip(own, base, strict=True))
        lower += [method] if wins == len(own) else []
        gap = 100 * (fmean(own) / fmean(base) - 1)
        said.append(f"{method} {gap:+.1f}% at {rate}, lower in {wins} of {len(own)} seeds")
    return (
        "small U-ViT (width 64), batch 32, 4,000 steps",
        " or ".join(lower) or "no scaling",
        f"test loss at the best of three rates against unscaled at {base_rate}: {'; '.join(said)} "
        "([scaling block outputs](figures.md#table-3-scaling-the-outputs-of-blocks)); an early lead, see the next row",
    )


def other_settings() -> list[tuple[str, str, str]]:
    """One row per other configuration of the study: depth, batch, data. Rates have a table of their own."""
    rows = comparable(RESULTS / "study", PIECE, free=("lr",))
    pieces, shown, found = read_meta(RESULTS / "study")["pieces"], {row["experiment"] for row in rows}, []
    for piece, about in pieces.items():
        if piece in shown:
            continue
        shown |= {row["experiment"] for row in _comparable(piece)}
        settings, said, ahead = about["settings"], [], []
        for method, each in pairs(piece).items():
            gaps = [pair.loss[pair.last] for pair in each]
            if gaps:
                said.append(f"{name(method)} {fmean(gaps):+.2f}% loss ({_plural(len(gaps), 'seed')})")
                ahead += [name(method)] if max(gaps) < -LEVEL_LOSS and len(gaps) > 1 else []
        where = (
            f"width {settings['dim']}, depth {settings['depth']}, batch {settings['batch']}, rate {settings['lr']:g}"
        )
        training = f"U-ViT of {where}; {settings['steps']:,} steps"
        if said:
            found.append((training, " or ".join(ahead) or "no clear gain", "; ".join(said)))
    return found


def _comparable(piece: str) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = comparable(RESULTS / "study", piece)
    return rows


def _fids(path: Path) -> dict[int, float]:
    records = map(json.loads, path.read_text().splitlines())
    return {record["step"]: record["value"] for record in records if record["kind"] == "evaluation"}


def _table(folder: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / folder / "summary.json").read_text())["table"]
    return rows


def _rows(file: str) -> list[dict[str, str]]:
    with (RESULTS / "study" / file).open(newline="") as opened:
        return list(csv.DictReader(opened))


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
    page = DOCS / "should-i-use-it.md"
    rates = found_rates(PIECE)
    fill(page, "advice", advice(found, rates))
    fill(page, "rates", rate_table(rates, NAMES))
    fill(page, "costs", cost_table())
    fill(page, "study", f"{loss_table(found)}\n\n{fid_table(found)}")
    from study_picture import PICTURE, draw, picture_digest

    if "--check" not in sys.argv:
        draw(found, digest)
    elif picture_digest() != digest:
        sys.exit(f"{PICTURE.relative_to(ROOT)} is out of date; run scripts/study_table.py")


if __name__ == "__main__":
    main()
