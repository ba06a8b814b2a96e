"""The quality that evaluations recorded: a distance, the extractor it was measured with, and the number of images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scalelong.report.series import Record, RunSeries


@dataclass(frozen=True, order=True)
class Metric:
    """What must be the same for two values to compare: name, number of images, extractor, and how they were drawn."""

    name: str
    n: int
    extractor: str
    sampler: str = ""

    def __str__(self) -> str:
        return f"{self.name} of {self.n:,} images"

    @property
    def protocol(self) -> str:
        """How it was measured, for example: 10,000 images, dpm++2m 50 steps, inception."""
        extractor = "" if self.extractor in self.name else self.extractor
        return ", ".join(part for part in (f"{self.n:,} images", self.sampler, extractor) if part)


def metrics_of(runs: Iterable[RunSeries]) -> list[Metric]:
    """Every metric that some run recorded, the one of most images first."""
    found = {metric for run in runs for record in run.evaluation if (metric := _metric(record)) is not None}
    return sorted(found, key=lambda metric: (-metric.n, metric))


def quality_series(run: RunSeries, metric: Metric) -> tuple[list[int], list[float]]:
    """Steps and values of one metric; several evaluations of a step are averaged."""
    values: dict[int, list[float]] = {}
    for record in run.evaluation:
        if _metric(record) == metric:
            values.setdefault(record["step"], []).append(float(record["value"]))
    steps = sorted(values)
    return steps, [sum(values[step]) / len(values[step]) for step in steps]


def _metric(record: Record) -> Metric | None:
    """The record's metric, if it holds a number at all."""
    name, value, n = record.get("metric"), record.get("value"), record.get("n")
    if not isinstance(name, str) or not isinstance(value, (int, float)) or value != value:
        return None
    return Metric(name, n if isinstance(n, int) else 0, str(record.get("extractor", "")), _drawing(record))


def _drawing(record: Record) -> str:
    """How the images were drawn; a record that does not say its precision is of fp32, the default."""
    guidance, precision = record.get("guidance", 1), record.get("precision", "fp32")
    parts = [
        f"{record['sampler']} {record.get('sampler_steps', '')} steps" if record.get("sampler") else "",
        f"guidance {guidance:g}" if guidance != 1 else "",
        precision if precision != "fp32" else "",
    ]
    return ", ".join(part for part in parts if part)
