"""The quality that evaluations recorded: a distance, the extractor it was measured with, and the number of images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scalelong.report.numbers import shortened
from scalelong.runs.reader import Record, RunSeries


@dataclass(frozen=True, order=True)
class Metric:
    """What must be the same for two values to compare: name, number of images, extractor, how they were drawn, and the
    fingerprint of the images they were held against."""

    name: str
    n: int
    extractor: str
    sampler: str = ""
    reference: str = ""

    def __str__(self) -> str:
        return f"{self.name} of {self.n:,} images"

    @property
    def protocol(self) -> str:
        """How it was measured, for example: 10,000 images, dpm++2m 50 steps, inception."""
        extractor = "" if self.extractor in self.name else self.extractor
        return ", ".join(part for part in (f"{self.n:,} images", self.sampler, extractor) if part)


def metrics_of(runs: Iterable[RunSeries]) -> list[Metric]:
    """Every metric that some run recorded, the one of most images first."""
    found = {_metric(record) for run in runs for record in run.evaluation}
    return sorted(found, key=lambda metric: (-metric.n, metric))


def protocols(metrics: Sequence[Metric]) -> dict[Metric, str]:
    """How each was measured; the reference is told only where nothing else tells two apart."""
    alike = Counter((metric.name, metric.protocol) for metric in metrics)
    short = shortened(metric.reference for metric in metrics)
    told = {}
    for metric in metrics:
        reference = f"reference {short[metric.reference] or 'not recorded'}"
        single = alike[metric.name, metric.protocol] == 1
        told[metric] = metric.protocol if single else f"{metric.protocol}, {reference}"
    return told


def headings(metrics: Sequence[Metric]) -> dict[Metric, str]:
    """What each is called: its name and number of images, and its whole protocol where others would be called the same."""
    called, protocol = Counter(map(str, metrics)), protocols(metrics)
    return {m: str(m) if called[str(m)] == 1 else f"{m.name} ({protocol[m]})" for m in metrics}


def quality_series(run: RunSeries, metric: Metric) -> tuple[list[int], list[float]]:
    """Steps and values of one metric; several evaluations of a step are averaged."""
    values: dict[int, list[float]] = {}
    for record in run.evaluation:
        if _metric(record) == metric:
            values.setdefault(record["step"], []).append(float(record["value"]))
    steps = sorted(values)
    return steps, [sum(values[step]) / len(values[step]) for step in steps]


def _metric(record: Record) -> Metric:
    extractor, reference = record.get("extractor") or "", record.get("reference") or ""
    return Metric(record["metric"], record["n"], extractor, _drawing(record), reference)


def _drawing(record: Record) -> str:
    """How the images were drawn; a record that does not say is of fp32 and of the averaged weights, the defaults."""
    sampling = record.get("sampling") or {**record, "steps": record.get("sampler_steps")}  # older records are flat
    sampler, steps, guidance = (sampling.get(key) for key in ("sampler", "steps", "guidance"))
    precision, weights = sampling.get("precision") or "fp32", record.get("weights") or "ema"
    parts = [
        f"{sampler} {steps} steps" if sampler and steps else sampler,
        f"guidance {guidance:g}" if guidance not in (None, 1) else "",
        precision if precision != "fp32" else "",
        {"ema": "", "model": "weights as trained"}.get(weights, f"weights {weights}"),
    ]
    return ", ".join(part for part in parts if part)
