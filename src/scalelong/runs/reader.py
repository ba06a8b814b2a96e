"""Read a run's settings and records."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import numpy as np

from scalelong.files import inside
from scalelong.runs import CONFIG, METRICS, SAMPLES
from scalelong.runs.events import each_record, read_records
from scalelong.runs.folder import by_step, is_run, read_config
from scalelong.runs.records import (
    Measurement,
    Metric,
    Record,
    Records,
    check,
    checked_probe,
    is_count,
    measurement,
    printable,
)
from scalelong.runs.settings import RunConfig, ScalingSettings

Column = tuple[list[int], list[float]]  # steps and values

FINAL_SHARE = 0.2  # "final" is the last fifth of the records
NOISE_BINS = 10  # of the validation loss
PROBE_EVERY = 50  # steps between probe records: below 2% of the step time (benchmarks/probe_overhead.py)
MIDDLE = re.compile(r"(^|[._])(mid|middle|bottleneck|bottom|center|centre)", re.IGNORECASE)  # usual names of it


def middle_of(blocks: Sequence[str]) -> str:
    """The middle block, by name or position; empty for no blocks."""
    return next((block for block in blocks if MIDDLE.search(block)), blocks[len(blocks) // 2] if blocks else "")


@dataclass(frozen=True)
class Run:
    """A run's settings and its records by kind; missing values are nan or empty.

    >>> from scalelong.runs.config import to_yaml
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
    validation: Records = field(default_factory=Records)
    validated_on: frozenset[str] = frozenset()  # split and number of images
    linear_probes: tuple[Record, ...] = ()
    diverged: int | None = None  # the step at which the run ended with a NonFiniteError

    @property
    def label(self) -> str:
        return self.config.scaling.label

    @property
    def seed(self) -> int:
        return self.config.training.seed

    @property
    def data(self) -> str:
        """Fingerprints of the data; empty if not recorded."""
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
        """The middle of the probed blocks; empty if nothing was probed."""
        return middle_of(self.blocks)

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

    def oscillation(self, block: str = "", upto: int | None = None, what: str = "norm") -> float:
        """Relative oscillation of a block's norm (on the probe batch) or gradient ("gradient") after warm-up."""
        warmup = self.config.optimizer.warmup_steps
        _, norms = self.column("probe", f"{what}/{block or self.middle_block}", upto, warmup)
        return relative_oscillation(norms) if len(norms) > 1 else math.nan

    def gradient_spread(self, upto: int | None = None) -> float:
        """Relative spread of the gradient norm after warm-up."""
        _, norms = self.column("train", "gradient_norm", upto, after=self.config.optimizer.warmup_steps)
        return relative_spread(norms) if len(norms) > 1 else math.nan

    def throughput(self, upto: int | None = None) -> float:
        """Median images per second, robust to pauses."""
        return median(self.column("train", "images_per_second", upto)[1] or [math.nan])

    def noise_bins(self, upto: int | None = None) -> list[float]:
        """The last validation loss per noise bin, from low to high noise; empty if not recorded."""
        return self.validation.list_until("bins", math.inf if upto is None else upto)

    def seconds_at(self, steps: Sequence[int]) -> list[float]:
        """Seconds of training at these steps, interpolated between records."""
        known, seconds = self.column("train", "seconds")
        return np.interp(steps, [0, *known], [0.0, *seconds]).tolist() if known else [math.nan] * len(steps)

    def coefficients(self, upto: int | None = None) -> list[float]:
        """kappa_i of the last record (up to a step) that has them, outermost skip first."""
        return self.train.list_until("kappa", self.last_step if upto is None else upto)

    def sample_grids(self) -> list[tuple[int, Path]]:
        """Step and file of each grid sampled during training."""
        return list(by_step(inside(self.folder, SAMPLES).glob("step-*.png")).items())


