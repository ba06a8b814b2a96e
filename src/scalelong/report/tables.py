"""Comparisons as rows of text: for the terminal, for CSV and for the page."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

from scalelong.report.compare import MEASURES, Arrivals, Comparison, Race
from scalelong.report.numbers import UNKNOWN, count, duration_with_sd, times, with_sd
from scalelong.report.statistics import Estimate

Rows = list[list[str]]  # the first row is the head


def measures_table(comparison: Comparison) -> Rows:
    """Mean ± sd over seeds of every measure that some run has."""
    shown = [name for name in MEASURES if comparison.ranking(name)]
    metrics = comparison.metrics if comparison.same_data else ()
    head = ["method", "seeds", *(MEASURES[name] for name in shown), *map(str, metrics)]
    rows = []
    for group in comparison.groups:
        cells = [_cell(name, comparison.measure(group, name)) for name in shown]
        qualities = [with_sd(comparison.quality(group, metric)) for metric in metrics]
        seeds = ", ".join(map(str, group.seeds)) if len(group.runs) <= 4 else f"{len(group.runs)} seeds"
        rows.append([group.label, seeds, *cells, *qualities])
    return [head, *rows]


def arrivals_table(race: Race) -> Rows:
    """Steps and seconds of each method to the target, or that it was not reached."""
    rows = [[a.group.label, _when(a, steps=True), _when(a, steps=False)] for a in race.arrivals]
    return [["method", "steps", "time"], *rows]


def pairs_table(race: Race) -> Rows:
    """Every pair: how many times as soon the first arrives."""
    head = ["method", "against", "speed-up in steps", "speed-up in time"]
    rows = []
    for pair in race.pairs():
        names = [pair.first.group.label, pair.second.group.label]
        late = [a.group.label for a in (pair.first, pair.second) if not a.all_reached]
        why = f"{' and '.join(late)}: not reached" if late else ""
        rows.append([*names, why or times(pair.in_steps), UNKNOWN if late else times(pair.in_seconds)])
    return [head, *rows]


def aligned(rows: Rows) -> str:
    """Rows as columns of text, the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def write_csv(comparison: Comparison, races: Sequence[Race], path: Path) -> Path:
    """Means and sds at `path`, every pair of every race beside it (its path is returned); full precision."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = ["method", "seeds", *(f"{name}_{part}" for name in MEASURES for part in ("mean", "sd"))]
    metrics = comparison.metrics if comparison.same_data else ()
    head += [f"{metric.name} n={metric.n} {metric.extractor} {part}" for metric in metrics for part in ("mean", "sd")]
    rows = []
    for group in comparison.groups:
        values = [comparison.measure(group, name) for name in MEASURES]
        values += [comparison.quality(group, metric) for metric in metrics]
        cells = [_exact(cell) for value in values for cell in (value.mean, value.sd)]
        rows.append([group.label, len(group.runs), *cells])
    _write(path, [head, *rows])
    pairs = path.with_name(f"{path.stem}-pairs{path.suffix or '.csv'}")
    _write(pairs, [_PAIRS_HEAD, *(row for race in races for row in _pair_rows(race))])
    return pairs


_PAIRS_HEAD = [
    *("what", "target", "method", "steps", "seconds", "reached", "against", "against_steps", "against_seconds"),
    *("against_reached", "speedup_steps", "speedup_seconds"),
]


def _pair_rows(race: Race) -> list[list[object]]:
    rows = []
    for pair in race.pairs():
        both = [*_arrival_cells(pair.first), *_arrival_cells(pair.second)]
        rows.append([race.what, race.target, *both, _exact(pair.in_steps), _exact(pair.in_seconds)])
    return rows


def _arrival_cells(arrivals: Arrivals) -> list[object]:
    reached = f"{arrivals.reached} of {len(arrivals.group.runs)}"
    return [arrivals.group.label, _exact(arrivals.steps.mean), _exact(arrivals.seconds.mean), reached]


def _cell(measure: str, value: Estimate) -> str:
    if measure == "seconds":
        return duration_with_sd(value)
    return with_sd(value, 4 if measure == "final_loss" else 3)


def _when(arrivals: Arrivals, steps: bool) -> str:
    if not arrivals.reached:
        return "not reached"
    spread = f" ± {count(arrivals.steps.sd)}" if math.isfinite(arrivals.steps.sd) else ""
    text = f"{count(arrivals.steps.mean)}{spread}" if steps else duration_with_sd(arrivals.seconds)
    total = len(arrivals.group.runs)
    return text if arrivals.all_reached else f"{text} ({arrivals.reached} of {total} seeds; the others: not reached)"


def _exact(value: float) -> object:
    return value if math.isfinite(value) else ""


def _write(path: Path, rows: Sequence[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
