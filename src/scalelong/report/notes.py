"""Caveats of a comparison: damaged records, gaps, and what cannot be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise

from scalelong.report.compare import Comparison
from scalelong.report.numbers import count, joined, shortened
from scalelong.runs import METRICS
from scalelong.runs.reader import Metric, Run


def notes(comparison: Comparison, refused: Sequence[str] = ()) -> list[str]:
    """One sentence for each caveat."""
    found = [f"Left out: {why}." for why in refused]
    found += _about_comparability(comparison)
    for run in comparison.runs:
        found += _about_run(run)
    return found + _about_all(comparison)


def _about_comparability(comparison: Comparison) -> list[str]:
    found = []
    if not comparison.same_data:
        found.append(
            f"The runs were trained on different data ({joined(_data_names(comparison.runs))}): losses, oscillations and "
            "quality cannot be compared between them, so none of them is ranked and the quality is not plotted."
        )
    elif not comparison.same_loss:
        kinds = sorted({_objective_name(run) for run in comparison.runs})
        found.append(f"The runs minimise different losses ({joined(kinds)}): losses cannot be compared between them.")
    if len(comparison.metrics) > 1:
        kinds = [f"{metric.name} ({comparison.protocol(metric)})" for metric in comparison.metrics]
        found.append(f"Quality was measured in {len(kinds)} ways that do not compare with each other: {joined(kinds)}.")
    return found


def _about_run(run: Run) -> list[str]:
    found = []
    if run.damaged_lines:
        lines = "1 damaged line" if run.damaged_lines == 1 else f"{run.damaged_lines} damaged lines"
        found.append(f"{lines} in {METRICS}, ignored.")
    if run.last_step < run.config.training.steps:
        found.append(f"at step {count(run.last_step)} of {count(run.config.training.steps)}.")
    lost = len(run.train) - len(run.column("train", "loss")[0])
    if lost:
        found.append(f"{lost} of {len(run.train)} records have no finite loss; they are not plotted.")
    share = _start_up_share(run)
    if share > 0.1:
        found.append(f"{share:.0%} of its time was start-up, so its seconds mean little.")
    skipped = max(run.column("train", "skipped")[1], default=0)
    if skipped:
        found.append(f"{skipped:.0f} steps were skipped because the loss or gradient was not finite.")
    return [f"{run.folder}: {text}" for text in found]


def _about_all(comparison: Comparison) -> list[str]:
    found = []
    if len({run.last_step for run in comparison.runs}) > 1:
        found.append(
            f"The runs have different lengths: numbers are taken up to step {count(comparison.horizon)}, the last that "
            "all of them have; curves are plotted whole."
        )
    for metric in comparison.metrics if comparison.same_data else ():
        found += _about_metric(comparison, metric)
    missing = [run for run in comparison.runs if not run.probe]
    if missing and len(missing) < len(comparison.runs):
        found.append(f"No oscillation was recorded in {joined([str(run.folder) for run in missing])}.")
    intervals = {run.probe_interval for run in comparison.runs if run.probe_interval}
    if len(intervals) > 1:
        found.append(
            f"The blocks were probed at different intervals ({joined([count(i) for i in sorted(intervals)])} steps): "
            "oscillations do not compare and are not ranked."
        )
    devices = {str(record.get("device")) for run in comparison.runs for record in run.start}
    if len(devices) > 1:
        found.append(f"The runs ran on different devices ({joined(sorted(devices))}): seconds do not compare.")
    if _overlapping(comparison.runs):
        found.append(
            "Some of the runs trained at the same time: if they shared a machine, seconds and images per second depend "
            "on its load more than on the methods."
        )
    for group in comparison.groups:
        repeated = [str(seed) for seed, times in Counter(group.seeds).items() if times > 1]
        if repeated:
            found.append(
                f"{group.label}: seed {joined(repeated)} was given more than once; repeats are not independent."
            )
    return found


def _about_metric(comparison: Comparison, metric: Metric) -> list[str]:
    found, name, step = [], comparison.heading(metric), comparison.quality_step(metric)
    last = {group.label: comparison.last_qualities(group, metric) for group in comparison.groups}
    without = [label for label, values in last.items() if not values]
    if without:
        found.append(f"{name} was not measured for {joined(without)}.")
    if step is None:
        found.append(f"{name} was measured at no step that all runs share: its values are shown with their steps.")
    elif any(at > step for values in last.values() for at, _ in values):
        found.append(
            f"{name} is compared at step {count(step)}, the last at which every run that has it was evaluated."
        )
    return found


def _start_up_share(run: Run) -> float:
    """Share of the run's time that its first record took beyond the usual time of its steps."""
    steps, seconds = run.column("train", "seconds")
    if len(steps) < 3 or seconds[-1] <= 0:
        return 0.0
    later = (seconds[-1] - seconds[0]) / max(steps[-1] - steps[0], 1)
    return (seconds[0] - steps[0] * later) / seconds[-1]


def _overlapping(runs: Sequence[Run]) -> bool:
    """True if two runs were training at the same moment, by their recorded times."""
    spans = sorted(span for run in runs for span in _spans(run))
    return any(before[1] > after[0] + 1 for before, after in pairwise(spans))


def _spans(run: Run) -> list[tuple[float, float]]:
    """When the run was training, in seconds since the epoch: one span per start."""
    starts = [record for record in run.start if isinstance(record.get("time"), str)]
    bounds = run.seconds_at([*(record["step"] for record in starts), run.last_step])
    spans = []
    for record, trained in zip(starts, (b - a for a, b in pairwise(bounds)), strict=True):
        try:
            began = datetime.strptime(record["time"], "%Y-%m-%d %H:%M:%S").timestamp()
        except ValueError:
            continue
        spans.append((began, began + trained))
    return spans


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


def _objective_name(run: Run) -> str:
    diffusion = run.config.diffusion
    return f"{diffusion.process}, predicting {diffusion.prediction or 'the default'}"
