"""Comparisons as rows of text: for the terminal, for CSV and for the page."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from scalelong.files import write_text
from scalelong.report import sentences
from scalelong.report.compare import MEASURES, Arrivals, Comparison, Race
from scalelong.report.groups import Group
from scalelong.report.notes import notes
from scalelong.report.numbers import (
    UNKNOWN,
    UNRESOLVED,
    Estimate,
    at_steps,
    count,
    duration,
    duration_with_sd,
    number,
    times,
    with_sd,
)
from scalelong.runs.reader import Metric

Rows = list[list[str]]  # the first row is the head


def summary(comparison: Comparison, races: Sequence[Race], refused: Sequence[str] = ()) -> str:
    """Tables, findings and caveats for the terminal."""
    parts = [aligned(measures_table(comparison))]
    for race in [race for race in races if len(race.arrivals) > 1]:
        why = race.protocol if race.asked else f"{race.protocol}; the worst value that any run ends with"
        parts.append(f"To reach {race.what} {number(race.target)} ({why}):")
        parts += [aligned(arrivals_table(race)), aligned(pairs_table(race))]
    found = [text for _, text in sentences.findings(comparison, races[0] if races else None)]
    parts.append("\n".join([*found, sentences.seeds(comparison), *notes(comparison, refused)]))
    return "\n\n".join(parts)


def measures_table(comparison: Comparison) -> Rows:
    """Mean ± sd over seeds of every measure that some run has."""
    shown = [name for name in MEASURES if comparison.ranking(name)]
    metrics = comparison.metrics if comparison.same_data else ()
    rows = [["method", "seeds", *(MEASURES[name][0] for name in shown), *map(comparison.heading, metrics)]]
    for group in comparison.groups:
        cells = [_cell(name, comparison.measure(group, name)) for name in shown]
        qualities = [_quality(comparison, group, metric) for metric in metrics]
        seeds = ", ".join(map(str, group.seeds)) if len(group.runs) <= 4 else f"{len(group.runs)} seeds"
        rows.append([group.label, seeds, *cells, *qualities])
    return rows


def arrivals_table(race: Race) -> Rows:
    """Steps and seconds of each method to the target, as an interval where only evaluations are known."""
    rows = [[a.group.label, _when(a, steps=True), _when(a, steps=False)] for a in race.arrivals]
    return [["method", "steps (between evaluations)" if race.sparse else "steps", "time"], *rows]


def pairs_table(race: Race) -> Rows:
    """The speed-up of every pair."""
    rows = [["method", "against", "speed-up in steps", "speed-up in time"]]
    for pair in race.pairs():
        names = [pair.first.group.label, pair.second.group.label]
        late = [a.group.label for a in (pair.first, pair.second) if not a.all_reached]
        if late:
            rows.append([*names, f"{' and '.join(late)}: not reached", UNKNOWN])
            continue
        in_steps = times(pair.in_steps) if pair.steps_resolved else UNRESOLVED
        rows.append([*names, in_steps, times(pair.in_seconds) if pair.seconds_resolved else UNRESOLVED])
    return rows


def aligned(rows: Rows) -> str:
    """Rows as columns of text, the first left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def race_names(races: Sequence[Race]) -> list[str]:
    """What each race is for, with its protocol where several are for the same."""
    called = Counter(race.what for race in races)
    return [race.what if called[race.what] == 1 else f"{race.what} ({race.protocol})" for race in races]


def _quality(comparison: Comparison, group: Group, metric: Metric) -> str:
    """At the step that all share; if there is none, every last value with its step."""
    if comparison.quality_step(metric) is None:
        return at_steps(comparison.last_qualities(group, metric))
    return with_sd(comparison.measure(group, metric))


def _cell(measure: str, value: Estimate) -> str:
    if measure == "seconds":
        return duration_with_sd(value)
    return with_sd(value, 4 if measure == "final_loss" else 3)


def _when(arrivals: Arrivals, steps: bool) -> str:
    if not arrivals.reached:
        return "not reached"
    spread = f" ± {count(arrivals.steps.sd)}" if math.isfinite(arrivals.steps.sd) else ""
    text = f"{count(arrivals.steps.mean)}{spread}" if steps else duration_with_sd(arrivals.seconds)
    if math.isfinite(arrivals.after_steps):
        text = f"{count(arrivals.after_steps) if steps else duration(arrivals.after_seconds)} to {text}"
    total = len(arrivals.group.runs)
    return text if arrivals.all_reached else f"{text} ({arrivals.reached} of {total} seeds; the others: not reached)"


# -------------------------------------------------------------------------------------------------------------------- CSV

_PAIRS_HEAD = [
    *("what", "target", "method", "after_steps", "steps", "seconds", "reached"),
    *("against", "against_after_steps", "against_steps", "against_seconds", "against_reached"),
    *("speedup_steps", "speedup_seconds"),
]


def write_csv(comparison: Comparison, races: Sequence[Race], path: Path) -> Path:
    """Write means and sds to `path` in full precision, and every pair of every race beside it; return that path."""
    metrics = comparison.metrics if comparison.same_data else ()
    head = ["method", "seeds", *(f"{name}_{part}" for name in MEASURES for part in ("mean", "sd"))]
    head += [f"{name} {part}" for name in _column_names(comparison, metrics) for part in ("mean", "sd", "step")]
    rows: list[list[object]] = [[*head]]
    for group in comparison.groups:
        values = [comparison.measure(group, name) for name in MEASURES]
        cells = [_exact(cell) for value in values for cell in (value.mean, value.sd)]
        for metric in metrics:
            quality, step = comparison.measure(group, metric), comparison.quality_step(metric)
            cells += [_exact(quality.mean), _exact(quality.sd), "" if step is None or not quality.n else step]
        rows.append([group.label, len(group.runs), *cells])
    _write(path, rows)
    pairs: list[list[object]] = [[*_PAIRS_HEAD]]
    for race, what in zip(races, race_names(races), strict=True):
        for pair in race.pairs():
            both = [*_arrival_cells(pair.first), *_arrival_cells(pair.second)]
            pairs.append([what, race.target, *both, _exact(pair.in_steps), _exact(pair.in_seconds)])
    beside = path.with_name(f"{path.stem}-pairs{path.suffix or '.csv'}")
    _write(beside, pairs)
    return beside


def _arrival_cells(arrivals: Arrivals) -> list[object]:
    numbers = (arrivals.after_steps, arrivals.steps.mean, arrivals.seconds.mean)
    return [arrivals.group.label, *map(_exact, numbers), f"{arrivals.reached} of {len(arrivals.group.runs)}"]


def _column_names(comparison: Comparison, metrics: Sequence[Metric]) -> list[str]:
    """Name of each metric in CSV, with its whole protocol where others would have the same."""
    names = [f"{metric.name} n={metric.n} {metric.extractor}" for metric in metrics]
    full = [f"{metric.name} ({comparison.protocol(metric)})" for metric in metrics]
    return [name if names.count(name) == 1 else whole for name, whole in zip(names, full, strict=True)]


def _exact(value: float) -> object:
    return value if math.isfinite(value) else ""


def _write(path: Path, rows: Sequence[Sequence[object]]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    write_text(path, text.getvalue())
