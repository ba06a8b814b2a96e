"""Chart data of the report, drawn by templates/chart.js."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import methodcaller
from typing import Any

import numpy as np

from scalelong.report.compare import Comparison
from scalelong.report.groups import Group
from scalelong.report.numbers import estimate
from scalelong.runs.reader import NOISE_BINS, Column, Run

POINTS_IN_ALL = 120_000  # numbers on the page, so that it stays small
Series = dict[str, Any]
Read = Callable[[Run], Column]


@dataclass(frozen=True)
class Chart:
    """One pair of axes; `variants` are series by block, chosen by the reader."""

    id: str
    title: str
    x_label: str
    y_label: str
    series: list[Series]
    x_kind: str = "steps"  # steps, seconds, index, quality (falls from left to right)
    log: bool = False
    top: float | None = None  # upper limit of the y axis, if the curves begin above it
    variants: dict[str, list[Series]] | None = None
    chosen: str = ""  # the variant shown first
    names: list[str] | None = None  # tick labels of the x axis
    dots: bool = False
    from_zero: bool = False


def make_charts(comparison: Comparison) -> dict[str, Chart]:
    """Every chart that has data, by id."""
    blocks = max((len(run.blocks) for run in comparison.runs), default=0)
    curves = len(comparison.runs) * (2 * blocks + 8)
    limit = max(40, min(500, POINTS_IN_ALL // (2 * curves)))
    speed = _curves(comparison, methodcaller("column", "train", "images_per_second"), limit)
    charts = [
        *_loss_charts(comparison, limit),
        *_validation_charts(comparison, limit),
        *_quality_charts(comparison, limit),
        *_speedup_charts(comparison),
        *_oscillation_charts(comparison, limit),
        _coefficient_chart(comparison),
        Chart("throughput", "Images per second", "step", "images/s", speed),
    ]
    shown = {chart.id: [*chart.series, *chain(*(chart.variants or {}).values())] for chart in charts}
    return {chart.id: chart for chart in charts if any(series["y"] for series in shown[chart.id])}


def _loss_charts(comparison: Comparison, limit: int) -> list[Chart]:
    raw = methodcaller("column", "train", "loss")
    steps, seconds = (_curves(comparison, comparison.plotted_loss, limit, timed, raw) for timed in (False, True))
    log, top = _y_axis([value for series in steps for value in series["y"]])
    return [
        Chart("loss-steps", "Loss against steps", "step", "loss", steps, log=log, top=top),
        Chart("loss-time", "Loss against time", "training time", "loss", seconds, "seconds", log=log, top=top),
    ]


def _validation_charts(comparison: Comparison, limit: int) -> list[Chart]:
    """The validation loss against steps, and at the last common record by bin of noise relative to the baseline's."""
    if not comparison.same_validation:
        return []
    curves = _curves(comparison, methodcaller("column", "validation", "loss"), limit)
    log, top = _y_axis([value for series in curves for value in series["y"]])
    gaps = [[100 * gap for gap in comparison.noise_gaps(group)] for group in comparison.groups]
    relative = [_points(i, range(len(own)), own) for i, own in enumerate(gaps)]
    names = [f"bin {i}" for i in range(1, NOISE_BINS + 1)]
    by_noise = ("Validation loss by noise", "tenth of the training times (1: least noise)", "% against the baseline")
    return [
        Chart("validation-steps", "Validation loss", "step", "loss", curves, log=log, top=top),
        Chart("validation-bins", *by_noise, relative, "index", names=names, dots=True),
    ]


def _quality_charts(comparison: Comparison, limit: int) -> list[Chart]:
    charts = []
    for i, metric in enumerate(comparison.metrics if comparison.same_data else ()):
        for what, x_label, kind in (("steps", "step", "steps"), ("time", "training time", "seconds")):
            series = _curves(comparison, methodcaller("quality", metric), limit, kind == "seconds")
            if sum(len(one["y"]) for one in series) > 1:
                title, y_label = f"{metric.name} against {what}", comparison.protocol(metric)
                charts.append(Chart(f"quality-{i}-{what}", title, x_label, y_label, series, kind, dots=True))
    return charts


