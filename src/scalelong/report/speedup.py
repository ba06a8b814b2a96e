"""Speed-up curves of a method over a baseline: steps and seconds to each quality, and the crossover.

Plain numbers without torch, for reports and studies alike. Values are losses or distances: lower is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from scalelong.report.numbers import Estimate, count, difference, estimate, joined, number, percent, times

POINTS = 48  # of a speed-up curve


@dataclass(frozen=True)
class Curve:
    """The values of one run at rising steps, with the seconds of training where they are known.

    >>> Curve([10, 20, 30], [3.0, 2.0, 1.0]).arrival(1.5)
    25.0
    """

    steps: Sequence[float]
    values: Sequence[float]
    seconds: Sequence[float] = ()

    def arrival(self, target: float, timed: bool = False) -> float:
        """The step (or second) at which the curve first is at `target` or below, interpolated; nan if it never is."""
        xs = self.seconds if timed else self.steps
        if len(xs) != len(self.values):
            return math.nan
        for i, value in enumerate(self.values):
            if value <= target:
                if i == 0 or not math.isfinite(self.values[i - 1]):
                    return float(xs[i])
                share = (self.values[i - 1] - target) / (self.values[i - 1] - value)
                return float(xs[i - 1] + share * (xs[i] - xs[i - 1]))
        return math.nan


@dataclass(frozen=True)
class Lead:
    """From which step on the method has the lower value, by the mean over seeds and for each seed."""

    last: float  # the last step that is compared
    behind_until: float  # 0: never behind; `last`: behind at the end
    per_seed: tuple[float, ...]
    gap: Estimate  # (method - baseline) / baseline at the last step, over seeds
    within_noise: bool  # that gap is not clear of zero over several seeds

    @property
    def ahead_at_end(self) -> bool:
        return self.behind_until < self.last


@dataclass(frozen=True)
class SpeedUp:
    """Baseline's steps (or seconds) over the method's to each quality, mean and sd over seeds; 2 is half the steps.

    >>> baseline = Curve([10, 20, 30, 40], [4.0, 3.0, 2.0, 1.0])
    >>> found = speed_up([(Curve([10, 20, 30, 40], [5.0, 3.0, 1.0, 0.5]), baseline)])
    >>> round(found.at(2.5).mean, 2), found.at(0.5).n, found.lead.behind_until
    (1.11, 0, 20.0)
    """

    pairs: tuple[tuple[Curve, Curve], ...]  # (method, baseline) of each seed
    qualities: tuple[float, ...]  # from worse to better, reached by every run
    final: float  # the quality of the baseline at its end, mean over seeds of its lowest value
    lead: Lead

    def at(self, quality: float, timed: bool = False) -> Estimate:
        """The speed-up at a quality over the seeds where both runs reach it."""
        return estimate([_ratio(method, baseline, quality, timed) for method, baseline in self.pairs])

    def final_speed_up(self, timed: bool = False) -> Estimate:
        """The speed-up to the best value that each seed's baseline reaches, over the seeds that reach it."""
        return estimate([_ratio(method, baseline, min(baseline.values), timed) for method, baseline in self.pairs])


def _ratio(method: Curve, baseline: Curve, quality: float, timed: bool) -> float:
    """Baseline's steps (or seconds) to a quality over the method's; nan if one of them does not reach it."""
    mine = method.arrival(quality, timed)
    return baseline.arrival(quality, timed) / mine if mine > 0 else math.nan


def speed_up(pairs: Sequence[tuple[Curve, Curve]]) -> SpeedUp | None:
    """Compare (method, baseline) curves of several seeds; None where they share too little."""
    known = [(m, b) for m, b in pairs if len(m.values) > 1 and len(b.values) > 1]
    if not known:
        return None
    curves = [curve for pair in known for curve in pair]
    worst = min(curve.values[0] for curve in curves)
    best = max(min(curve.values) for curve in curves)
    lead = _lead(known)
    if lead is None:
        return None
    log = best > 0 and worst > 0
    spaced = np.geomspace(worst, best, POINTS) if log else np.linspace(worst, best, POINTS)
    qualities = tuple(spaced.tolist()) if worst > best else ()
    return SpeedUp(tuple(known), qualities, fmean(min(b.values) for _, b in known), lead)


