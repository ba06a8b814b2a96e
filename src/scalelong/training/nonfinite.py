"""Non-finite losses and gradients: found before the update, on every rank, and named."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


class NonFiniteError(RuntimeError):
    """Training met a loss or gradient that is not a number; the weights are those before the update."""


@dataclass(frozen=True)
class Suspects:
    """The samples of a bad step whose loss is not finite, on one rank."""

    indices: list[int]
    times: list[float]


def find_suspects(losses: Tensor, index: Tensor, t: Tensor) -> Suspects:
    """Which samples (B,) have a non-finite loss, and at which t."""
    bad = ~torch.isfinite(losses)
    return Suspects(index[bad].tolist(), t[bad].double().tolist())


def describe(step: int, loss: float, gradient_norm: float, suspects: list[Suspects]) -> str:
    """One sentence: the step, what is not finite, the samples and their t."""
    what = "loss" if not math.isfinite(loss) else "gradient"
    indices = [index for part in suspects for index in part.indices]
    times = [round(t, 4) for part in suspects for t in part.times]
    shown = f"samples {indices[:8]} at t = {times[:8]}" if indices else "no single sample (every loss is finite)"
    more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
    return f"step {step}: the {what} is not finite (loss {loss}, gradient norm {gradient_norm}); {shown}{more}"


class Guard:
    """Decides what happens at a non-finite step, and gives up after too many."""

    def __init__(self, policy: str, most: int) -> None:
        self.policy, self.most = policy, most
        self.skipped: list[int] = []  # steps whose update was left out
        self.avoid: set[int] = set()  # steps to leave out when they come again after a rewind
        self.rewinds = 0

    def judge(self, step: int, sentence: str) -> str:
        """ "skip" or "rewind" at a step that just went wrong, or a NonFiniteError."""
        if self.policy == "raise":
            raise NonFiniteError(f"{sentence}; stopped before the update. Set training.on_nonfinite to skip or rewind")
        if (len(self.skipped) if self.policy == "skip" else self.rewinds) >= self.most:
            raise NonFiniteError(f"{sentence}; this is more than training.max_nonfinite = {self.most} such steps")
        if self.policy == "skip":
            self.skipped.append(step)
            return "skip"
        self.rewinds += 1
        self.avoid.add(step)
        return "rewind"

    def state(self) -> dict[str, object]:
        """What a checkpoint keeps."""
        return {"skipped": self.skipped, "avoid": sorted(self.avoid), "rewinds": self.rewinds}

    def restore(self, state: dict[str, object]) -> None:
        """Take up where a checkpoint stood."""
        self.skipped = list(state["skipped"])  # type: ignore[call-overload]
        self.avoid |= set(state["avoid"])  # type: ignore[call-overload]
        self.rewinds = max(self.rewinds, int(state["rewinds"]))  # type: ignore[call-overload]
