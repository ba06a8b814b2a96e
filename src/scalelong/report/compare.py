"""Several runs side by side: what each method reaches, and how soon it gets to a given loss or quality."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from scalelong.report.groups import Group, baseline, group_runs
from scalelong.report.quality import Metric, metrics_of, quality_series
from scalelong.report.series import RunSeries
from scalelong.report.statistics import (
    Difference,
    Estimate,
    estimate,
    first_at_most,
    paired_difference,
    ratio,
    running_mean,
    unpaired_difference,
)

MEASURES = {  # name -> how it is headed
    "final_loss": "final loss",
    "feature_oscillation": "feature oscillation",
    "gradient_oscillation": "gradient oscillation",
    "gradient_spread": "gradient-norm spread",
    "images_per_second": "images/s",
    "seconds": "training time",
}


@dataclass(frozen=True)
class Arrivals:
    """When the runs of one method came to the target: over the seeds that did."""

    group: Group
    steps: Estimate
    seconds: Estimate

    @property
    def reached(self) -> int:
        return self.steps.n

    @property
    def all_reached(self) -> bool:
        return self.reached == len(self.group.runs)


@dataclass(frozen=True)
class Pair:
    """How much sooner `first` arrives than `second`: second's steps over first's; nan unless every seed arrives."""

    first: Arrivals
    second: Arrivals
    in_steps: float
    in_seconds: float


@dataclass(frozen=True)
class Race:
    """Who comes to `target` when."""

    what: str
    target: float
    arrivals: tuple[Arrivals, ...]
    protocol: str  # how it was measured

    def pairs(self) -> list[Pair]:
        """Every pair, the later method against the earlier one, so that the untouched network is the yardstick."""
        return [_pair(later, earlier) for earlier, later in combinations(self.arrivals, 2)]


@dataclass(frozen=True)
class Comparison:
    """Groups of runs and their measures up to the last step that all of them have."""

    groups: tuple[Group, ...]
    horizon: int
    window: int
    same_data: bool
    same_loss: bool
    metrics: tuple[Metric, ...]

    @property
    def baseline(self) -> Group:
        return baseline(self.groups)

    @property
    def runs(self) -> list[RunSeries]:
        return [run for group in self.groups for run in group.runs]

    def per_seed(self, group: Group, measure: str) -> list[float]:
        """The measure of each run of a group."""
        return [_measured(run, measure, self.horizon) for run in group.runs]

    def measure(self, group: Group, measure: str) -> Estimate:
        """The measure over the seeds of a group."""
        return estimate(self.per_seed(group, measure))

    def smoothed_loss(self, run: RunSeries, upto: int | None = None) -> tuple[list[int], list[float]]:
        """The running mean of the loss over the last `window` steps."""
        steps, losses = run.column("train", "loss", upto)
        return steps, running_mean(steps, losses, self.window)

    def ranking(self, measure: str, largest_first: bool = False) -> list[Group]:
        """The groups that have the measure, best mean first."""
        known = [group for group in self.groups if math.isfinite(self.measure(group, measure).mean)]
        return sorted(known, key=lambda group: self.measure(group, measure).mean, reverse=largest_first)

    def difference(self, group: Group, other: Group, measure: str) -> Difference:
        """group - other over seeds, paired where both have the same seeds; without an error for single seeds."""
        return _difference(group, other, self.per_seed(group, measure), self.per_seed(other, measure))

    def quality_difference(self, group: Group, other: Group, metric: Metric) -> Difference:
        """group - other of the last values of a metric."""
        return _difference(group, other, self.quality_per_seed(group, metric), self.quality_per_seed(other, metric))

    def loss_difference(self, group: Group, other: Group) -> Difference:
        """Of the final losses: over the last records of two single runs, else over seeds, as any other measure."""
        if len(group.runs) > 1 or len(other.runs) > 1:
            return self.difference(group, other, "final_loss")
        (steps_a, a), (steps_b, b) = (g.runs[0].final_losses(self.horizon) for g in (group, other))
        same_order = group.seeds[0] == other.seeds[0] and steps_a == steps_b
        return paired_difference(a, b) if same_order else unpaired_difference(a, b)

    def loss_race(self, target: float | None = None) -> Race | None:
        """Steps and seconds to a loss; by default the worst final one, which all reach. None if losses do not compare."""
        curves = [[self.smoothed_loss(run, self.horizon) for run in group.runs] for group in self.groups]
        finals = [values[-1] for group in curves for _, values in group if values]
        if not self.same_loss or not finals:
            return None
        goal = max(finals) if target is None else target
        arrivals = [
            _arrivals(group, [first_at_most(*curve, goal, after=self.window) for curve in own])
            for group, own in zip(self.groups, curves, strict=True)
        ]
        return Race("loss", goal, tuple(arrivals), f"running mean over {self.window:,} steps")

    def metric_race(self, metric: Metric, target: float | None = None) -> Race | None:
        """Steps and seconds to a value of a metric; by default the worst last one. Methods without a measurement do not take
        part; None if it does not compare."""
        measured = [group for group in self.groups if self.quality(group, metric).n]
        if not self.same_data or not measured:
            return None
        curves = [[quality_series(run, metric) for run in group.runs] for group in measured]
        if target is None and all(len(steps) < 2 for curve in curves for steps, *_ in curve):
            return None  # measured once: when it was reached is not known
        goal = max(values[-1] for group in curves for _, values in group if values) if target is None else target
        arrivals = [
            _arrivals(group, [first_at_most(*curve, goal) for curve in own])
            for group, own in zip(measured, curves, strict=True)
        ]
        gaps = [after - before for curve in curves for steps, _ in curve for before, after in pairwise(steps)]
        coarse = [f"evaluations up to {max(gaps):,} steps apart, so arrivals are no finer"] if gaps else []
        return Race(metric.name, goal, tuple(arrivals), "; ".join([metric.protocol, *coarse]))

    def quality(self, group: Group, metric: Metric) -> Estimate:
        """The last value of a metric over the seeds of a group."""
        return estimate(self.quality_per_seed(group, metric))

    def quality_per_seed(self, group: Group, metric: Metric) -> list[float]:
        """The last value of a metric of each run, nan where it was not measured."""
        series = [quality_series(run, metric)[1] for run in group.runs]
        return [values[-1] if values else math.nan for values in series]


def compare_runs(runs: Sequence[RunSeries]) -> Comparison:
    """Group the runs and fix what they are compared over."""
    if not runs:
        raise ValueError("runs: none given; name the folders that training wrote")
    horizon = min(run.last_step for run in runs)
    data = {(run.config.data.name, run.config.data.split, run.config.data.image_size) for run in runs}
    loss = {(run.config.diffusion.process, run.config.diffusion.prediction) for run in runs}
    return Comparison(
        groups=tuple(group_runs(runs)),
        horizon=horizon,
        window=max(1, horizon // 20),
        same_data=len(data) == 1,
        same_loss=len(data) == len(loss) == 1,
        metrics=tuple(metrics_of(runs)),
    )


def _difference(group: Group, other: Group, a: list[float], b: list[float]) -> Difference:
    return paired_difference(a, b) if group.seeds == other.seeds else unpaired_difference(a, b)


def _measured(run: RunSeries, measure: str, upto: int) -> float:
    match measure:
        case "final_loss":
            return run.final_loss(upto)
        case "feature_oscillation":
            return run.oscillation(upto=upto)
        case "gradient_oscillation":
            return run.oscillation(upto=upto, what="gradient")
        case "gradient_spread":
            return run.gradient_spread(upto)
        case "images_per_second":
            return run.throughput(upto)
        case "seconds":
            return run.seconds_at([upto])[0]
    raise ValueError(f"measure: unknown {measure!r}; one of {', '.join(MEASURES)}")


def _arrivals(group: Group, steps: Sequence[int | None]) -> Arrivals:
    arrived = [(run, step) for run, step in zip(group.runs, steps, strict=True) if step is not None]
    return Arrivals(
        group,
        estimate([step for _, step in arrived]),
        estimate([run.seconds_at([step])[0] for run, step in arrived]),
    )


def _pair(first: Arrivals, second: Arrivals) -> Pair:
    if not (first.all_reached and second.all_reached):
        return Pair(first, second, math.nan, math.nan)
    return Pair(
        first,
        second,
        ratio(second.steps.mean, first.steps.mean),
        ratio(second.seconds.mean, first.seconds.mean),
    )