def _speedup_charts(comparison: Comparison) -> list[Chart]:
    """Steps of the baseline divided by those of the method against quality, with a band over seeds and a crossover mark."""
    charts = []
    for n, (what, own) in enumerate(comparison.speed_ups().items()):
        series = []
        for group, found in own:
            grid = sorted(found.qualities)  # chart.js wants rising x, and draws better qualities to the right
            values = [found.at(quality) for quality in grid]
            if grid:
                one = _points(comparison.groups.index(group), grid, [value.mean for value in values])
                if len(found.pairs) > 1:
                    sds = [value.sd if math.isfinite(value.sd) else 0.0 for value in values]
                    one["low"] = _rounded(v.mean - sd for v, sd in zip(values, sds, strict=True))
                    one["high"] = _rounded(v.mean + sd for v, sd in zip(values, sds, strict=True))
                if 0 < found.lead.behind_until < found.lead.last:
                    ends = [np.interp(found.lead.behind_until, b.steps, b.values) for _, b in found.pairs]
                    one["marks"] = _rounded([float(np.mean(ends))])
                series.append(one)
        if series:
            ends = [min(one["x"][0] for one in series), max(one["x"][-1] for one in series)]
            series.append({**_points(-1, ends, [1.0, 1.0]), "label": comparison.baseline.label})
            title, x_label = f"Speed-up by {what}", f"{what}, better to the right"
            charts.append(Chart(f"speedup-{n}", title, x_label, "times as fast in steps", series, "quality"))
    return charts


def _oscillation_charts(comparison: Comparison, limit: int) -> list[Chart]:
    blocks = list(dict.fromkeys(block for run in comparison.runs for block in run.blocks))
    middle = next((run.middle_block for run in comparison.runs if run.blocks), "")
    charts = []
    kinds = (("norm", "Feature", "norm on a fixed batch"), ("gradient", "Gradient", "norm of the gradient"))
    for what, name, label in kinds:
        columns = {block: methodcaller("column", "probe", f"{what}/{block}") for block in blocks}
        variants = {block: _curves(comparison, read, limit) for block, read in columns.items()}
        values = [v for series in variants.get(middle, []) for v in series["y"] if v > 0]
        log = bool(values) and what == "gradient" and max(values) > 10 * min(values)
        series = [_by_block(i, group, blocks, what, comparison.horizon) for i, group in enumerate(comparison.groups)]
        by_block = (f"{name} oscillation by block", "block", "relative oscillation", series, "index")
        charts += [
            Chart(f"{what}-steps", f"{name} norm", "step", label, [], log=log, variants=variants, chosen=middle),
            Chart(f"{what}-blocks", *by_block, names=blocks, dots=True, from_zero=True),
        ]
    return charts


def _coefficient_chart(comparison: Comparison) -> Chart:
    values = [group.coefficients() for group in comparison.groups]
    series = [_points(i, range(1, len(own) + 1), own) for i, own in enumerate(values)]
    learned = next((g for g in comparison.groups if g.method == "ls" and g.coefficients()), None)
    if learned and not any(group.method == "cs" for group in comparison.groups):
        kappa, skips = learned.config.scaling.kappa, range(1, len(learned.coefficients()) + 1)
        constant = _points(-1, skips, [kappa ** (i - 1) for i in skips])  # CS, Eq. 8
        series.append({**constant, "label": f"cs {kappa:g} (not run)"})
    labels = ("Coefficient of each skip", "skip i (1 = outermost)", "kappa")
    return Chart("kappa", *labels, series, "index", dots=True, from_zero=True)


# ------------------------------------------------------------------------------------------------- from runs to a curve


