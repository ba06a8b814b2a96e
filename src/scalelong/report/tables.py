"""Comparison tables and caveats for the terminal, CSV and the report."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scalelong.files import write_text
from scalelong.report import sentences, speedup
from scalelong.report.compare import MEASURES, Arrival, Arrivals, Comparison, Race
from scalelong.report.groups import Group, differing_settings, seeds_text, trained_together
from scalelong.report.numbers import (
    UNKNOWN,
    UNRESOLVED,
    at_steps,
    count,
    duration,
    duration_with_sd,
    joined,
    number,
    shortened,
    times,
    with_sd,
)
from scalelong.runs import METRICS
from scalelong.runs.reader import Run
from scalelong.runs.records import Metric

Rows = list[list[str]]  # the first row is the head


def summary(comparison: Comparison, races: Sequence[Race], refused: Sequence[str] = ()) -> str:
    """Tables, findings and caveats for the terminal."""
    parts = [aligned(measures_table(comparison))]
    for race in [race for race in races if len(race.arrivals) > 1]:
        why = race.protocol if race.asked else f"{race.protocol}; the worst value that any run ends with"
        parts.append(f"To reach {race.what} {number(race.target)} ({why}):")
        parts += [aligned(arrivals_table(race)), aligned(pairs_table(race))]
    for what, own in comparison.speed_ups().items():
        parts.append(f"Speed-up in steps over {comparison.baseline.label}, by {what}:")
        parts.append(aligned(speedup.table([(group.label, one) for group, one in own], comparison.baseline.label)))
    parts.append("\n".join(sentences.speed_ups(comparison)))
    found = [text for _, text in sentences.findings(comparison, races[0] if races else None)]
    parts.append("\n".join([*found, sentences.seeds(comparison), *notes(comparison, refused)]))
    return "\n\n".join(part for part in parts if part)


@dataclass(frozen=True)
class HeatMap:
    """The linear probe of a group, of its first seed that has one: rows are blocks, columns noise levels."""

    caption: str
    levels: list[str]
    rows: list[tuple[str, list[tuple[str, int]]]]  # block, (accuracy in %, shade in %)


def linear_probes(comparison: Comparison) -> list[HeatMap]:
    """A heat map for each method that was probed; the shades of all are on one scale."""
    chosen = [(group, next((run for run in group.runs if run.linear_probes), None)) for group in comparison.groups]
    found = [(group, run.seed, run.linear_probes[-1]) for group, run in chosen if run is not None]
    values = [value for *_, record in found for row in record["held_out"] for value in row]
    low, span = min(values, default=0), max(max(values, default=1) - min(values, default=0), 1e-9)
    maps = []
    for group, seed, record in found:
        floors = {"untrained": record.get("random_network"), "pixels": record.get("pixels")}
        below = "".join(f", {name} {100 * value:.1f}%" for name, value in floors.items() if value is not None)
        best = f"{record['block']} at noise {record['level']:.2g}"
        test = f"{100 * record['accuracy']:.1f}% on the test images ({record['protocol']}; {best}{below})"
        rows = [
            (block, [(f"{100 * value:.1f}", round(90 * (value - low) / span)) for value in row])
            for block, row in zip(record["blocks"], record["held_out"], strict=True)
        ]
        caption = f"{group.label}, seed {seed}, step {count(record['step'])}: {test}"
        maps.append(HeatMap(caption, [f"{level:.2g}" for level in record["noise"]], rows))
    return maps


def measures_table(comparison: Comparison) -> Rows:
    """Mean ± sd over seeds of every measure that some run has."""
    shown = [name for name in MEASURES if comparison.ranking(name)]
    metrics = comparison.metrics if comparison.same_data else ()
    rows = [["method", "trained with", *(MEASURES[name][0] for name in shown), *map(comparison.heading, metrics)]]
    columns: list[str | Metric] = [*shown, *metrics]
    for group in comparison.groups:
        cells = [_cell(comparison, group, measure) for measure in columns]
        rows.append([group.label, seeds_text(group.seeds), *cells])
    return rows


def arrivals_table(race: Race) -> Rows:
    """Steps and seconds of each method to the target, as an interval where only evaluations are known."""
    rows = [[a.group.label, _when(a, a.steps, count), _when(a, a.seconds, duration)] for a in race.arrivals]
    return [["method", "steps (between evaluations)" if race.sparse else "steps", "time"], *rows]


def pairs_table(race: Race) -> Rows:
    """The speed-up of every pair."""
    rows = [["method", "against", "speed-up in steps", "speed-up in time"]]
    for pair in race.pairs():
        a, b = pair.first, pair.second
        in_steps = times(pair.in_steps) if a.steps.resolved(b.steps) else UNRESOLVED
        in_time = times(pair.in_seconds) if a.seconds.resolved(b.seconds) else UNRESOLVED
        if late := [arrivals.group.label for arrivals in (a, b) if not arrivals.all_reached]:
            in_steps, in_time = f"{' and '.join(late)}: not reached", UNKNOWN
        rows.append([a.group.label, b.group.label, in_steps, in_time])
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
    """Target of each race, with its protocol if ambiguous."""
    called = Counter(race.what for race in races)
    return [race.what if called[race.what] == 1 else f"{race.what} ({race.protocol})" for race in races]


def _cell(comparison: Comparison, group: Group, measure: str | Metric) -> str:
    """A metric at the last common step, or else each last value with its step."""
    if isinstance(measure, Metric) and comparison.quality_step(measure) is None:
        return at_steps(comparison.last_qualities(group, measure))
    value = comparison.measure(group, measure)
    if measure == "seconds":
        return duration_with_sd(value)
    return with_sd(value, 4 if isinstance(measure, Metric) or measure == "final_loss" else 3)


def _when(arrivals: Arrivals, when: Arrival, written: Callable[[float], str]) -> str:
    if not arrivals.reached:
        return "not reached"
    if written is duration:
        text = duration_with_sd(when)
    else:
        text = f"{written(when.mean)} ± {written(when.sd)}" if math.isfinite(when.sd) else written(when.mean)
    if math.isfinite(when.after):
        text = f"{written(when.after)} to {text}"
    total = len(arrivals.group.runs)
    return text if arrivals.all_reached else f"{text} ({arrivals.reached} of {total} seeds; the others: not reached)"


# -------------------------------------------------------------------------------------------------------------------- CSV

_PAIRS_HEAD = [
    *("what", "target", "method", "after_steps", "steps", "seconds", "reached"),
    *("against", "against_after_steps", "against_steps", "against_seconds", "against_reached"),
    *("speedup_steps", "speedup_seconds"),
]


def write_csv(comparison: Comparison, races: Sequence[Race], path: Path) -> Path:
    """Write means and sds to `path` in full precision, and every pair of every race next to it; return that path."""
    metrics = comparison.metrics if comparison.same_data else ()
    head = ["method", "seeds", *(f"{name}_{part}" for name in MEASURES for part in ("mean", "sd"))]
    head += [f"{name} {part}" for name in _column_names(comparison, metrics) for part in ("mean", "sd", "step")]
    rows: list[list[object]] = [[*head]]
    for group in comparison.groups:
        values = [comparison.measure(group, name) for name in MEASURES]
        cells: list[object] = [cell for value in values for cell in (value.mean, value.sd)]
        for metric in metrics:
            quality, step = comparison.measure(group, metric), comparison.quality_step(metric)
            cells += [quality.mean, quality.sd, "" if step is None or not quality.n else step]
        rows.append([group.label, len(group.runs), *cells])
    _write(path, rows)
    pairs: list[list[object]] = [[*_PAIRS_HEAD]]
    for race, what in zip(races, race_names(races), strict=True):
        for pair in race.pairs():
            both = [*_arrival_cells(pair.first), *_arrival_cells(pair.second)]
            pairs.append([what, race.target, *both, pair.in_steps, pair.in_seconds])
    beside = path.with_name(f"{path.stem}-pairs{path.suffix or '.csv'}")
    _write(beside, pairs)
    return beside


def _arrival_cells(arrivals: Arrivals) -> list[object]:
    numbers = (arrivals.steps.after, arrivals.steps.mean, arrivals.seconds.mean)
    return [arrivals.group.label, *numbers, f"{arrivals.reached} of {len(arrivals.group.runs)}"]


def _column_names(comparison: Comparison, metrics: Sequence[Metric]) -> list[str]:
    """Name of each metric in CSV, with its whole protocol where others would have the same."""
    names = [f"{metric.name} n={metric.n} {metric.extractor}" for metric in metrics]
    full = [f"{metric.name} ({comparison.protocol(metric)})" for metric in metrics]
    return [name if names.count(name) == 1 else whole for name, whole in zip(names, full, strict=True)]


def _write(path: Path, rows: Rows | list[list[object]]) -> None:
    text = io.StringIO(newline="")
    known = [["" if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in row] for row in rows]
    csv.writer(text).writerows(known)
    write_text(path, text.getvalue())


# ---------------------------------------------------------------------------------------------------------------- caveats


def notes(comparison: Comparison, refused: Sequence[str] = ()) -> list[str]:
    """One sentence for each caveat: damaged records, gaps, and what cannot be compared."""
    runs, metrics = comparison.runs, comparison.metrics
    found = [f"Left out: {why}." for why in refused]
    found += [f"Left out: {run.folder}: {_divergence(run)}" for run in comparison.left_out]
    if not comparison.same_data:
        found.append(
            f"The runs were trained on different data ({joined(_data_names(runs))}): losses, oscillations and quality "
            "cannot be compared between them, so none of them is ranked and the quality is not plotted."
        )
    elif not comparison.same_loss:
        kinds = sorted({_objective(run) for run in runs})
        found.append(f"The runs minimize different losses ({joined(kinds)}): losses cannot be compared between them.")
    if other := _other_settings(comparison):
        found.append(f"Besides their scaling, the methods differ in {joined(other)}, which may explain differences.")
    if len(metrics) > 1:
        kinds = [f"{metric.name} ({comparison.protocol(metric)})" for metric in metrics]
        found.append(f"Quality was measured in {len(kinds)} ways that are not comparable: {joined(kinds)}.")
    found += [f"{run.folder}: {text}" for run in runs for text in _about_run(run)]
    if len({run.last_step for run in runs}) > 1:
        step = count(comparison.horizon)
        found.append(f"The runs have different lengths: numbers are taken up to step {step}, the last common one.")
    found += [text for m in metrics if comparison.same_data for text in _about_metric(comparison, m)]
    without_probe = [str(run.folder) for run in runs if not run.probe]
    if 0 < len(without_probe) < len(runs):
        found.append(f"No oscillation was recorded in {joined(without_probe)}.")
    if len(intervals := sorted({run.probe_interval for run in runs if run.probe_interval})) > 1:
        steps = joined([count(interval) for interval in intervals])
        found.append(f"The blocks were probed at different intervals ({steps} steps): oscillations are not ranked.")
    if len(devices := sorted({str(record.get("device")) for run in runs for record in run.start})) > 1:
        found.append(f"The runs ran on different devices ({joined(devices)}): seconds are not comparable.")
    if trained_together(runs):
        found.append("Some of the runs trained at the same time: if they shared a machine, seconds are not comparable.")
    for group in comparison.groups:
        if repeated := [str(seed) for seed, n in Counter(group.seeds).items() if n > 1]:
            found.append(
                f"{group.label}: seed {joined(repeated)} was given more than once; repeats are not independent."
            )
    return found


def _other_settings(comparison: Comparison) -> list[str]:
    """Settings of the training that differ between differently scaled methods, without those that are noted elsewhere."""
    differing = differing_settings([group.config for group in comparison.groups])
    if not any(key.startswith("scaling.") for key in differing):
        return []  # the labels name them
    noted = ("scaling", "data", "diffusion", "sampling")
    return [key for key in differing if key == "data.flip" or key.partition(".")[0] not in noted]


def _objective(run: Run) -> str:
    diffusion = run.config.diffusion
    weighting = f", min-SNR {diffusion.min_snr_gamma:g}" if diffusion.min_snr_gamma else ""
    return f"{diffusion.process}, predicting {diffusion.prediction or 'the default'}{weighting}"


def _about_run(run: Run) -> list[str]:
    found, last, planned = [], run.last_step, run.config.training.steps
    if n := run.damaged_lines:
        found.append(f"{n} damaged line{'s' if n > 1 else ''} in {METRICS}, ignored.")
    if run.diverged is not None:
        found.append(_divergence(run))
    elif last < planned:
        found.append(f"at step {count(last)} of {count(planned)}.")
    if lost := len(run.train) - len(run.column("train", "loss")[0]):
        found.append(f"{lost} of {len(run.train)} records have no finite loss; they are not plotted.")
    steps, seconds = run.column("train", "seconds")
    if len(steps) > 2 and seconds[-1] > 0:  # start-up: what the first record took beyond the usual time of its steps
        usual = (seconds[-1] - seconds[0]) / max(steps[-1] - steps[0], 1)
        if (share := (seconds[0] - steps[0] * usual) / seconds[-1]) > 0.1:
            found.append(f"{share:.0%} of its time was start-up, so its timing is unreliable.")
    if skipped := max(run.column("train", "skipped")[1], default=0):
        found.append(f"{skipped:.0f} steps were skipped because the loss or gradient was not finite.")
    return found


def _divergence(run: Run) -> str:
    step, planned = count(run.diverged or 0), count(run.config.training.steps)
    return f"diverged at step {step} of {planned} (non-finite loss or gradient, or too many spikes)."


def _about_metric(comparison: Comparison, metric: Metric) -> list[str]:
    found, name, step = [], comparison.heading(metric), comparison.quality_step(metric)
    last = {group.label: comparison.last_qualities(group, metric) for group in comparison.groups}
    if without := [label for label, values in last.items() if not values]:
        found.append(f"{name} was not measured for {joined(without)}.")
    if step is None:
        found.append(f"{name} was not measured at a step common to all runs: its values are shown with their steps.")
    elif any(at > step for values in last.values() for at, _ in values):
        found.append(f"{name} is compared at step {count(step)}, the last step common to all runs.")
    return found


def _data_names(runs: Sequence[Run]) -> list[str]:
    """Names of the data, with fingerprints where different data have one name."""
    prints: dict[str, set[str]] = {}
    for run in runs:
        data = run.config.data
        size = f" at {data.image_size} px" if data.image_size else ""
        split = f" ({data.split})" if data.split != "train" else ""
        prints.setdefault(f"{data.name}{size}{split}", set()).add(run.data)
    short = shortened(each for known in prints.values() for each in known)
    return sorted(
        name if len(known) == 1 else f"{name}, fingerprint {short[each] or 'not recorded'}"
        for name, known in prints.items()
        for each in known
    )
