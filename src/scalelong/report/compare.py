"""Compare runs: measures per method, and steps and seconds to reach a given loss or quality."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import methodcaller

from scalelong.errors import unknown_name
from scalelong.report.groups import Group, group_runs, headings, metrics_of, protocols
from scalelong.report.numbers import Difference, Estimate, centred_mean, difference, estimate, running_mean
from scalelong.report.speedup import Curve, SpeedUp, speed_up
from scalelong.runs.reader import Column, Run
from scalelong.runs.records import Metric

MEASURES: dict[str, tuple[str, Callable[[Run, int], float]]] = {  # name -> heading, and value up to a step
    "final_loss": ("final loss", lambda run, upto: run.final_loss(upto)),
    "feature_oscillation": ("feature oscillation", lambda run, upto: run.oscillation(upto=upto)),
    "gradient_oscillation": ("gradient oscillation", lambda run, upto: run.oscillation(upto=upto, what="gradient")),
    "gradient_spread": ("gradient-norm spread", lambda run, upto: run.gradient_spread(upto)),
    "images_per_second": ("images/s", lambda run, upto: run.throughput(upto)),
    "seconds": ("training time", lambda run, upto: run.seconds_at([upto])[0]),
}


@dataclass(frozen=True)
class Arrival(Estimate):
    """Steps or seconds to the target, over the seeds that reached it."""

    after: float = math.nan  # mean over the evaluations before; nan for the dense loss curve

    def resolved(self, other: Arrival) -> bool:
        """False if the intervals between evaluations overlap, so that either may be the earlier one."""
        return not (self.after < other.mean and other.after < self.mean)


@dataclass(frozen=True)
class Arrivals:
    """When the runs of one method reached the target."""

    group: Group
    steps: Arrival
    seconds: Arrival

    @property
    def reached(self) -> int:
        return self.steps.n

    @property
    def all_reached(self) -> bool:
        return self.reached == len(self.group.runs)


@dataclass(frozen=True)
class Pair:
    """How much sooner `first` reaches the target than `second`."""

    first: Arrivals
    second: Arrivals

    @property
    def in_steps(self) -> float:
        """second's steps over first's; nan unless every seed reached the target and the order is resolved."""
        return self._ratio(self.first.steps, self.second.steps)

    @property
    def in_seconds(self) -> float:
        """As `in_steps`, for time."""
        return self._ratio(self.first.seconds, self.second.seconds)

    def _ratio(self, first: Arrival, second: Arrival) -> float:
        known = self.first.all_reached and self.second.all_reached and first.resolved(second) and first.mean
        return second.mean / first.mean if known else math.nan


@dataclass(frozen=True)
class Race:
    """When each method reaches `target`."""

    what: str
    target: float
    arrivals: tuple[Arrivals, ...]
    protocol: str  # how it was measured
    asked: bool = False  # True if the user gave the target

    @property
    def sparse(self) -> bool:
        """True if arrivals are only known to lie between two evaluations."""
        return any(math.isfinite(arrivals.steps.after) for arrivals in self.arrivals)

    def pairs(self) -> list[Pair]:
        """Every pair, the later method against the earlier one, so that the unscaled network is the reference."""
        return [Pair(later, earlier) for earlier, later in combinations(self.arrivals, 2)]


@dataclass(frozen=True)
class Comparison:
    """Groups of runs and their measures up to the last common step.

    >>> Comparison((), horizon=100, window=5, same_data=True, same_loss=True, same_probes=True, metrics=()).races()
    []
    """

    groups: tuple[Group, ...]
    horizon: int
    window: int
    same_data: bool
    same_loss: bool
    same_probes: bool  # False if oscillations do not compare
    metrics: tuple[Metric, ...]
    left_out: tuple[Run, ...] = ()  # diverged runs

    @property
    def baseline(self) -> Group:
        """The reference group: the unscaled network, or else the first."""
        return next((group for group in self.groups if group.method == "none"), self.groups[0])

    @property
    def others(self) -> list[Group]:
        """All groups but the baseline."""
        return [group for group in self.groups if group is not self.baseline]

    @property
    def same_validation(self) -> bool:
        """True if all validation losses use the same images, times and noise."""
        return self.same_loss and len(frozenset().union(*(run.validated_on for run in self.runs))) < 2

    @property
    def runs(self) -> list[Run]:
        return [run for group in self.groups for run in group.runs]

    def per_seed(self, group: Group, measure: str | Metric) -> list[float]:
        """A measure of each run of a group; a metric is taken at the step where it is compared."""
        if isinstance(measure, Metric):
            step = self.quality_step(measure)
            series = [dict(zip(*run.quality(measure), strict=True)) for run in group.runs]
            return [math.nan if step is None else values.get(step, math.nan) for values in series]
        if measure not in MEASURES:
            raise unknown_name("measure", measure, MEASURES)
        return [MEASURES[measure][1](run, self.horizon) for run in group.runs]

    def measure(self, group: Group, measure: str | Metric) -> Estimate:
        """A measure or metric over the seeds of a group."""
        return estimate(self.per_seed(group, measure))

    def plotted_loss(self, run: Run) -> Column:
        """Mean of the loss over `window` steps around each one."""
        steps, losses = run.column("train", "loss")
        return steps, centred_mean(steps, losses, self.window)

    def smoothed_loss(self, run: Run, upto: int | None = None) -> Column:
        """Running mean of the loss over the last `window` steps."""
        steps, losses = run.column("train", "loss", upto)
        return steps, running_mean(steps, losses, self.window)

    def noise_gaps(self, group: Group) -> list[float]:
        """Validation loss in each bin of noise against the baseline's, (a - b) / b of the means over seeds.

        All are taken at the last step at which every validated run has a record.
        """
        validated = [set(steps) for run in self.runs if (steps := run.column("validation", "loss")[0])]
        common = max(set.intersection(*validated), default=None) if validated else None
        if common is None or not self.same_validation:
            return []
        both = [[bins for run in g.runs if (bins := run.noise_bins(common))] for g in (group, self.baseline)]
        if not all(both):
            return []
        mine, theirs = ([sum(column) / len(column) for column in zip(*own, strict=True)] for own in both)
        return [a / b - 1 for a, b in zip(mine, theirs, strict=True)]

    def ranking(self, measure: str) -> list[Group]:
        """The groups that have the measure, lowest mean first."""
        known = [group for group in self.groups if math.isfinite(self.measure(group, measure).mean)]
        return sorted(known, key=lambda group: self.measure(group, measure).mean)

    def difference(self, group: Group, other: Group, measure: str | Metric) -> Difference:
        """group - other over seeds, paired where both have the same seeds; without an error for single seeds.

        The final losses of two single runs are compared over their last records.
        """
        if measure == "final_loss" and len(group.runs) == len(other.runs) == 1:
            (steps_a, a), (steps_b, b) = (g.runs[0].final_losses(self.horizon) for g in (group, other))
            paired = group.seeds == other.seeds and steps_a == steps_b
        else:
            a, b = self.per_seed(group, measure), self.per_seed(other, measure)
            paired = group.seeds == other.seeds
        return difference(a, b, paired)

    def speed_ups(self) -> dict[str, list[tuple[Group, SpeedUp]]]:
        """The speed-up curve of each method over the baseline, by what it is measured in, where it can be computed."""
        columns: dict[str, Callable[[Run], Column]] = {}
        if self.same_validation:
            columns["validation loss"] = methodcaller("column", "validation", "loss")
        if self.same_loss:
            columns["loss"] = self._full_windows
        if self.same_data:
            columns |= {self.heading(metric): methodcaller("quality", metric) for metric in self.metrics}
        found: dict[str, list[tuple[Group, SpeedUp]]] = {}
        for name, read in columns.items():
            for group in self.others:
                pairs = [(_curve(a, read(a)), _curve(b, read(b))) for a, b in paired(group, self.baseline)]
                if (one := speed_up(pairs)) is not None:
                    found.setdefault(name, []).append((group, one))
        return found

    def _full_windows(self, run: Run) -> Column:
        """Running mean of the loss where its window is full."""
        steps, values = self.smoothed_loss(run)
        full = next((i for i, step in enumerate(steps) if step >= self.window), 0)
        return steps[full:], values[full:]

    def races(self, loss: float | None = None, metric_value: float | None = None) -> list[Race]:
        """The race to a loss and those to a value of each metric, as far as they compare."""
        metrics = [self.metric_race(metric, metric_value) for metric in self.metrics]
        return [race for race in (self.loss_race(loss), *metrics) if race is not None]

    def loss_race(self, target: float | None = None) -> Race | None:
        """Steps and seconds to a loss; by default the worst final one, which all reach. None if losses do not compare."""
        groups = self.groups if self.same_loss else ()
        curves = [[self.smoothed_loss(run, self.horizon) for run in group.runs] for group in groups]
        return _race("loss", groups, curves, target, f"running mean over {self.window:,} steps", self.window)

    def metric_race(self, metric: Metric, target: float | None = None) -> Race | None:
        """Steps and seconds to a value of a metric, of the methods that have it; by default the worst last value."""
        measured = [group for group in self.groups if self.same_data and self.last_qualities(group, metric)]
        curves = [[run.quality(metric) for run in group.runs] for group in measured]
        if target is None and all(len(steps) < 2 for curve in curves for steps, _ in curve):
            return None  # measured once: when it was reached is not known
        return _race(metric.name, measured, curves, target, self.protocol(metric))

    def heading(self, metric: Metric) -> str:
        """Name of a metric among the others."""
        return headings(self.metrics)[metric]

    def protocol(self, metric: Metric) -> str:
        """How a metric was measured."""
        return protocols(self.metrics)[metric]

    def quality_step(self, metric: Metric) -> int | None:
        """The last step at which every run that has this metric was evaluated; None if they share none."""
        evaluated = [set(steps) for run in self.runs if (steps := run.quality(metric)[0])]
        return max(set.intersection(*evaluated), default=None) if evaluated else None

    def last_qualities(self, group: Group, metric: Metric) -> list[tuple[int, float]]:
        """Step and value of the last evaluation of each run that has this metric."""
        series = [run.quality(metric) for run in group.runs]
        return [(steps[-1], values[-1]) for steps, values in series if steps]


def compare_runs(runs: Sequence[Run]) -> Comparison:
    """Group runs by configuration and determine which measures are comparable.

    Diverged runs are left out, unless all diverged.

    >>> from pathlib import Path
    >>> from scalelong.runs.reader import read_run
    >>> from scalelong.runs.config import to_yaml
    >>> from scalelong.runs.settings import RunConfig
    >>> _ = Path("config.yaml").write_text(to_yaml(RunConfig()))
    >>> _ = Path("metrics.jsonl").write_text('{"step": 10, "kind": "train", "loss": 0.5, "seconds": 2}')
    >>> comparison = compare_runs([read_run(".")])
    >>> comparison.measure(comparison.baseline, "final_loss").mean
    0.5
    """
    if not runs:
        raise ValueError("runs: none given; name the folders that training wrote")
    left_out = []
    if kept := [run for run in runs if run.diverged is None]:
        runs, left_out = kept, [run for run in runs if run.diverged is not None]
    horizon = min(run.last_step for run in runs)
    same_data = all(_same_data(run, other) for run, other in combinations(runs, 2))
    loss = {run.config.diffusion for run in runs}
    return Comparison(
        groups=tuple(group_runs(runs)),
        horizon=horizon,
        window=max(1, horizon // 20),
        same_data=same_data,
        same_loss=same_data and len(loss) == 1,
        same_probes=same_data and len({run.probe_interval for run in runs if run.probe_interval}) < 2,
        metrics=tuple(metrics_of(runs)),
        left_out=tuple(left_out),
    )


def paired(group: Group, other: Group) -> list[tuple[Run, Run]]:
    """Runs of equal seeds; where no seed is shared, in order."""
    by_seed = {run.seed: run for run in other.runs}
    same = [(run, by_seed[run.seed]) for run in group.runs if run.seed in by_seed]
    return same or list(zip(group.runs, other.runs, strict=False))


def _curve(run: Run, column: Column) -> Curve:
    return Curve(*column, run.seconds_at(column[0]))


def _same_data(run: Run, other: Run) -> bool:
    """By fingerprint where both recorded one, else by name."""
    if run.data and other.data:
        return run.data == other.data
    a, b = run.config.data, other.config.data
    return (a.name, a.split, a.image_size) == (b.name, b.split, b.image_size)


def _race(
    what: str, groups: Sequence[Group], curves: Sequence[Sequence[Column]], target: float | None, protocol: str,
    window: int = 0,
) -> Race | None:  # fmt: skip
    finals = [values[-1] for group in curves for _, values in group if values]
    if not finals:
        return None
    goal = max(finals) if target is None else target
    arrivals = [_arrivals(*own, goal, window) for own in zip(groups, curves, strict=True)]
    return Race(what, goal, tuple(arrivals), protocol, target is not None)


def _arrivals(group: Group, curves: Sequence[Column], goal: float, window: int) -> Arrivals:
    """The first step of each run, its window full, at or below the goal; without a window, curves are evaluations."""
    found = []
    for run, (steps, values) in zip(group.runs, curves, strict=True):
        reached = (s for s, v in zip(steps, values, strict=True) if s >= window and v <= goal)
        if (step := next(reached, None)) is not None:
            before = max((s for s in steps if s < step), default=0)
            found.append((before, step, *run.seconds_at([before, step])))
    before_steps, by_steps, before_seconds, by_seconds = (estimate([row[i] for row in found]) for i in range(4))
    after = (math.nan, math.nan) if window else (before_steps.mean, before_seconds.mean)
    when = [Arrival(by.mean, by.sd, by.n, a) for by, a in zip((by_steps, by_seconds), after, strict=True)]
    return Arrivals(group, *when)
