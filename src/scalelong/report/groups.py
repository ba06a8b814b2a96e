"""Runs grouped by configuration, one group per method with its seeds, and metrics grouped by how they were measured."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

from scalelong.report.numbers import shortened
from scalelong.runs.reader import Run
from scalelong.runs.records import Metric
from scalelong.runs.settings import MAY_CHANGE, RunConfig, dotted

NOT_COMPARED = MAY_CHANGE | {"training.seed"}


@dataclass(frozen=True)
class Group:
    """The runs of one configuration, one per seed."""

    label: str
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs]

    @property
    def config(self) -> RunConfig:
        return self.runs[0].config

    @property
    def method(self) -> str:
        return self.config.scaling.method

    def coefficients(self) -> list[float]:
        """Last recorded kappa_i, averaged over the seeds that have them."""
        recorded = [values for run in self.runs if (values := run.coefficients())]
        alike = [values for values in recorded if len(values) == len(recorded[0])]
        return [sum(column) / len(column) for column in zip(*alike, strict=True)]


def seeds_text(seeds: Sequence[int]) -> str:
    """Format seeds: "1 seed (0)", "3 seeds (0, 1, 2)", "8 seeds"."""
    listed = f" ({', '.join(map(str, seeds))})" if len(seeds) <= 4 else ""
    return f"{len(seeds)} seed{'s' * (len(seeds) != 1)}{listed}"


def settings_in_use(config: RunConfig) -> dict[str, Any]:
    """Settings by dotted key, without the options that the scaling method does not take."""
    taken = {"scaling.method", *(f"scaling.{name}" for name in config.scaling.options())}
    return {key: value for key, value in dotted(config).items() if not key.startswith("scaling.") or key in taken}


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Group runs that differ only in their seed; the unscaled network (none) first, labels distinct."""
    together: dict[frozenset[tuple[str, Any]], list[Run]] = {}
    for run in runs:
        same = {k: v for k, v in settings_in_use(run.config).items() if k not in NOT_COMPARED and k != "data.name"}
        key = frozenset(same.items())
        together.setdefault(key, []).append(run)
    parts = [part for whole in together.values() for part in _by_data(whole)]
    parts.sort(key=lambda part: part[0].config.scaling.method != "none")
    labels = _labels([part[0] for part in parts])
    seeds = [tuple(sorted(part, key=lambda run: run.seed)) for part in parts]
    return [Group(label, part) for label, part in zip(labels, seeds, strict=True)]


def differing_settings(configs: Sequence[RunConfig]) -> dict[str, list[Any]]:
    """Settings that differ: key -> one value per configuration, None where the method does not take it."""
    used = [settings_in_use(config) for config in configs]
    keys = [key for key in dotted(configs[0]) if key not in NOT_COMPARED and any(key in settings for settings in used)]
    rows = {key: [settings.get(key) for settings in used] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def _labels(representatives: Sequence[Run]) -> list[str]:
    """The method's name, and for equal names the settings that differ."""
    result = []
    for run in representatives:
        namesakes = [other for other in representatives if other.label == run.label]
        if len(namesakes) == 1:
            result.append(run.label)
            continue
        parts = []
        for key in differing_settings([other.config for other in namesakes]):
            value = dotted(run.config)[key]
            parts.append(f"{key.rpartition('.')[2]}={f'{value:g}' if isinstance(value, float) else value}")
        data = shortened(other.data for other in namesakes if other.data)
        parts += [f"data={data.get(run.data, 'unknown')}"] * (len(data) > 1)
        result.append(f"{run.label} ({', '.join(parts)})")
    return result


def _by_data(runs: list[Run]) -> list[list[Run]]:
    """The runs by fingerprint of their data, or by its name where it is not known; all together if neither differs."""
    names, prints = {run.config.data.name for run in runs}, {run.data for run in runs if run.data}
    if len(names) == 1 and len(prints) < 2:
        return [runs]
    keys = [run.data or run.config.data.name for run in runs]
    return [[run for run, key in zip(runs, keys, strict=True) if key == each] for each in dict.fromkeys(keys)]


# --------------------------------------------------------------------------------------------------------------- metrics


def metrics_of(runs: Iterable[Run]) -> list[Metric]:
    """Every metric that some run recorded, the one of most images first."""
    found = {measurement.metric for run in runs for measurement in run.evaluations}
    return sorted(found, key=lambda metric: (-metric.n, metric.name, astuple(metric)))


def protocols(metrics: Sequence[Metric]) -> dict[Metric, str]:
    """How each was measured, for example: 10,000 images, dpm++2m 50 steps, inception.

    Reference, clipping and guidance interval are named only where nothing else tells two metrics apart.
    """
    short = shortened(metric.reference for metric in metrics)
    details: list[Callable[[Metric], str]] = [
        lambda m: f"reference {short[m.reference] or 'not recorded'}",
        lambda m: "clipped" if m.sampling.clip else "not clipped",
        lambda m: "guided in {:g} to {:g}".format(*m.sampling.guidance_interval),
    ]
    result = {}
    for metric in metrics:
        alike = [other for other in metrics if (other.name, _protocol(other)) == (metric.name, _protocol(metric))]
        extra = [detail(metric) for detail in details if len(set(map(detail, alike))) > 1]
        result[metric] = ", ".join([_protocol(metric), *extra])
    return result


def headings(metrics: Sequence[Metric]) -> dict[Metric, str]:
    """The name and number of images of each, or its whole protocol where others would be called the same."""
    short = {metric: f"{metric.name} of {metric.n:,} images" for metric in metrics}
    called, protocol = Counter(short.values()), protocols(metrics)
    return {m: name if called[name] == 1 else f"{m.name} ({protocol[m]})" for m, name in short.items()}


def _protocol(metric: Metric) -> str:
    how = metric.sampling
    parts = [
        f"{metric.n:,} images",
        f"{how.sampler} {how.steps} steps" if how.sampler and how.steps else how.sampler,
        f"guidance {how.guidance:g}" if how.guidance != 1 else "",
        f"skip-tuning {how.skip_tuning:g}" if how.skip_tuning != 1 else "",
        how.precision if how.precision != "fp32" else "",
        {"ema": "", "model": "weights as trained"}.get(metric.weights, f"weights {metric.weights}"),
        "" if metric.extractor in metric.name else metric.extractor,
    ]
    return ", ".join(part for part in parts if part)


def trained_together(runs: Sequence[Run]) -> bool:
    """True if some of the runs trained at the same time, so that their seconds may not be comparable."""
    return any(before[1] > after[0] + 1 for before, after in pairwise(sorted(s for run in runs for s in _spans(run))))


def _spans(run: Run) -> list[tuple[float, float]]:
    """When the run was training, in seconds since the epoch: one span per start."""
    starts = [record for record in run.start if isinstance(record.get("time"), str)]
    bounds = run.seconds_at([*(record["step"] for record in starts), run.last_step])
    spans = []
    for record, trained in zip(starts, (b - a for a, b in pairwise(bounds)), strict=True):
        with contextlib.suppress(ValueError):
            began = datetime.strptime(record["time"], "%Y-%m-%d %H:%M:%S").timestamp()
            spans.append((began, began + trained))
    return spans
