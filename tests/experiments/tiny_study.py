"""A tiny piece of the study, for its tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from entries import Piece, Run
from network import Spec
from piece import specs

TINY = {"batch": 4, "dim": 16, "depth": 4, "heads": 2, "patch": 8, "steps": 8, "loss_every": 4, "warmup": 3}
SMALL = {"train_images": 50, "test_images": 20, "num_samples": 8, "eval_batch": 10, "steps_per_graph": 2}
RUNS = (Run("none", 0), Run("ls", 0, {"start": 0.95}), Run("cs", 1, {"kappa": 0.7}))
PIECE = Piece("tiny", RUNS, **{**TINY, "fid_at": (4,)})


def tiny_spec(folder: Path, run: Run = RUNS[0], **changes: object) -> Spec:
    found = next(spec for spec in specs(PIECE, folder, "", float("inf")) if spec.name == run.name)
    return dataclasses.replace(found, **SMALL, **changes)
