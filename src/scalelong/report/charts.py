"""The curves of the page as plain numbers; chart.js draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalelong.report.compare import Comparison
from scalelong.report.groups import Group
from scalelong.report.quality import quality_series
from scalelong.runs.reader import Column, RunSeries
from scalelong.scaling.constant import constant_coefficients

POINTS_IN_ALL = 120_000  # numbers on the page, so that it stays small
Series = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """One pair of axes; `variants` are series by block, where the reader chooses."""

    id: str
    title: str
    x_label: str
    y_label: str
    series: list[Series]
    x_kind: str = "steps"  # steps, seconds, index
    log: bool = False
    top: float | None = None  # where the frame ends, if the curves begin above it
    variants: dict[str, list[Series]] | None = None
    chosen: str = ""  # the variant shown first
    names: list[str] | None = None  # what the whole numbers on the x axis stand for
    dots: bool = False
    from_zero: bool = False

    @property
    def drawn(self) -> bool:
        """Whether there is anything to draw."""
        everything = [*self.series, *(s for variant in (self.variants or {}).values() for s in variant)]
        return any(series["y"] for series in everything)


def make_charts(comparison: Comparison) -> dict[str, Chart]:
    """Every chart that has data, by its id."""
    blocks = max((len(run.blocks) for run in comparison.runs), default=0)
    curves = len(comparison.runs) * (2 * blocks + 8)
    limit = max(40, min(500, POINTS_IN_ALL // (2 * curves)))
    charts = [
        *_loss_charts(comparison, limit),
        *_quality_charts(comparison, limit),
        *_oscillation_charts(comparison, limit),
        _coefficient_chart(comparison),
        _throughput_chart(comparison, limit),
    ]
    return {chart.id: chart for chart in charts if chart.drawn}


def _loss_charts(comparison: Comparison, limit: int) -> list[Chart]:
    smoothed, raw = comparison.smoothed_loss, lambda run: run.column("train", "loss")
    make = [
        [_curve(i, group, smoothed, limit, in_seconds, raw) for i, group in enumerate(comparison.groups)]
        for in_seconds in (False, True)
    ]
    log, top = _frame([value for series in make[0] for value in series["y"]])
    shared: dict[str, Any] = {"y_label": "loss", "log": log, "top": top}
    return [
        Chart("loss-steps", "Loss against steps", "step", series=make[0], **shared),
        Chart("loss-time", "Loss against time", "training time", series=make[1], x_kind="seconds", **shared),
    ]


def _quality_charts(comparison: Comparison, limit: int) -> list[Chart]:
    charts = []
    for number, metric in enumerate(comparison.metrics if comparison.same_data else ()):
        for in_seconds in (False, True):
            series = [
                _curve(i, group, lambda run, m=metric: quality_series(run, m), limit, in_seconds)  # type: ignore[misc]
                for i, group in enumerate(comparison.groups)
            ]
            if sum(len(one["y"]) for one in series) < 2:
                continue  # a single point needs no axes
            what = ("time", "training time", "seconds") if in_seconds else ("steps", "step", "steps")
            charts.append(
                Chart(
                    f"quality-{number}-{what[0]}",
                    f"{metric.name} against {what[0]}",
                    what[1],
                    comparison.protocol(metric),
                    series,
                    what[2],
                    dots=True,
                )
            )
    return charts


def _oscillation_charts(comparison: Comparison, limit: int) -> list[Chart]:
    blocks = list(dict.fromkeys(block for run in comparison.runs for block in run.blocks))
    middle = next((run.middle_block for run in comparison.runs if run.blocks), "")
    charts = []
    for what, title in (("norm", "Feature norm"), ("gradient", "Gradient norm")):
        variants = {
            block: [
                _curve(i, group, lambda run, k=f"{what}/{block}": run.column("probe", k), limit)  # type: ignore[misc]
                for i, group in enumerate(comparison.groups)
            ]
            for block in blocks
        }
        values = [v for series in variants.get(middle, []) for v in series["y"] if v > 0]
        log = bool(values) and what == "gradient" and max(values) > 10 * min(values)
        label = "norm on a fixed batch" if what == "norm" else "norm of the gradient"
        charts.append(Chart(f"{what}-steps", title, "step", label, [], log=log, variants=variants, chosen=middle))
    for what, title in (("norm", "Feature oscillation by block"), ("gradient", "Gradient oscillation by block")):
        series = [_by_block(i, group, blocks, what, comparison.horizon) for i, group in enumerate(comparison.groups)]
        label = "relative oscillation"
        charts.append(
            Chart(f"{what}-blocks", title, "block", label, series, "index", names=blocks, dots=True, from_zero=True)
        )
    return charts


def _coefficient_chart(comparison: Comparison) -> Chart:
    series = []
    for i, group in enumerate(comparison.groups):
        values = group.coefficients()
        series.append(_points(i, range(1, len(values) + 1), values))
    learned = [g for g in comparison.groups if g.method == "ls" and g.coefficients()]
    if learned and not any(group.method == "cs" for group in comparison.groups):
        kappa = float(learned[0].config.scaling.kappa)
        reference = constant_coefficients(len(learned[0].coefficients()), kappa)
        series.append({**_points(-1, range(1, len(reference) + 1), reference), "label": f"cs {kappa:g} (not run)"})
    return Chart(
        "kappa",
        "Coefficient of each skip",
        "skip i (1 = outermost)",
        "kappa",
        series,
        "index",
        dots=True,
        from_zero=True,
    )


def _throughput_chart(comparison: Comparison, limit: int) -> Chart:
    series = [
        _curve(i, group, lambda run: run.column("train", "images_per_second"), limit)
        for i, group in enumerate(comparison.groups)
    ]
    return Chart("throughput", "Images per second", "step", "images/s", series)


# ------------------------------------------------------------------------------------------------- from runs to a curve


def _curve(
    index: int,
    group: Group,
    read: Callable[[RunSeries], Column],
    limit: int,
    in_seconds: bool = False,
    raw: Callable[[RunSeries], Column] | None = None,
) -> Series:
    """One method's curve: the run's own, with the raw values behind; or the mean over seeds within ± sd."""
    runs = [(run, *read(run)) for run in group.runs]
    runs = [(run, steps, values) for run, steps, values in runs if steps]
    if not runs:
        return _points(index, [], [])
    if len(runs) > 1:
        return _mean_curve(index, runs, limit, in_seconds)
    run, steps, values = runs[0]
    kept = thinned(values, limit)
    xs: Sequence[float] = run.seconds_at(steps) if in_seconds else steps
    series = _points(index, [xs[i] for i in kept], [values[i] for i in kept])
    if raw is not None:
        raw_steps, raw_values = raw(run)
        raw_xs: Sequence[float] = run.seconds_at(raw_steps) if in_seconds else raw_steps
        kept = thinned(raw_values, limit)
        series |= {"rawX": _rounded([raw_xs[i] for i in kept]), "rawY": _rounded([raw_values[i] for i in kept])}
    return series


def _mean_curve(
    index: int, runs: Sequence[tuple[RunSeries, list[int], list[float]]], limit: int, in_seconds: bool
) -> Series:
    """Mean and sd over runs at the steps of the first that all of them cover."""
    low, high = max(steps[0] for _, steps, _ in runs), min(steps[-1] for _, steps, _ in runs)
    grid = [step for step in runs[0][1] if low <= step <= high]
    if not grid:
        return _points(index, [], [])
    grid = [grid[i] for i in np.unique(np.linspace(0, len(grid) - 1, min(limit, len(grid))).round().astype(int))]
    values = np.array([np.interp(grid, steps, own) for _, steps, own in runs])
    mean, sd = values.mean(axis=0), values.std(axis=0, ddof=1)
    xs = np.mean([run.seconds_at(grid) for run, _, _ in runs], axis=0) if in_seconds else np.array(grid)
    return {**_points(index, xs, mean), "low": _rounded(mean - sd), "high": _rounded(mean + sd)}


def _by_block(index: int, group: Group, blocks: Sequence[str], what: str, upto: int) -> Series:
    points = []
    for position, block in enumerate(blocks):
        values = [run.oscillation(block, upto, what) for run in group.runs]
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            points.append((position, sum(finite) / len(finite)))
    return _points(index, [x for x, _ in points], [y for _, y in points])


def thinned(values: Sequence[float], limit: int) -> list[int]:
    """Indices that keep a curve's shape: the lowest and highest of each of limit / 2 stretches, and both ends."""
    if len(values) <= limit:
        return list(range(len(values)))
    kept = {0, len(values) - 1}
    for part in np.array_split(np.arange(len(values)), limit // 2 - 1):
        own = np.asarray(values)[part]
        kept |= {int(part[own.argmin()]), int(part[own.argmax()])}
    return sorted(kept)


def _points(index: int, xs: Any, ys: Any) -> Series:
    return {"group": index, "x": _rounded(xs), "y": _rounded(ys)}


def _rounded(values: Any) -> list[float]:
    return [float(f"{value:.5g}") if abs(value) < 99_999 else round(float(value)) for value in values]


def _frame(values: list[float]) -> tuple[bool, float | None]:
    """Whether to draw logarithmically, and where to cut off a high beginning."""
    if not values or min(values) <= 0:
        return False, None
    lowest, usual, highest = min(values), float(np.quantile(values, 0.85)), max(values)
    if usual > 10 * lowest:
        return True, None
    top = usual + 0.4 * (usual - lowest)
    return False, top if highest > top else None
