"""Text summaries of a comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from scalelong.report.compare import Arrivals, Comparison, Pair, Race
from scalelong.report.groups import Group, trained_together
from scalelong.report.numbers import UNRESOLVED, at_steps, count, duration, joined, number, percent, times, with_sd
from scalelong.report.speedup import describe
from scalelong.runs.records import Metric

SAME = 0.01  # relative changes below this count as equal


def findings(comparison: Comparison, race: Race | None = None) -> list[tuple[Group, str]]:
    """What each method changes relative to the baseline, in one or two sentences."""
    race = race or comparison.loss_race()
    found = []
    for group in comparison.others:
        parts = [oscillation(comparison, group), final_loss(comparison, group)]
        parts += [quality(comparison, group, metric) for metric in comparison.metrics[:1]]
        text = "; ".join(part for part in parts if part) or "none of its records can be compared"
        text = text if text.startswith(group.label) else f"{group.label}: {text}"
        if race and (reached := speed_up(race, group, comparison.baseline)):
            text += f". I{reached[1:]}"  # it reaches ...
        found.append((group, f"{text}."))
    return found


def headline(comparison: Comparison) -> str:
    """The method with the lowest oscillation and the one with the lowest loss, with ties, in one sentence."""
    steadiest = _best(comparison, "feature_oscillation", "oscillation of the middle block")
    lowest = _best(comparison, "final_loss", "final loss")
    parts = [steadiest] * comparison.same_probes + [lowest] * comparison.same_loss
    if text := "; ".join(part for part in parts if part):
        return f"N{text[1:]}." if text.startswith("no method ") else f"{text}."  # names of methods keep their case
    if len(comparison.groups) > 1 and not comparison.same_loss:
        return "These runs are shown side by side but not ranked: their records are not comparable."
    only = comparison.groups[0]
    loss = with_sd(comparison.measure(only, "final_loss"))
    return f"{only.label} ends at a loss of {loss} after {count(comparison.horizon)} steps."


def _best(comparison: Comparison, measure: str, name: str) -> str:
    """Which method has the lowest value, and which others are within noise of it."""
    ranking = comparison.ranking(measure)
    if len(ranking) < 2:
        return ""
    best, digits = ranking[0], 4 if measure == "final_loss" else 3
    tied = [group.label for group in ranking[1:] if comparison.difference(group, best, measure).within_noise]
    value = with_sd(comparison.measure(best, measure), digits)
    if len(tied) == len(ranking) - 1:
        return f"no method clearly differs in {name}; the lowest mean is {value} ({best.label})"
    second = f"{ranking[1].label} ({with_sd(comparison.measure(ranking[1], measure), digits)})"
    rest = f"not clearly different from {joined(tied)}" if tied else f"ahead of {second}"
    return f"{best.label} has the lowest {name} ({value}), {rest}"


def seeds(comparison: Comparison) -> str:
    """How reliable the numbers are, from the number of seeds."""
    counts = {len(set(group.seeds)) for group in comparison.groups}
    if counts == {1}:
        once = "Each method ran with a single seed, which is not conclusive: another seed may reverse the order."
        return f"{once} Standard errors here come from the noise within a run only."
    if 1 in counts:
        single = [group.label for group in comparison.groups if len(set(group.seeds)) == 1]
        return f"Mean ± sd over seeds; {joined(single)} ran with a single seed, which is not conclusive."
    few, many = min(counts), max(counts)
    rule = "methods count as different only if the 95% interval of the difference excludes 0"
    return f"Mean ± sd over {few if few == many else f'{few} to {many}'} seeds per method; {rule}."


def oscillations(comparison: Comparison) -> list[str]:
    """Features and gradients of the middle block of each method but the baseline."""
    if not comparison.same_probes:
        return ["The oscillations of these runs are not comparable, so they are plotted but not ranked."]
    found = []
    for group in comparison.others:
        both = [oscillation(comparison, group, kind) for kind in ("feature_oscillation", "gradient_oscillation")]
        if any(both):
            found.append("; ".join(text for text in both if text) + ".")
    return found


def oscillation(comparison: Comparison, group: Group, measure: str = "feature_oscillation") -> str:
    """Change in oscillation: "cs 0.7 lowers the oscillation of the middle block from 0.123 to 0.080 (−35%)"."""
    new, old = comparison.measure(group, measure), comparison.measure(comparison.baseline, measure)
    if not comparison.same_probes or not (math.isfinite(new.mean) and math.isfinite(old.mean)):
        return ""
    who, what = group.label, "the oscillation of the middle block"
    if measure == "gradient_oscillation":
        who, what = "it", "the oscillation of its gradient"
    values = f"{with_sd(old, 3)} to {with_sd(new, 3)} ({percent(new.mean, old.mean)})"
    difference = comparison.difference(group, comparison.baseline, measure)
    if difference.within_noise:
        return f"{who} shows no clear change in {what}: {values}, difference not significant ({difference.interval()})"
    if abs(new.mean / old.mean - 1) < SAME:
        return f"{who} does not change {what}: {values}"
    return f"{who} {'lowers' if new.mean < old.mean else 'raises'} {what} from {values}"


def final_loss(comparison: Comparison, group: Group) -> str:
    """Change in final loss: "final loss not clearly different (difference 0.0004, standard error 0.002, ...)"."""
    new, old = (comparison.measure(g, "final_loss") for g in (group, comparison.baseline))
    if not comparison.same_loss or not (math.isfinite(new.mean) and math.isfinite(old.mean)):
        return ""
    difference = comparison.difference(group, comparison.baseline, "final_loss")
    if not math.isfinite(difference.standard_error):
        return f"final loss {with_sd(new)} against {with_sd(old)}, too few values to tell them apart"
    value = f"{'−' if difference.value < 0 else '+'}{number(abs(difference.value), 2)}"
    how = f"difference {value}, standard error {number(difference.standard_error, 2)}"
    if not difference.clear:
        return f"final loss not clearly different ({how}, {difference.interval()})"
    return f"final loss {'lower' if difference.value < 0 else 'higher'}, {with_sd(new)} against {with_sd(old)} ({how})"


def quality(comparison: Comparison, group: Group, metric: Metric) -> str:
    """Change in a metric: "FID of 10,000 images 12.30 against 15.20 (−19%) at step 8,000"."""
    both, name = (group, comparison.baseline), comparison.heading(metric)
    last = [comparison.last_qualities(g, metric) for g in both]
    if not comparison.same_data or not all(last):
        return ""
    step = comparison.quality_step(metric)
    if step is None:
        return f"{name} {at_steps(last[0])}, {comparison.baseline.label} {at_steps(last[1])}, not comparable"
    new, old = (comparison.measure(g, metric) for g in both)
    difference = comparison.difference(group, comparison.baseline, metric)
    change = percent(new.mean, old.mean)
    change += f", difference not significant: {difference.interval()}" if difference.within_noise else ""
    return f"{name} {with_sd(new)} against {with_sd(old)} ({change}) at step {count(step)}"


def noise_bins(comparison: Comparison) -> list[str]:
    """Range of the validation loss over bins of noise: "cs 0.7: −1.2% (bin 9) to +0.4% (bin 1) against none, ..."."""
    found = []
    for group in comparison.others:
        if gaps := comparison.noise_gaps(group):
            low, high = (f"{percent(1 + gap, 1)} (bin {gaps.index(gap) + 1})" for gap in (min(gaps), max(gaps)))
            against = f"against {comparison.baseline.label}, over {len(gaps)} bins of noise"
            found.append(f"{group.label}: {low} to {high} {against}.")
    return found


def qualities(comparison: Comparison) -> list[str]:
    """One sentence for each metric, or why there is none."""
    if not comparison.metrics:
        return ["No evaluation was recorded; run scalelong evaluate RUN to add one."]
    if not comparison.same_data:
        return ["The runs were trained on different data, so their quality cannot be compared and is not plotted."]
    found = []
    for metric in comparison.metrics:
        name, step = comparison.heading(metric), comparison.quality_step(metric)
        if step is None:
            last = [(comparison.last_qualities(group, metric), group.label) for group in comparison.groups]
            parts = [f"{at_steps(values)} for {label}" for values, label in last if values]
            found.append(f"{name}, at steps that differ and so not compared: {'; '.join(parts)}.")
            continue
        values = [(comparison.measure(group, metric), group.label) for group in comparison.groups]
        known = sorted((value.mean, f"{with_sd(value)} for {label}") for value, label in values if value.n)
        found.append(f"{name} at step {count(step)}, lower is better: {joined([text for _, text in known])}.")
    return found


def smoothing(comparison: Comparison) -> str:
    """Caption of the loss charts."""
    texts = {False: "faint lines are the recorded values", True: "lines are means over seeds, shaded by ± sd"}
    parts = [texts[several] for several in sorted({len(group.runs) > 1 for group in comparison.groups})]
    return f"Mean over {count(comparison.window)} steps around each one; {joined(parts)}."


def target(race: Race) -> str:
    """Why this target, and who reaches it."""
    late = []
    for arrivals in race.arrivals:
        label, reached, total = arrivals.group.label, arrivals.reached, len(arrivals.group.runs)
        if reached < total:
            late.append(label if total == 1 else f"{label} ({total - reached} of {total} seeds)")
    who = f"not reached by {joined(late)}" if late else "every run reaches it"
    why = "The given value" if race.asked else "The worst value that any run ends with"
    text = f"{why} ({race.protocol}); {who}. A speed-up of 2× means half the steps, or half the time."
    if race.sparse:
        text += f" Runs arrive between two evaluations; where these intervals overlap, the speed-up is {UNRESOLVED}."
    return text


def speed_ups(comparison: Comparison) -> list[str]:
    """Crossover and speed-up of each method relative to the baseline."""
    return [
        describe(group.label, comparison.baseline.label, what, found)
        for what, own in comparison.speed_ups().items()
        for group, found in own
    ]


def sample_grids(films: Sequence[Any]) -> str:
    """Caption of the sample grids."""
    same = len(films) > 1 and len({film.run.seed for film in films}) == 1
    noise = "the same noise for every method" if same else "the noise of each run's own seed"
    several = any(len(film.group.runs) > 1 for film in films)
    return f"Sampled with the EMA weights from {noise}{'; one seed of each method is shown' if several else ''}."


def speed_up(race: Race, group: Group, other: Group) -> str:
    """Result of a race: "it reaches loss 0.25 after 400 steps and 20 s, none after 520 steps and 26 s (1.30× ...)"."""
    mine, theirs = (next((a for a in race.arrivals if a.group is g), None) for g in (group, other))
    if mine is None or theirs is None:
        return ""
    if not mine.reached:
        return f"it does not reach {race.what} {number(race.target)}"
    start = f"it reaches {race.what} {number(race.target)} {_arrival(mine)}"
    if not (mine.all_reached and theirs.all_reached):
        return f"{start} in {mine.reached} of {len(group.runs)} seeds, {other.label} in {theirs.reached} of {len(other.runs)}"
    pair, resolved = Pair(mine, theirs), mine.steps.resolved(theirs.steps)
    in_steps = f"{times(pair.in_steps)} as fast in steps" if resolved else f"speed-up in steps {UNRESOLVED}"
    in_time = (
        f", {times(pair.in_seconds)} in time" if mine.seconds.resolved(theirs.seconds) else f", in time {UNRESOLVED}"
    )
    if trained_together([*group.runs, *other.runs]):
        in_time = ""
    return f"{start}, {other.label} {_arrival(theirs)} ({in_steps}{in_time})"


def _arrival(arrivals: Arrivals) -> str:
    """Format an arrival: "after 800 steps and 40 s", or "between 400 steps (20 s) and 800 steps (40 s)"."""
    steps, seconds = arrivals.steps, arrivals.seconds
    by, time = f"{count(steps.mean)} steps", duration(seconds.mean)
    if math.isnan(steps.after):
        return f"after {by} and {time}"
    return f"between {count(steps.after)} steps ({duration(seconds.after)}) and {by} ({time})"


def throughput(comparison: Comparison) -> str:
    """Throughput of each method."""
    base = comparison.measure(comparison.baseline, "images_per_second")
    if not math.isfinite(base.mean):
        return "No throughput was recorded."
    together = trained_together([run for group in comparison.groups for run in group.runs])
    parts = [f"{comparison.baseline.label} trains on {number(base.mean, 3)} images per second (median)"]
    for group in comparison.others:
        own = comparison.measure(group, "images_per_second")
        if math.isfinite(own.mean):
            against = "" if together else f" ({percent(own.mean, base.mean)})"
            parts.append(f"{group.label} on {number(own.mean, 3)}{against}")
    note = " Some runs trained at the same time, so this does not compare the methods." if together else ""
    return f"{joined(parts)}.{note}"


def coefficients(comparison: Comparison) -> list[str]:
    """How the coefficients of each method change with depth, and how far learned ones lie from constant ones."""
    groups = [group for group in comparison.groups if group.coefficients()]
    found = [f"{group.label}: {_coefficients(group)}." for group in groups]
    learned, constant = (next((g for g in groups if g.method == method), None) for method in ("ls", "cs"))
    if learned is None or constant is None or len(learned.coefficients()) != len(constant.coefficients()):
        return found
    gaps = [a - b for a, b in zip(learned.coefficients(), constant.coefficients(), strict=True)]
    gap, index = max((abs(gap), i) for i, gap in enumerate(gaps, 1))
    below = f"lies below the curve of {constant.label} at {sum(gap < 0 for gap in gaps)} of {len(gaps)} skips"
    return [*found, f"{learned.label} {below}; they are furthest apart at skip {index}, by {number(gap, 3)}."]


def _coefficients(group: Group) -> str:
    values = group.coefficients()
    learned = " after training (mean over the last batch)" if group.method == "ls" else ""
    low, high = number(min(values), 3), number(max(values), 3)
    if low == high:
        return f"the same for all {len(values)} skips, {low}{learned}"
    if max(values) - min(values) < SAME * max(values):
        return f"nearly the same for all {len(values)} skips, {low} to {high}{learned}"
    how = f"between {low} and {high},"
    if values in (sorted(values), sorted(values, reverse=True)):
        how = "falling" if values[0] > values[-1] else "rising"
    ends = f"from {number(values[0], 3)} at the outermost skip to {number(values[-1], 3)} at the innermost"
    return f"{how} {ends}{learned}"