def _lead(pairs: Sequence[tuple[Curve, Curve]]) -> Lead | None:
    """Gaps at the steps of any run that every run covers, interpolated."""
    first = max(curve.steps[0] for pair in pairs for curve in pair)
    last = min(curve.steps[-1] for pair in pairs for curve in pair)
    grid = sorted({step for pair in pairs for curve in pair for step in curve.steps if first <= step <= last})
    if not grid:
        return None
    gaps = []
    for method, baseline in pairs:
        mine, theirs = (np.interp(grid, curve.steps, curve.values) for curve in (method, baseline))
        gaps.append((mine - theirs) / np.abs(theirs))
    per_seed = tuple(_behind_until(grid, gap.tolist()) for gap in gaps)
    mean = np.mean(gaps, axis=0).tolist()
    last_gaps = [float(gap[-1]) for gap in gaps]
    unclear = difference(last_gaps, [0.0] * len(last_gaps), paired=True).within_noise
    return Lead(grid[-1], _behind_until(grid, mean), per_seed, estimate(last_gaps), unclear)


def _behind_until(steps: Sequence[float], gaps: Sequence[float]) -> float:
    """The step at which the last positive gap has closed, interpolated; 0 if none is positive."""
    behind = [i for i, gap in enumerate(gaps) if gap > 0]
    if not behind:
        return 0.0
    i = behind[-1]
    if i + 1 == len(steps):
        return float(steps[i])
    share = gaps[i] / (gaps[i] - gaps[i + 1])
    return float(steps[i] + share * (steps[i + 1] - steps[i]))


# ------------------------------------------------------------------------------------------------------------- as text


def describe(label: str, baseline: str, what: str, found: SpeedUp) -> str:
    """Sentence about a speed-up: "cs 0.7, loss: behind none until step 24,000, then ahead ...; it reaches ..."."""
    lead, seeds = found.lead, len(found.pairs)
    end, spread = f"step {count(lead.last)}", ""
    if seeds > 1 and len({round(step) for step in lead.per_seed}) > 1:
        until = {0.0: "never", lead.last: "to the end"}
        spread = f", by seed {joined([until.get(step, f'until step {count(step)}') for step in lead.per_seed])}"
    unclear = ", not significant in a paired t-test" if lead.within_noise else ""
    gap = f"{percent(1 + lead.gap.mean, 1)} at {end}{unclear}"
    if lead.behind_until == 0:
        text = f"never behind {baseline} on average{spread} ({gap})" if spread else f"never behind {baseline} ({gap})"
    elif lead.ahead_at_end:
        text = f"behind {baseline} until step {count(lead.behind_until)}{spread}, then ahead ({gap})"
    else:
        text = f"behind {baseline} at the end{spread} ({gap})"
    reached = sum(math.isfinite(mine.arrival(min(theirs.values))) for mine, theirs in found.pairs)
    goal = f"the best {what} of {baseline} ({number(found.final)})"
    if reached < seeds:
        who = f" by {seeds - reached} of {seeds} seeds" if seeds > 1 else ""
        within = f" in {count(min(method.steps[-1] for method, _ in found.pairs))} steps"
        return f"{label}, {what}: {text}; {goal} is not reached{who}{within}."
    ratio, timed = found.final_speed_up(), found.final_speed_up(timed=True)
    in_time = f", {times(timed.mean)} in time" if timed.n == seeds else ""
    sd = f" ± {ratio.sd:.2f}" if math.isfinite(ratio.sd) else ""
    return f"{label}, {what}: {text}; it reaches {goal} {times(ratio.mean)}{sd} as fast in steps{in_time}."


def table(found: Sequence[tuple[str, SpeedUp]], baseline: str) -> list[list[str]]:
    """Speed-ups at the qualities that the baseline has after quarters of its steps; the first row is the head."""
    if not found:
        return []
    last = min(b.steps[-1] for _, one in found for _, b in one.pairs)
    steps = [last * quarter / 4 for quarter in (1, 2, 3, 4)]
    goals = [fmean(_lowest(b, step) for _, b in found[0][1].pairs) for step in steps]
    head = [f"{baseline} at {count(step)}: {number(goal)}" for step, goal in zip(steps, goals, strict=True)]
    return [["method", *head], *([label, *(_cell(one, goal) for goal in goals)] for label, one in found)]


def _lowest(curve: Curve, upto: float) -> float:
    """The lowest value up to a step; the first one if there is none yet."""
    return min([v for s, v in zip(curve.steps, curve.values, strict=True) if s <= upto], default=curve.values[0])


def _cell(found: SpeedUp, goal: float) -> str:
    value, seeds = found.at(goal), len(found.pairs)
    if value.n == 0:
        return "not reached"
    text = times(value.mean) + (f" ± {value.sd:.2f}" if math.isfinite(value.sd) else "")
    return text if value.n == seeds else f"{text} ({value.n} of {seeds} seeds)"
