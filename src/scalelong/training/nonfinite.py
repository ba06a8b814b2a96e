"""Non-finite losses and gradients: found before the update, on every rank, and reported."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Suspect = tuple[int, float]  # global sample index and t of a sample whose loss is not finite


class NonFiniteError(RuntimeError):
    """A loss or gradient is not finite; the weights are those before the update."""


def find_suspects(losses: Tensor, index: Tensor, t: Tensor, world_size: int = 1) -> list[Suspect]:
    """The samples of all ranks whose loss is not finite; the tensors (B,) are those of this rank."""
    bad = ~torch.isfinite(losses)
    parts: list[Any] = [list(zip(index[bad].tolist(), t[bad].double().tolist(), strict=True))] * world_size
    if world_size > 1:
        dist.all_gather_object(parts, parts[0])
    return [suspect for part in parts for suspect in part]


def describe(step: int, loss: float, gradient_norm: float, suspects: list[Suspect]) -> str:
    what = "loss" if not math.isfinite(loss) else "gradient"
    indices, times = [index for index, _ in suspects[:8]], [round(t, 4) for _, t in suspects[:8]]
    shown = f"samples {indices} at t = {times}" if indices else "no single sample (every loss is finite)"
    more = f" and {len(suspects) - 8} more" if len(suspects) > 8 else ""
    return f"step {step}: the {what} is not finite (loss {loss}, gradient norm {gradient_norm}); {shown}{more}"


@dataclass
class Guard:
    """The policy at non-finite steps: raise, skip or rewind, up to `most` times."""

    policy: str
    most: int
    skipped: list[int] = field(default_factory=list)  # steps whose update was skipped
    avoid: set[int] = field(default_factory=set)  # steps to skip when they come again after a rewind
    rewinds: int = 0

    def judge(self, step: int, sentence: str) -> str:
        """Return "skip" or "rewind" for a non-finite step, or raise a NonFiniteError."""
        if self.policy == "raise":
            raise NonFiniteError(f"{sentence}; stopped before the update. Set training.on_nonfinite to skip or rewind")
        if (len(self.skipped) if self.policy == "skip" else self.rewinds) >= self.most:
            raise NonFiniteError(f"{sentence}; this is more than training.max_nonfinite = {self.most} such steps")
        if self.policy == "skip":
            self.skipped.append(step)
        else:
            self.rewinds += 1
            self.avoid.add(step)
        return self.policy

    def state(self) -> dict[str, Any]:
        return {"skipped": self.skipped, "avoid": sorted(self.avoid), "rewinds": self.rewinds}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`; rewinds since that checkpoint stay counted."""
        self.skipped = list(state["skipped"])
        self.avoid |= set(state["avoid"])
        self.rewinds = max(self.rewinds, state["rewinds"])
