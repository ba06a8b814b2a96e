"""A run's records as series of numbers; what a run did not record is nan, or an empty series."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from scalelong.runs.events import read_events
from scalelong.runs.oscillation import relative_oscillation, relative_spread
from scalelong.runs.settings import RunConfig
from scalelong.runs.yaml_file import from_yaml

Record = dict[str, Any]
Column = tuple[list[int], list[float]]  # steps and values

FINAL_SHARE = 0.2  # "final" is the last fifth of the records
LARGEST = 1e100  # no run writes larger numbers, and their squares still fit into a float
TEXTS = {"start": ("data",), "evaluation": ("extractor", "sampler", "precision", "reference", "weights")}


@dataclass(frozen=True)
class RunSeries:
    """What one run wrote: its configuration and its records by kind."""

    folder: Path
    config: RunConfig
    train: list[Record]
    probe: list[Record]
    damaged_lines: int
    start: tuple[Record, ...] = ()
    evaluation: tuple[Record, ...] = ()
    _columns: dict[tuple[str, str], Column] = field(default_factory=dict, repr=False, compare=False)

    @property
    def label(self) -> str:
        """How the run's method is called in tables and pictures."""
        return self.config.scaling.label

    @property
    def seed(self) -> int:
        return self.config.training.seed

    @property
    def data(self) -> str:
        """The fingerprint of the data it was started on, of all of them if they changed; empty where none was recorded."""
        return " then ".join(dict.fromkeys(record["data"] for record in self.start if record.get("data")))

    @property
    def probe_interval(self) -> float:
        """Steps between two probes; 0 where there are not two."""
        steps = [record["step"] for record in self.probe]
        return median(after - before for before, after in pairwise(steps)) if len(steps) > 1 else 0

    @property
    def last_step(self) -> int:
        """The step of the last training record."""
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

    def column(self, kind: str, key: str, upto: int | None = None) -> Column:
        """Steps and values of the records, up to a step, that have a finite number under this key."""
        if (kind, key) not in self._columns:
            records = [record for record in getattr(self, kind) if _is_number(record.get(key))]
            records.sort(key=lambda record: record["step"])
            self._columns[kind, key] = [r["step"] for r in records], [float(r[key]) for r in records]
        steps, values = self._columns[kind, key]
        count = len(steps) if upto is None else bisect_right(steps, upto)
        return steps[:count], values[:count]

    def final_losses(self, upto: int | None = None) -> Column:
        """Steps and losses of the last fifth of the records."""
        steps, losses = self.column("train", "loss", upto)
        count = max(1, int(len(losses) * FINAL_SHARE))
        return steps[-count:], losses[-count:]

    def final_loss(self, upto: int | None = None) -> float:
        """Mean loss over the last fifth of the records."""
        _, last = self.final_losses(upto)
        return sum(last) / len(last) if last else math.nan

    def oscillation(self, block: str = "", upto: int | None = None, what: str = "norm") -> float:
        """Relative oscillation of a block's norm ("norm", on the probe batch) or of its gradient's ("gradient")."""
        _, norms = self.column("probe", f"{what}/{block or self.middle_block}", upto)
        return relative_oscillation(norms) if len(norms) > 1 else math.nan

    def gradient_spread(self, upto: int | None = None) -> float:
        """Relative spread of the gradient norm after warm-up."""
        steps, norms = self.column("train", "gradient_norm", upto)
        after = [n for s, n in zip(steps, norms, strict=True) if s > self.config.optimizer.warmup_steps]
        return relative_spread(after) if len(after) > 1 else math.nan

    def throughput(self, upto: int | None = None) -> float:
        """Median of the images per second: a pause does not count."""
        _, speeds = self.column("train", "images_per_second", upto)
        return median(speeds) if speeds else math.nan

    def seconds_at(self, steps: Sequence[int]) -> list[float]:
        """Seconds of training at these steps, between the records by interpolation."""
        known, seconds = self.column("train", "seconds")
        if not known:
            return [math.nan] * len(steps)
        return [float(s) for s in np.interp(steps, [0, *known], [0.0, *seconds])]

    def coefficients(self, last: bool = True) -> list[float]:
        """kappa_i of the last (or the first) record that holds them, outermost skip first."""
        for record in reversed(self.train) if last else self.train:
            values = record.get("kappa")
            if isinstance(values, list) and values and all(map(_is_number, values)):
                return [float(value) for value in values]
        return []

    def sample_grids(self) -> list[tuple[int, Path]]:
        """Step and file of each grid drawn during training."""
        found = (self.folder / "samples").glob("step-*.png")
        numbers = [(path.stem.removeprefix("step-"), path) for path in found]
        return sorted((int(number), path) for number, path in numbers if number.isdecimal())


