"""In-memory records of a run, validated: columns of numbers, and evaluations."""

from __future__ import annotations

import math
from array import array
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from scalelong.errors import is_number
from scalelong.runs.settings import SamplingSettings

Record = dict[str, Any]

LARGEST = 1e100  # larger numbers count as damage; squares of smaller ones fit into a float
LONGEST_TEXT = 1000  # characters of a recorded text
LISTS = ("kappa", "bins")  # of the scaling, and of the validation loss by noise
MOST_KEYS = 4096  # names of numbers in the records of a run


@dataclass(frozen=True)
class Metric:
    """A metric and its protocol; only values of equal metrics are comparable."""

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
    """Records of one kind stored as columns of numbers.

    >>> records = Records()
    >>> records.add({"step": 10, "loss": 0.5, "kappa": [1.0, 0.7]})
    >>> len(records), records.column("loss"), records.list_until("kappa", 10)
    (1, (array('q', [10]), array('d', [0.5])), [1.0, 0.7])
    """

    def __init__(self) -> None:
        self.steps = array("q")
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        self._lists: dict[str, list[tuple[int, array[float]]]] = {key: [] for key in LISTS}  # where they change
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
            if type(value) is float or type(value) is int or value is None:  # hot path of reports
                if column is None and len(self._columns) < MOST_KEYS:
                    column = self._columns[key] = array("q"), array("d")
                if column is not None and value is not None and -LARGEST <= value <= LARGEST:
                    column[0].append(step)
                    column[1].append(value)
            elif key in LISTS and isinstance(value, list) and value and all(map(is_plausible, value)):
                known, values = self._lists[key], array("d", value)
                if not known or known[-1][1] != values:
                    known.append((step, values))

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

    def list_until(self, key: str, step: float) -> list[float]:
        """The list under a key, such as "kappa", in the last record up to this step that has one."""
        return next((list(values) for at, values in reversed(self._lists[key]) if at <= step), [])


def printable(record: Record) -> Record:
    """Sanitize the texts of a record for terminals and web pages."""

    def clean(text: str) -> str:
        return "".join(letter if letter.isprintable() else "\ufffd" for letter in text[:LONGEST_TEXT])

    return {clean(key): clean(value) if isinstance(value, str) else value for key, value in record.items()}


def measurement(record: Record, run: SamplingSettings) -> Measurement:
    """Validate an evaluation record; null becomes nan."""
    value, n, name = record["value"], record["n"], record["metric"]
    texts = {key: record[key] for key in ("extractor", "weights", "reference") if record.get(key) is not None}
    check(all(isinstance(text, str) for text in (name, *texts.values())), value is None or is_plausible(value))
    check(is_count(n) and n > 0)
    metric = Metric(name, n, sampling=_sampling(record, run), **texts)
    return Measurement(record["step"], math.nan if value is None else float(value), metric, record.get("sample_seed"))


def checked_probe(record: Record) -> Record:
    """Validate a `scalelong probe` record: accuracies of blocks (rows) at noise levels (columns)."""
    rows, levels = record["held_out"], record["noise"]
    check(all(isinstance(block, str) for block in record["blocks"]), len(rows) == len(record["blocks"]) > 0)
    check(record["block"] in record["blocks"], record["level"] in levels, isinstance(record["protocol"], str))
    numbers = [*levels, *(value for row in rows for value in row), record["accuracy"], record["n_held_out"]]
    floors = [record[key] for key in ("random_network", "pixels") if record.get(key) is not None]
    check(all(len(row) == len(levels) for row in rows), *map(is_plausible, [*numbers, *floors]))
    return record


def _sampling(record: Record, run: SamplingSettings) -> SamplingSettings:
    """Sampling settings of an evaluation, recorded under "sampling" (older versions: flat keys).

    Older records fall back to the run's settings; settings that do not change the images keep their defaults.
    """
    values = record.get("sampling")
    if values is None:
        values = {key: record.get(key) for key in ("sampler", "guidance", "precision")}
        values |= {"steps": record.get("sampler_steps"), "clip": run.clip, "guidance_interval": run.guidance_interval}
    check(isinstance(values, dict))
    default = asdict(SamplingSettings())
    same = ("count", "batch_size", "compile")
    known = default | {k: v for k, v in values.items() if k in default and k not in same and v is not None}
    low, high = known["guidance_interval"]
    high = math.inf if high is None else high  # JSON has no infinity
    for key in ("sampler", "precision", "clip"):
        check(isinstance(known[key], type(default[key])))
    numbers = [known["guidance"], known["skip_tuning"], low, 0 if high == math.inf else high]
    check(is_count(known["steps"]), *map(is_plausible, numbers))
    guided = known["guidance"] != 1
    return SamplingSettings(**known | {"guidance_interval": (low, high) if guided else default["guidance_interval"]})


def check(*conditions: bool) -> None:
    if not all(conditions):
        raise ValueError("damaged record")


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def is_plausible(value: Any) -> bool:
    """True for a finite number of a plausible size."""
    return is_number(value) and -LARGEST <= value <= LARGEST
