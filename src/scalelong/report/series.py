"""A run's records as series of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalelong.stability import relative_oscillation, relative_spread
from scalelong.training import RunConfig, from_yaml, read_events


@dataclass(frozen=True)
class RunSeries:
    """What one run wrote: its configuration and its records by kind."""

    folder: Path
    config: RunConfig
    train: list[dict[str, Any]]
    probe: list[dict[str, Any]]
    damaged_lines: int

    @property
    def label(self) -> str:
        """How the run is called in tables and pictures."""
        scaling = self.config.scaling
        return f"{scaling.method} {scaling.kappa:g}" if "kappa" in scaling.options() else scaling.method

    def column(self, kind: str, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of the records that have this key."""
        records = [r for r in getattr(self, kind) if isinstance(r.get(key), (int, float))]
        return [r["step"] for r in records], [float(r[key]) for r in records]

    @property
    def middle_block(self) -> str:
        """The middle of the probed blocks: the bottom of the U."""
        blocks = [key.removeprefix("norm/") for key in self.probe[0] if key.startswith("norm/")]
        return next((b for b in blocks if b.startswith("mid")), blocks[len(blocks) // 2])

    def final_loss(self, share: float = 0.2) -> float:
        """Mean loss over the last part of the records."""
        _, losses = self.column("train", "loss")
        last = losses[-max(1, int(len(losses) * share)) :]
        return sum(last) / len(last)

    def oscillation(self) -> float:
        """Relative oscillation of the middle block's norm on the probe batch."""
        return relative_oscillation(self.column("probe", f"norm/{self.middle_block}")[1])

    def gradient_spread(self) -> float:
        """Relative spread of the gradient norm after warm-up."""
        steps, norms = self.column("train", "gradient_norm")
        after = [n for s, n in zip(steps, norms, strict=True) if s > self.config.optimizer.warmup_steps]
        return relative_spread(after)


def read_run(folder: str | Path) -> RunSeries:
    """Read a run's folder; a run without records is refused."""
    folder = Path(folder)
    if not (folder / "config.yaml").is_file():
        raise FileNotFoundError(f"{folder}: is no run (it holds no config.yaml)")
    if not (folder / "metrics.jsonl").is_file():
        raise FileNotFoundError(f"{folder}: has no metrics.jsonl; the run has not written a record yet")
    records, damaged = read_events(folder)
    kinds = {kind: [r for r in records if r.get("kind") == kind] for kind in ("train", "probe")}
    if not kinds["train"]:
        raise ValueError(f"{folder}: metrics.jsonl holds no training record")
    return RunSeries(folder, from_yaml(folder / "config.yaml"), kinds["train"], kinds["probe"], damaged)