def _curves(runs: Comparison, read: Read, limit: int, timed: bool = False, raw: Read | None = None) -> list[Series]:
    """One curve per method."""
    return [_curve(i, group, read, limit, timed, raw) for i, group in enumerate(runs.groups)]


def _curve(index: int, group: Group, read: Read, limit: int, timed: bool, raw: Read | None) -> Series:
    """A single run with its raw values, or the mean over seeds ± sd."""
    runs = [(run, column) for run in group.runs if (column := read(run))[0]]
    if not runs:
        return _points(index, [], [])
    if len(runs) > 1:
        return _mean_curve(index, runs, limit, timed)
    run, column = runs[0]
    series = _points(index, *_thinned_column(run, column, limit, timed))
    if raw is not None:
        xs, ys = _thinned_column(run, raw(run), limit, timed)
        series |= {"rawX": _rounded(xs), "rawY": _rounded(ys)}
    return series


def _thinned_column(run: Run, column: Column, limit: int, timed: bool) -> tuple[list[float], list[float]]:
    steps, values = column
    xs: Sequence[float] = run.seconds_at(steps) if timed else steps
    kept = thinned(values, limit)
    return [xs[i] for i in kept], [values[i] for i in kept]


def _mean_curve(index: int, runs: Sequence[tuple[Run, Column]], limit: int, timed: bool) -> Series:
    """Mean and sd over runs at the steps of the first run that all of them cover."""
    first, last = max(steps[0] for _, (steps, _) in runs), min(steps[-1] for _, (steps, _) in runs)
    grid = [step for step in runs[0][1][0] if first <= step <= last]
    if not grid:
        return _points(index, [], [])
    grid = [grid[i] for i in np.unique(np.linspace(0, len(grid) - 1, min(limit, len(grid))).round().astype(int))]
    values = np.array([np.interp(grid, *column) for _, column in runs])
    mean, sd = values.mean(axis=0), values.std(axis=0, ddof=1)
    low = np.where(mean > sd, mean - sd, values.min(axis=0))  # norms and losses are positive, and axes logarithmic
    xs = np.mean([run.seconds_at(grid) for run, _ in runs], axis=0) if timed else np.array(grid)
    return {**_points(index, xs, mean), "low": _rounded(low), "high": _rounded(mean + sd)}


def _by_block(index: int, group: Group, blocks: Sequence[str], what: str, upto: int) -> Series:
    means = [estimate([run.oscillation(block, upto, what) for run in group.runs]).mean for block in blocks]
    known = [i for i, mean in enumerate(means) if math.isfinite(mean)]
    return _points(index, known, [means[i] for i in known])


def thinned(values: Sequence[float], limit: int) -> list[int]:
    """Indices that preserve a curve's shape: minimum and maximum of limit / 2 intervals, and both ends."""
    if len(values) <= limit:
        return list(range(len(values)))
    kept = {0, len(values) - 1}
    every = np.asarray(values)
    for part in np.array_split(np.arange(len(values)), limit // 2 - 1):
        own = every[part]
        kept |= {int(part[own.argmin()]), int(part[own.argmax()])}
    return sorted(kept)


def _points(index: int, xs: Any, ys: Any) -> Series:
    return {"group": index, "x": _rounded(xs), "y": _rounded(ys)}


def _rounded(values: Any) -> list[float]:
    return [float(f"{value:.5g}") if abs(value) < 99_999 else round(float(value)) for value in values]


def _y_axis(values: list[float]) -> tuple[bool, float | None]:
    """Whether the axis is logarithmic, and an upper limit that cuts off a high beginning."""
    if not values or min(values) <= 0:
        return False, None
    lowest, usual, highest = min(values), float(np.quantile(values, 0.85)), max(values)
    if usual > 10 * lowest:
        return True, None
    top = usual + 0.4 * (usual - lowest)
    return False, top if highest > top else None