def read_run(folder: str | Path) -> Run:
    """Read a run folder or the file of an `OscillationProbe`; raises if there are no training records.

    >>> from scalelong.runs.config import to_yaml
    >>> _ = Path("config.yaml").write_text(to_yaml(RunConfig()))
    >>> _ = Path("metrics.jsonl").write_text('{"step": 10, "kind": "train", "loss": 0.5}')
    >>> read_run(".").last_step
    10
    """
    folder = Path(folder)
    if folder.name == METRICS and is_run(folder.parent):
        folder = folder.parent
    if folder.is_file():
        return _read_probe(folder)
    config = read_config(folder)
    if not inside(folder, METRICS).is_file():
        raise FileNotFoundError(f"{folder}: has no {METRICS}; the run has not written a record yet")
    columns = {"train": Records(), "probe": Records(), "validation": Records()}
    start: list[Record] = []
    evaluations: list[Measurement] = []
    linear_probes: list[Record] = []
    validated_on: set[str] = set()
    damaged, diverged = 0, None
    for record in each_record(inside(folder, METRICS)):
        try:
            if record is None or not is_count(record["step"]):
                damaged += 1
            elif (kind := record.get("kind")) in columns:
                columns[kind].add(record)
                if kind == "validation":
                    validated_on.add(f"{record.get('split')!s:.40} {record.get('images')!s:.40}")
            elif kind == "start":
                check(isinstance(record.get("data"), str | None))
                start.append(printable(record))
                diverged = None  # resumed
            elif kind == "diverged":
                diverged = record["step"]
            elif kind == "evaluation":
                evaluations.append(measurement(printable(record), config.sampling))
            elif kind == "linear_probe":
                linear_probes.append(checked_probe(printable(record)))
        except (KeyError, TypeError, ValueError):
            damaged += 1
    if not columns["train"]:
        if diverged is not None:
            raise ValueError(f"{folder}: diverged at step {diverged}, before its first training record")
        raise ValueError(f"{folder}: {METRICS} has no training record ({damaged} damaged lines); train it further")
    return Run(
        folder,
        config,
        **columns,
        damaged_lines=damaged,
        start=tuple(start),
        evaluations=tuple(evaluation for evaluation in evaluations if math.isfinite(evaluation.value)),
        validated_on=frozenset(validated_on),
        linear_probes=tuple(linear_probes),
        diverged=diverged,
    )


def _read_probe(path: Path) -> Run:
    """Read probe records of another training loop, with losses if given."""
    records, damaged = read_records(path)
    probe = [record for record in records if any(key.startswith("norm/") for key in record)]
    if not probe:
        raise ValueError(f"{path}: has no records of an OscillationProbe; give its path=, or a run folder")
    scaling: Record = next((record["scaling"] for record in reversed(probe) if "scaling" in record), {"method": "none"})
    known = {key: value for key, value in scaling.get("options", {}).items() if hasattr(ScalingSettings, key)}
    config = RunConfig(scaling=ScalingSettings(method=scaling["method"], **known))
    config = replace(config, training=replace(config.training, steps=probe[-1]["step"]))
    config = replace(config, optimizer=replace(config.optimizer, warmup_steps=0))
    losses, norms = Records(), Records()
    for record in probe:
        losses.add({"seconds": 0.0} | {key: record[key] for key in ("step", "loss", "seconds") if key in record})
        norms.add({key: value for key, value in record.items() if key not in ("loss", "seconds")})
    return Run(path, config, losses, norms, damaged)


def read_runs(folders: Iterable[str | Path]) -> tuple[list[Run], list[str]]:
    """Read the runs in these folders or directly inside them, and the reasons for skipped ones; raises if there are none.

    >>> from scalelong.runs.config import to_yaml
    >>> _ = Path("config.yaml").write_text(to_yaml(RunConfig()))
    >>> _ = Path("metrics.jsonl").write_text('{"step": 10, "kind": "train", "loss": 0.5}')
    >>> runs, refused = read_runs([".", "nowhere"])
    >>> len(runs), len(refused)
    (1, 1)
    """
    found: list[Path] = []
    for folder in map(Path, folders):
        single = is_run(folder) or folder.is_file()
        below = [] if single else sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
        found += [path.resolve() for path in below or [folder]]
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


def relative_oscillation(norms: Sequence[float]) -> float:
    """mean |n_(k+1) - n_k| / mean n: relative change of a norm between records.

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
