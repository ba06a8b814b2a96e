"""Small runs made by hand: real folders, with numbers that can be checked on paper."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from scalelong.training import to_yaml
from tests.training.tiny import tiny

MIDDLE = ("in_blocks.0", "mid_block", "out_blocks.0")


def write_run(
    folder: Path,
    method: str = "none",
    seed: int = 0,
    losses: Sequence[float | None] = (1.0, 0.8, 0.6, 0.4),
    *,
    every: int = 10,  # steps between records
    seconds: float = 1.0,  # between records
    norms: Sequence[float] = (),  # of the middle block
    kappa: Sequence[float] = (),
    evaluations: Sequence[tuple[int, float]] = (),
    metric: dict[str, Any] | None = None,
    data: str = "",  # the fingerprint
    **changes: Any,
) -> Path:
    """A run that recorded these losses every `every` steps."""
    config = tiny(
        scaling_method=method, training_seed=seed, **{"training_steps": max(1, every * len(losses))} | changes
    )
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    start = {"step": 0, "kind": "start", "command": f"scalelong train {folder.name}", "device": "cpu", "torch": "2"}
    records: list[dict[str, Any]] = [start | ({"data": data} if data else {})]
    for i, loss in enumerate(losses, 1):
        record: dict[str, Any] = {"step": i * every, "kind": "train", "loss": loss, "seconds": i * seconds}
        record |= {"images_per_second": 100.0 / seconds, "gradient_norm": 1.0, "skipped": 0, "kappa": list(kappa)}
        records.append(record)
    for i, norm in enumerate(norms, 1):
        values = {f"{what}/{block}": norm for what in ("norm", "gradient") for block in MIDDLE}
        records.append({"step": i * every, "kind": "probe", **values})
    measured = {"metric": "FID", "n": 10_000, "extractor": "inception"} | (metric or {})
    records += [{"step": step, "kind": "evaluation", "value": value, **measured} for step, value in evaluations]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def draw_grid(folder: Path, step: int, colour: str = "white", size: int = 16) -> None:
    """A sample grid of one colour."""
    (folder / "samples").mkdir(exist_ok=True)
    Image.new("RGB", (size, size), colour).save(folder / "samples" / f"step-{step:08d}.png")
