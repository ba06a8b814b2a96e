"""Reading a run: its settings and records as numbers."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from scalelong.files import inside
from scalelong.runs import CONFIG, METRICS, SAMPLES
from scalelong.runs.events import each_event
from scalelong.runs.folder import by_step, is_run, read_config
from scalelong.runs.settings import RunConfig, SamplingSettings

Record = dict[str, Any]
Column = tuple[list[int], list[float]]  # steps and values

FINAL_SHARE = 0.2  # "final" is the last fifth of the records
LARGEST = 1e100  # larger numbers are taken for damage; squares of smaller ones fit into a float
LONGEST_TEXT = 1000  # characters of a recorded text
MOST_KEYS = 4096  # names of numbers in the records of a run
PROBE_EVERY = 50  # steps between probe records: below 2% of the step time (benchmarks/probe_overhead.py)


@dataclass(frozen=True)
class Metric:
    """A metric and how it was measured; only values of equal metrics are compared."""

    name: str
    n: int  # number of images
    extractor: str = ""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    weights: str = "ema"
    reference: str = ""  # fingerprint of the real images


@dataclass(frozen=True)
class Measurement:
    """A value of a metric, measured on images sampled at a step."""

    step: int
    value: float
    metric: Metric
    seed: int | None = None  # of the images


class Records:
    """The records of one kind as columns of numbers: a hundred bytes a record, not a thousand.

    >>> records = Records()
    >>> records.add({"step": 10, "loss": 0.5, "kappa": [1.0, 0.7]})
    >>> len(records), records.column("loss"), records.kappa_until(10)
    (1, (array('q', [10]), array('d', [0.5])), [1.0, 0.7])
    """

    def __init__(self) -> None:
        self.steps = array("q")
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        self._kappas: list[tuple[int, array[float]]] = []  # those that differ from the one before
        self._sorted: set[str] = set()

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def keys(self) -> list[str]:
        return list(self._columns)

    def add(self, record: Record) -> None:
        step = record["step"]
        self.steps.append(step)
        for key, value in record.items():
            column = self._columns.get(key)
            if (
                type(value) is float or type(value) is int or value is None
            ):  # a third of the time of a report is spent here
                if column is None and len(self._columns) < MOST_KEYS:
                    column = self._columns[key] = array("q"), array("d")
                if column is not None and value is not None and -LARGEST <= value <= LARGEST:
                    column[0].append(step)
                    column[1].append(value)
            elif key == "kappa" and isinstance(value, list) and value and all(map(_is_number, value)):
                self._add_kappa(step, array("d", value))

    def _add_kappa(self, step: int, kappa: array[float]) -> None:
        if not self._kappas or self._kappas[-1][1] != kappa:
            self._kappas.append((step, kappa))

    def column(self, key: str) -> tuple[array[int], array[float]]:
        """Steps and finite numbers under a key, in the order of the steps."""
        steps, values = self._columns.get(key, (array("q"), array("d")))
        if key not in self._sorted:
            self._sorted.add(key)
            if any(before > after for before, after in pairwise(steps)):
                order = sorted(range(len(steps)), key=steps.__getitem__)
                steps, values = array("q", [steps[i] for i in order]), array("d", [values[i] for i in order])
                self._columns[key] = steps, values
        return steps, values

    def kappa_until(self, step: int) -> list[float]:
        """kappa_i of the last record up to this step that has them."""
        return next((list(kappa) for at, kappa in reversed(self._kappas) if at <= step), [])


@dataclass(frozen=True)
class Run:
    """A run's settings and its records by kind. What was not recorded is nan, or an empty series.

    >>> from scalelong.runs.settings import to_yaml
    >>> _ = Path("config.yaml").write_text(to_yaml(RunConfig()))
    >>> _ = Path("metrics.jsonl").write_text('{"step": 10, "kind": "train", "loss": 0.5, "seconds": 2}')
    >>> run = read_run(".")
    >>> run.final_loss(), run.seconds_at([5])
    (0.5, [1.0])
    """

    folder: Path
    config: RunConfig
    train: Records
    probe: Records
    damaged_lines: int
    start: tuple[Record, ...] = ()
    evaluations: tuple[Measurement, ...] = ()

    @property
    def label(self) -> str:
        return self.config.scaling.label

    @property
    def seed(self) -> int:
        return self.config.training.seed

    @property
    def data(self) -> str:
        """Fingerprint of the data, of all of them if they changed; empty where none was recorded."""
        return " then ".join(dict.fromkeys(record["data"] for record in self.start if record.get("data")))

    @property
    def probe_interval(self) -> float:
        """Steps between two probes; 0 for less than two."""
        steps = self.probe.steps
        return median(after - before for before, after in pairwise(steps)) if len(steps) > 1 else 0

    @property
    def last_step(self) -> int:
        """Step of the last training record."""
        return max(self.train.steps)

    @property
    def blocks(self) -> list[str]:
        """The probed blocks, from the input to the output of the U."""
        return [key.removeprefix("norm/") for key in self.probe.keys if key.startswith("norm/")]

    @property
    def middle_block(self) -> str:
        """The middle of the probed blocks, the bottom of the U; empty where nothing was probed."""
        blocks = self.blocks
        return next((b for b in blocks if b.startswith("mid")), blocks[len(blocks) // 2] if blocks else "")

    def column(self, kind: str, key: str, upto: int | None = None, after: int = -1) -> Column:
        """Steps and values of the records with a finite number under this key, for after < step <= upto."""
        steps, values = getattr(self, kind).column(key)
        kept = slice(bisect_right(steps, after), len(steps) if upto is None else bisect_right(steps, upto))
        return steps[kept].tolist(), values[kept].tolist()

    def quality(self, metric: Metric) -> Column:
        """Steps and values of a metric; several evaluations at one step are averaged."""
        values: dict[int, list[float]] = {}
        for evaluation in self.evaluations:
            if evaluation.metric == metric:
                values.setdefault(evaluation.step, []).append(evaluation.value)
        return sorted(values), [fmean(values[step]) for step in sorted(values)]

    def final_losses(self, upto: int | None = None) -> Column:
        """Steps and losses of the last fifth of the records."""
        steps, losses = self.column("train", "loss", upto)
        count = max(1, int(len(losses) * FINAL_SHARE))
        return steps[-count:], losses[-count:]

    def final_loss(self, upto: int | None = None) -> float:
        """Mean loss over the last fifth of the records."""
        return fmean(self.final_losses(upto)[1] or [math.nan])

    def oscillation(self, block: str = "", upto: int | None = None, what: str = "norm", after: int = -1) -> float:
        """Relative oscillation of a block's norm ("norm", on the probe batch) or of its gradient's ("gradient")."""
        _, norms = self.column("probe", f"{what}/{block or self.middle_block}", upto, after)
        return relative_oscillation(norms) if len(norms) > 1 else math.nan

    def gradient_spread(self, upto: int | None = None) -> float:
        """Relative spread of the gradient norm after warm-up."""
        _, norms = self.column("train", "gradient_norm", upto, after=self.config.optimizer.warmup_steps)
        return relative_spread(norms) if len(norms) > 1 else math.nan

    def throughput(self, upto: int | None = None) -> float:
        """Median of the images per second, so that a pause does not count."""
        return median(self.column("train", "images_per_second", upto)[1] or [math.nan])

    def seconds_at(self, steps: Sequence[int]) -> list[float]:
        """Seconds of training at these steps, interpolated between records."""
        known, seconds = self.column("train", "seconds")
        return np.interp(steps, [0, *known], [0.0, *seconds]).tolist() if known else [math.nan] * len(steps)

    def coefficients(self, upto: int | None = None) -> list[float]:
        """kappa_i of the last record (up to a step) that has them, outermost skip first."""
        return self.train.kappa_until(self.last_step if upto is None else upto)

    def sample_grids(self) -> list[tuple[int, Path]]:
        """Step and file of each grid sampled during training."""
        return list(by_step(inside(self.folder, SAMPLES).glob("step-*.png")).items())


def read_run(folder: str | Path) -> Run:
    """Read a run folder; a run without training records is an error.

    >>> from scalelong.runs.settings import to_yaml
    >>> _ = Path("config.yaml").write_text(to_yaml(RunConfig()))
    >>> _ = Path("metrics.jsonl").write_text('{"step": 10, "kind": "train", "loss": 0.5}')
    >>> read_run(".").last_step
    10
    """
    folder = Path(folder)
    config = read_config(folder)
    if not inside(folder, METRICS).is_file():
        raise FileNotFoundError(f"{folder}: has no {METRICS}; the run has not written a record yet")
    columns = {"train": Records(), "probe": Records()}
    start: list[Record] = []
    evaluations: list[Measurement] = []
    damaged = 0
    for record in each_event(folder):
        try:
            if record is None or not _is_count(record["step"]):
                damaged += 1
            elif (kind := record.get("kind")) in ("train", "probe"):
                columns[kind].add(record)
            elif kind == "start":
                _check(isinstance(record.get("data"), str | None))
                start.append(_printable(record))
            elif kind == "evaluation":
                evaluations.append(_measurement(_printable(record), config.sampling))
        except (KeyError, TypeError, ValueError):
            damaged += 1
    if not columns["train"]:
        raise ValueError(f"{folder}: {METRICS} has no training record ({damaged} damaged lines); train it further")
    finite = tuple(evaluation for evaluation in evaluations if math.isfinite(evaluation.value))
    return Run(folder, config, columns["train"], columns["probe"], damaged, tuple(start), finite)


def read_runs(folders: Iterable[str | Path]) -> tuple[list[Run], list[str]]:
    """The runs in these folders or right inside them, and why others were left out; no run at all is an error.

    >>> from scalelong.runs.settings import to_yaml
    >>> _ = Path("config.yaml").write_text(to_yaml(RunConfig()))
    >>> _ = Path("metrics.jsonl").write_text('{"step": 10, "kind": "train", "loss": 0.5}')
    >>> runs, refused = read_runs([".", "nowhere"])
    >>> len(runs), len(refused)
    (1, 1)
    """
    found: list[Path] = []
    for folder in map(Path, folders):
        inside = [] if is_run(folder) else sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
        found += [path.resolve() for path in inside or [folder]]
    if not found:
        raise ValueError("runs: none given; name run folders, for example runs/demo")
    runs, refused, here = [], [], Path.cwd()
    for folder in dict.fromkeys(found):
        try:
            runs.append(read_run(folder.relative_to(here) if here in folder.parents else folder))
        except (OSError, ValueError) as error:
            refused.append(str(error))
    if not runs:
        raise ValueError("runs: nothing to show; " + "; ".join(refused))
    return runs, refused


def _printable(record: Record) -> Record:
    """The record with its texts on one line of printable characters, cut: they are shown on terminals and pages."""

    def clean(text: str) -> str:
        return "".join(letter if letter.isprintable() else "\ufffd" for letter in text[:LONGEST_TEXT])

    return {clean(key): clean(value) if isinstance(value, str) else value for key, value in record.items()}


def _measurement(record: Record, run: SamplingSettings) -> Measurement:
    """An evaluation record, checked; a value of null, which was not finite, is nan."""
    value, n, name = record["value"], record["n"], record["metric"]
    texts = {key: record[key] for key in ("extractor", "weights", "reference") if record.get(key) is not None}
    _check(all(isinstance(text, str) for text in (name, *texts.values())), value is None or _is_number(value))
    _check(_is_count(n) and n > 0)
    metric = Metric(name, n, sampling=_sampling(record, run), **texts)
    return Measurement(record["step"], math.nan if value is None else float(value), metric, record.get("sample_seed"))


def _sampling(record: Record, run: SamplingSettings) -> SamplingSettings:
    """How the images were sampled: recorded under "sampling", or by older versions as flat keys.

    What older records lack is the run's own setting; settings that do not change the images keep their defaults.
    """
    values = record.get("sampling")
    if values is None:
        values = {key: record.get(key) for key in ("sampler", "guidance", "precision")}
        values |= {"steps": record.get("sampler_steps"), "clip": run.clip, "guidance_interval": run.guidance_interval}
    _check(isinstance(values, dict))
    default = asdict(SamplingSettings())
    same = ("count", "batch_size", "compile")
    known = default | {k: v for k, v in values.items() if k in default and k not in same and v is not None}
    low, high = known["guidance_interval"]
    high = math.inf if high is None else high  # JSON has no infinity
    for key in ("sampler", "precision", "clip"):
        _check(isinstance(known[key], type(default[key])))
    numbers = [known["guidance"], low, 0 if high == math.inf else high]
    _check(_is_count(known["steps"]), *map(_is_number, numbers))
    guided = known["guidance"] != 1
    return SamplingSettings(**known | {"guidance_interval": (low, high) if guided else default["guidance_interval"]})


def _check(*conditions: bool) -> None:
    if not all(conditions):
        raise ValueError("damaged record")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _is_number(value: Any) -> bool:
    """True for a finite number of a plausible size."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def relative_oscillation(norms: Sequence[float]) -> float:
    """mean |n_(k+1) - n_k| / mean n: how far a norm moves between two records, relative to its size.

    >>> relative_oscillation([1.0, 3.0, 2.0])
    0.75
    """
    if len(norms) < 2:
        raise ValueError(f"norms: oscillation needs at least 2 records, got {len(norms)}")
    return _ratio(fmean([abs(after - before) for before, after in pairwise(norms)]), fmean(norms))


def relative_spread(values: Sequence[float]) -> float:
    """Standard deviation over mean.

    >>> round(relative_spread([1.0, 3.0]), 3)
    0.707
    """
    if len(values) < 2:
        raise ValueError(f"values: a spread needs at least 2 records, got {len(values)}")
    mean = fmean(values)
    return _ratio(math.dist(values, [mean] * len(values)) / math.sqrt(len(values) - 1), mean)


def _ratio(value: float, mean: float) -> float:
    """value / mean; nan for a series of zeros."""
    return value / mean if mean else math.inf if value else math.nan
