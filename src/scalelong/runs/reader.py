"""Reading a run folder: its settings, checkpoints, sample grids and records."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from scalelong.runs import CHECKPOINTS, CONFIG, METRICS, SAMPLES, step_number
from scalelong.runs.events import read_events
from scalelong.runs.settings import RunConfig, SamplingSettings, from_yaml

Record = dict[str, Any]
Column = tuple[list[int], list[float]]  # steps and values

FINAL_SHARE = 0.2  # "final" is the last fifth of the records
LARGEST = 1e100  # larger numbers are taken for damage; squares of smaller ones fit into a float
PROBE_EVERY = 50  # steps between probe records: below 2% of the step time (benchmarks/probe_overhead.py)


def is_run(folder: str | Path) -> bool:
    return (Path(folder) / CONFIG).is_file()


def read_config(folder: str | Path) -> RunConfig:
    """The settings of a run."""
    if not is_run(folder):
        raise FileNotFoundError(f"{folder}: is not a run folder (no {CONFIG}); give one that scalelong train wrote")
    return from_yaml(Path(folder) / CONFIG)


def checkpoints(folder: str | Path) -> dict[int, Path]:
    """The checkpoints of a run by step, oldest first."""
    return _by_step((Path(folder) / CHECKPOINTS).glob("step-*"))


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
    train: list[Record]
    probe: list[Record]
    damaged_lines: int
    start: tuple[Record, ...] = ()
    evaluations: tuple[Measurement, ...] = ()
    linear_probes: tuple[Record, ...] = ()
    _columns: dict[tuple[str, str], Column] = field(default_factory=dict, repr=False, compare=False)

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
        steps = [record["step"] for record in self.probe]
        return median(after - before for before, after in pairwise(steps)) if len(steps) > 1 else 0

    @property
    def last_step(self) -> int:
        """Step of the last training record."""
        return max(int(record["step"]) for record in self.train)

    @property
    def blocks(self) -> list[str]:
        """The probed blocks, from the input to the output of the U."""
        return [key.removeprefix("norm/") for key in self.probe[0] if key.startswith("norm/")] if self.probe else []

    @property
    def middle_block(self) -> str:
        """The middle of the probed blocks, the bottom of the U; empty where nothing was probed."""
        blocks = self.blocks
        return next((b for b in blocks if b.startswith("mid")), blocks[len(blocks) // 2] if blocks else "")

    def column(self, kind: str, key: str, upto: int | None = None, after: int = -1) -> Column:
        """Steps and values of the records with a finite number under this key, for after < step <= upto."""
        if (kind, key) not in self._columns:
            records = [record for record in getattr(self, kind) if _is_number(record.get(key))]
            records.sort(key=lambda record: record["step"])
            self._columns[kind, key] = [r["step"] for r in records], [float(r[key]) for r in records]
        steps, values = self._columns[kind, key]
        kept = slice(bisect_right(steps, after), len(steps) if upto is None else bisect_right(steps, upto))
        return steps[kept], values[kept]

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

    def coefficients(self) -> list[float]:
        """kappa_i of the last record that has them, outermost skip first."""
        recorded = (record.get("kappa") for record in reversed(self.train))
        return next((v for v in recorded if isinstance(v, list) and v and all(map(_is_number, v))), [])

    def sample_grids(self) -> list[tuple[int, Path]]:
        """Step and file of each grid sampled during training."""
        return list(_by_step((self.folder / SAMPLES).glob("step-*.png")).items())


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
    if not (folder / METRICS).is_file():
        raise FileNotFoundError(f"{folder}: has no {METRICS}; the run has not written a record yet")
    records, damaged = read_events(folder)
    kinds: dict[str, list[Any]] = {"train": [], "probe": [], "start": [], "evaluation": [], "linear_probe": []}
    for record in records:
        kind = record.get("kind")
        try:
            _check(_is_count(record["step"]), kind != "start" or isinstance(record.get("data"), str | None))
            if kind == "linear_probe":
                _check_probe(record)
            if kind in kinds:
                kinds[kind].append(_measurement(record, config.sampling) if kind == "evaluation" else record)
        except (KeyError, TypeError, ValueError):
            damaged += 1
    if not kinds["train"]:
        raise ValueError(f"{folder}: {METRICS} has no training record ({damaged} damaged lines); train it further")
    finite = tuple(evaluation for evaluation in kinds["evaluation"] if math.isfinite(evaluation.value))
    about = (tuple(kinds["start"]), finite, tuple(kinds["linear_probe"]))
    return Run(folder, config, kinds["train"], kinds["probe"], damaged, *about)


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


def _by_step(paths: Iterable[Path]) -> dict[int, Path]:
    found = {step: path for path in paths if (step := step_number(path.stem)) is not None}
    return dict(sorted(found.items()))


def _measurement(record: Record, run: SamplingSettings) -> Measurement:
    """An evaluation record, checked; a value of null, which was not finite, is nan."""
    value, n, name = record["value"], record["n"], record["metric"]
    texts = {key: record[key] for key in ("extractor", "weights", "reference") if record.get(key) is not None}
    _check(all(isinstance(text, str) for text in (name, *texts.values())), value is None or _is_number(value))
    _check(_is_count(n) and n > 0)
    metric = Metric(name, n, sampling=_sampling(record, run), **texts)
    return Measurement(record["step"], math.nan if value is None else float(value), metric, record.get("sample_seed"))


def _check_probe(record: Record) -> None:
    """A record of `scalelong probe`: accuracies of blocks (rows) at noise levels (columns)."""
    rows, levels = record["held_out"], record["noise"]
    _check(all(isinstance(block, str) for block in record["blocks"]), len(rows) == len(record["blocks"]) > 0)
    _check(record["block"] in record["blocks"], record["level"] in levels, isinstance(record["protocol"], str))
    numbers = [*levels, *(value for row in rows for value in row), record["accuracy"], record["n_held_out"]]
    floors = [record[key] for key in ("random_network", "pixels") if record.get(key) is not None]
    _check(all(len(row) == len(levels) for row in rows), *map(_is_number, [*numbers, *floors]))


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
    return _ratio(fmean(abs(after - before) for before, after in pairwise(norms)), fmean(norms))


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