def read_run(folder: str | Path) -> RunSeries:
    """Read a run's folder; a run without records is refused."""
    folder = Path(folder)
    if not (folder / "config.yaml").is_file():
        raise FileNotFoundError(f"{folder}: is no run (it holds no config.yaml); give a folder that training wrote")
    if not (folder / "metrics.jsonl").is_file():
        raise FileNotFoundError(f"{folder}: has no metrics.jsonl; the run has not written a record yet")
    read, damaged = read_events(folder)
    records = [record for record in read if _is_sound(record)]
    kinds = {kind: [r for r in records if r.get("kind") == kind] for kind in ("train", "probe", "start", "evaluation")}
    if not kinds["train"]:
        raise ValueError(f"{folder}: metrics.jsonl holds no training record; train on, then come back")
    return RunSeries(
        folder,
        from_yaml(folder / "config.yaml"),
        kinds["train"],
        kinds["probe"],
        damaged + len(read) - len(records),
        tuple(kinds["start"]),
        tuple(record for record in kinds["evaluation"] if record["value"] is not None),
    )


def read_runs(folders: Iterable[str | Path]) -> tuple[list[RunSeries], list[str]]:
    """The runs of these folders, or of the folders in them, and why others were left out; no run at all is an error."""
    given = list(folders)
    if not given:
        raise ValueError("runs: none given; name the folders that training wrote, for example runs/demo")
    runs, refused = [], []
    for folder in dict.fromkeys(path.resolve() for item in given for path in _expanded(Path(item))):
        try:
            runs.append(read_run(_as_given(folder)))
        except (OSError, ValueError) as error:
            refused.append(str(error))
    if not runs:
        raise ValueError("runs: nothing to show; " + "; ".join(refused))
    return runs, refused


def _expanded(folder: Path) -> list[Path]:
    """The folder itself, or the runs right inside it if it is none."""
    if folder.is_dir() and not (folder / "config.yaml").is_file():
        inside = sorted(path.parent for path in folder.glob("*/config.yaml"))
        return inside or [folder]
    return [folder]


def _as_given(folder: Path) -> Path:
    """Relative to where the reader stands, if it lies below."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) and folder != here else folder


def _is_sound(record: Record) -> bool:
    """Whether the fields that reports rely on are what they must be; a value of null is one that was not finite."""
    kind = record.get("kind")
    sound = _is_count(record["step"]) and (kind != "evaluation" or _is_sound_evaluation(record))
    texts = [record.get(key) for key in TEXTS.get(kind, ())] if isinstance(kind, str) else []
    return sound and all(text is None or isinstance(text, str) for text in texts)


def _is_sound_evaluation(record: Record) -> bool:
    value, steps, guidance = (record.get(key) for key in ("value", "sampler_steps", "guidance"))
    return (
        isinstance(record.get("metric"), str)
        and ("value" in record and (value is None or _is_number(value)))
        and (_is_count(record.get("n")) and record["n"] > 0)
        and (steps is None or _is_count(steps))
        and (guidance is None or _is_number(guidance))
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _is_number(value: Any) -> bool:
    """Whether this is a finite number that can be reckoned with."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST
