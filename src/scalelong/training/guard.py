"""Policies for non-finite losses or gradients and for loss spikes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from scalelong.errors import NonFiniteError as NonFiniteError
from scalelong.runs.settings import TrainingSettings
from scalelong.training.step import StepResult, Suspect

logger = logging.getLogger(__name__)

_WINDOW = 50  # steps of the running mean of the loss
_WARM_UP = 10  # steps before the first spike


class Guard:
    """Apply training.on_nonfinite and training.on_spike.

    The loss limit of a step is computed from the losses up to two steps before, so it is known when the step is launched and
    identical on every rank and after resuming.
    """

    def __init__(self, settings: TrainingSettings) -> None:
        self.settings = settings
        self.skipped: list[int] = []  # steps whose update was skipped
        self.avoid: set[int] = set()  # steps to skip when they come again after a rewind
        self.rewinds = 0
        self._mean, self._before, self._count = 0.0, 0.0, 0  # of the loss; `before`: without the last step

    def limit(self, unread: bool) -> float:
        """The largest loss that is not a spike; `unread`: the previous step has not been reviewed yet."""
        if self._count - (not unread) < _WARM_UP:
            return math.inf
        return self.settings.spike_factor * (self._mean if unread else self._before)

    def update_limit(self, unread: bool) -> float:
        """The largest loss whose update is applied."""
        return math.inf if self.settings.on_spike == "warn" else self.limit(unread)

    def review(self, step: int, result: StepResult, suspects: Callable[[], list[Suspect]]) -> dict[str, Any] | None:
        """None for a good step, else a record of the problem and the policy; may raise a NonFiniteError."""
        limit, known = self.limit(unread=False), step in self.avoid
        spike = result.finite and not result.overflow and result.loss > limit
        self._add(result.loss if result.finite and not spike and not known else None)
        if known or (result.finite and not spike):
            return None
        if spike:
            times = result.loss / limit * self.settings.spike_factor
            sentence = f"step {step}: the loss is {result.loss:.4g}, {times:.0f} times its running mean"
            policy: str = self.settings.on_spike
        else:
            sentence = describe(step, result.loss, result.gradient_norm, suspects())
            policy = self.settings.on_nonfinite
        self._count_policy(step, sentence, policy)
        logger.warning("%s; policy: %s", sentence, policy)
        values = {"loss": result.loss, "gradient_norm": result.gradient_norm, "policy": policy}
        return {"kind": "spike" if spike else "nonfinite", "at": step, **values}

    def _add(self, loss: float | None) -> None:
        self._before, self._count = self._mean, self._count + 1
        if loss is not None:
            self._mean += (loss - self._mean) / min(self._count, _WINDOW)

    def _count_policy(self, step: int, sentence: str, policy: str) -> None:
        most = self.settings.max_nonfinite
        if policy == "raise":
            raise NonFiniteError(f"{sentence}; stopped before the update. Set training.on_nonfinite to skip or rewind")
        if policy != "warn" and (len(self.skipped) if policy == "skip" else self.rewinds) >= most:
            raise NonFiniteError(f"{sentence}; this is more than training.max_nonfinite = {most} such steps")
        if policy == "skip":
            self.skipped.append(step)
        elif policy == "rewind":
            self.rewinds += 1
            self.avoid.add(step)

    def state(self) -> dict[str, Any]:
        losses = {"mean": self._mean, "before": self._before, "count": self._count}
        return {"skipped": self.skipped, "avoid": sorted(self.avoid), "rewinds": self.rewinds, "losses": losses}

    def restore(self, state: dict[str, Any]) -> None:
        """Inverse of `state`; rewinds since that checkpoint still count."""
        self.skipped = list(state["skipped"])
        self.avoid |= set(state["avoid"])
        self.rewinds = max(self.rewinds, state["rewinds"])
        losses = state.get("losses", {"mean": 0.0, "before": 0.0, "count": 0})  # older checkpoints lack them
        self._mean, self._before, self._count = losses["mean"], losses["before"], losses["count"]


def describe(step: int, loss: float, gradient_norm: float, suspects: list[Suspect]) -> str:
    what = "loss" if not math.isfinite(loss) else "gradient"
    indices, times = [index for index, _ in suspects[:8]], [round(t, 4) for _, t in suspects[:8]]
    shown = f"samples {indices} at t = {times}" if indices else "no single sample (each alone is finite)"
    more = f" and {len(suspects) - 8} more" if len(suspects) > 8 else ""
    return f"step {step}: the {what} is not finite (loss {loss}, gradient norm {gradient_norm}); {shown}{more}"
