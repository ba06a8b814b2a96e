"""The queue of the study: pieces of GPU time, checked before any of it is spent."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import variants
import yaml

from scalelong.scaling.registry import ScalingConfig

QUEUE = Path(__file__).with_name("queue.yaml")
DATA = {"cifar10": ("CIFAR-10", 50_000), "fashion_mnist": ("Fashion-MNIST", 60_000)}  # title and training images


class StudyError(ValueError):
    """A piece that must not start, or results that must not be joined."""


@dataclass(frozen=True)
class Run:
    """One network to train: a scaling method with its options, changes of variants.py, and a seed."""

    method: str
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 0  # 0: as many as the piece
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The method as shown in tables: "ls", "cs kappa=0.7 ramp=20000"."""
        return " ".join([self.method, *(f"{key}={value}" for key, value in {**self.options, **self.changes}.items())])

    @property
    def name(self) -> str:
        """The run's file name."""
        return f"{self.label}-seed{self.seed}".replace(" ", "-")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Network and schedule."""

    network: str = "uvit"  # or "unet", the DDPM's (36M parameters at dim 128), which needs diffusers
    steps: int = 100_000
    batch: int = 128
    lr: float = 2e-4
    warmup: int = 2500
    dim: int = 256
    depth: int = 12
    heads: int = 4
    patch: int = 4
    loss_every: int = 1000
    fid_at: tuple[int, ...] = (10_000, 25_000, 50_000, 100_000)
    short_fid: bool = True  # FID of the shorter average too


@dataclass(frozen=True)
class Piece(Recipe):
    """Runs that train at the same time on one GPU, with the same data, network and schedule."""

    name: str
    runs: tuple[Run, ...]
    data: str = "cifar10"
    minutes: float = 0.0  # estimated, or measured once done
    ms_per_step: float = 0.0  # per model and step where the arithmetic does not tell, test losses included
    fid_s: float = 0.0  # likewise
    status: str = "open"  # open, done, partial
    probe_s: float = 0.0  # per run, of linear probes: experiments/features/features.py runs this piece

    @property
    def cost(self) -> float:
        """Arithmetic of one training step relative to the proxy network at batch 128."""
        return self.batch * self._tokens * self.depth * self.dim**2 / (128 * 65 * 12 * 256**2)

    @property
    def _tokens(self) -> int:
        return (32 // self.patch) ** 2 + 1


@dataclass(frozen=True)
class Speed:
    """What a piece costs, as measured on the GPU: used to refuse pieces that cannot end in time."""

    ms_per_step: float  # GPU milliseconds per model and step of the proxy at batch 128, all runs at once
    fid_s: float = 8.0  # 10,000 samples of each average and their FID, per run
    startup_s: float = 60.0  # import, compile, capture
    limit_minutes: float = 28.0

    def seconds(self, piece: Piece) -> float:
        """Seconds that the piece takes from start to last row."""
        steps = [run.steps or piece.steps for run in piece.runs]
        fids = sum(at <= last for last in steps for at in piece.fid_at)
        fid_s = piece.fid_s or piece.cost * 128 / piece.batch * self.fid_s
        return self.startup_s + sum(steps) * self.step_ms(piece) / 1000 + fids * fid_s + len(steps) * piece.probe_s

    def step_ms(self, piece: Piece) -> float:
        """Milliseconds per model and step."""
        return piece.ms_per_step or piece.cost * self.ms_per_step


@dataclass(frozen=True)
class Queue:
    """All pieces, most valuable first."""

    pieces: tuple[Piece, ...]
    speed: Speed

    def find(self, name: str) -> Piece:
        """The piece of this name."""
        for piece in self.pieces:
            if piece.name == name:
                return piece
        raise StudyError(f"queue: no piece {name!r}; choose one of {', '.join(piece.name for piece in self.pieces)}")


def read_queue(path: Path = QUEUE) -> Queue:
    """Read and check the whole queue."""
    content = yaml.safe_load(path.read_text())
    speed = _from_keys(Speed, content["speed"], "speed")
    pieces = tuple(_piece({**content.get("defaults", {}), **entry}) for entry in content["pieces"])
    _require_distinct("queue", [piece.name for piece in pieces], "pieces")
    return Queue(pieces, speed)


def check_startable(piece: Piece, speed: Speed) -> None:
    """Raise StudyError unless the piece can run now and end in time."""
    where = f"queue.{piece.name}"
    if piece.status == "done":
        raise StudyError(f"{where}.status: the piece is done; take the next one, or set it to open to repeat it")
    minutes = speed.seconds(piece) / 60
    if minutes > speed.limit_minutes:
        raise StudyError(
            f"{where}.steps: {len(piece.runs)} runs of {piece.steps} steps take {minutes:.1f} minutes at "
            f"{speed.step_ms(piece):.2f} ms per model and step, the limit is {speed.limit_minutes:g}; "
            "split the runs over two pieces"
        )


def _piece(entry: Mapping[str, Any]) -> Piece:
    where = f"queue.{entry.get('name', '?')}"
    entry = dict(entry)
    seeds, methods = entry.pop("seeds", [0]), entry.pop("runs", [])
    runs = tuple(_run(method, seed, where) for method in methods for seed in method.get("seeds", seeds))
    piece: Piece = _from_keys(Piece, {**entry, "runs": runs, "fid_at": tuple(entry.get("fid_at", Piece.fid_at))}, where)
    if not runs:
        raise StudyError(f"{where}.runs: the piece has no runs; name at least one method and one seed")
    for key in ("steps", "batch", "loss_every"):
        if getattr(piece, key) < 1:
            raise StudyError(f"{where}.{key}: must be at least 1, got {getattr(piece, key)}")
    if piece.data not in DATA:
        raise StudyError(f"{where}.data: unknown {piece.data!r}; choose one of {', '.join(DATA)}")
    if piece.network not in ("uvit", "unet") or (piece.network == "unet" and not piece.ms_per_step):
        raise StudyError(f"{where}.network: must be uvit, or unet with ms_per_step, got {piece.network!r}")
    for key in (key for run in runs for key in run.changes):
        if key in (variants.UVIT_KEYS if piece.network == "unet" else variants.UNET_KEYS):
            raise StudyError(f"{where}.runs: {key} is not for network {piece.network}; drop it")
    _require_distinct(f"{where}.runs", [run.name for run in runs], "runs")
    return piece


def _run(entry: Mapping[str, Any], seed: int, where: str) -> Run:
    options = {key: value for key, value in entry.items() if key not in ("method", "seeds", "steps", *variants.KEYS)}
    changes = {key: value for key, value in entry.items() if key in variants.KEYS}
    method = entry.get("method", "")
    try:
        ScalingConfig.create(method, **options)
        variants.check(method, changes)
    except (TypeError, ValueError) as error:
        raise StudyError(f"{where}.runs: {error}") from error
    return Run(method, seed, options, entry.get("steps", 0), changes)


def _from_keys(cls: type, values: Mapping[str, Any], where: str) -> Any:
    known = [entry.name for entry in dataclasses.fields(cls)]
    for key in values:
        if key not in known:
            raise StudyError(f"{where}.{key}: unknown key; choose one of {', '.join(known)}")
    try:
        return cls(**values)
    except TypeError as error:
        raise StudyError(f"{where}: {error}") from error


def _require_distinct(where: str, names: list[str], what: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise StudyError(f"{where}: {count} {what} are called {name!r}; rename or drop one")
