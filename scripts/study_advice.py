"""The decision table of docs/should-i-use-it.md; called by scripts/study_table.py."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from figures_table import RESULTS
from plot import comparable
from results import read_meta
from study_rates import END, Found, best_rates
from study_table import (
    LEVEL_LOSS,
    MILD,
    NAMES,
    PIECE,
    Pair,
    as_range,
    at_end,
    last_step,
    name,
    pairs,
    plural,
    verdict,
)


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
            f"({plural(len(cs), 'seed')})",
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
            f"({plural(seeds, 'seed')})",
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
            f"U-ViT of width 256, depth 12; batch 128; {END:,} steps, each method at the best of the rates it was trained at",
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


def _verdict(found: list[Pair]) -> str:
    return f"{verdict(*at_end(found, last_step(found))[:3])} the unscaled network"


def worst(found: list[Pair]) -> float:
    """The largest relative loss, in percent."""
    return max(max(pair.loss.values()) for pair in found)


def outcome(found: list[Pair]) -> str:
    """Final loss and FID as text."""
    end = last_step(found)
    loss, fid, base, seeds = at_end(found, end)
    return f"training loss {loss:+.2f}%, FID {fid:.1f} vs. {base:.1f} at {end:,} steps ({plural(seeds, 'seed')})"


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
                said.append(f"{name(method)} {fmean(gaps):+.2f}% loss ({plural(len(gaps), 'seed')})")
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
