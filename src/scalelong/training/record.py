"""What a training record is made of: sums since the last one, and where the run ran."""

from __future__ import annotations

import math
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

from scalelong.training.step import StepResult


class Window:
    """Sums over the steps since the last record."""

    def __init__(
        self,
        loss: float = 0.0,
        gradient_norm: float = 0.0,
        gradient_norm_max: float = 0.0,
        count: int = 0,
        since: float = 0.0,
    ) -> None:
        self.loss, self.gradient_norm, self.gradient_norm_max = loss, gradient_norm, gradient_norm_max
        self.count, self.since = count, since

    def add(self, result: StepResult) -> None:
        """Count a step; what is not finite was reported on its own."""
        if result.finite and not result.overflow:
            self.loss += result.loss
            self.gradient_norm += result.gradient_norm
            self.gradient_norm_max = max(self.gradient_norm_max, result.gradient_norm)
            self.count += 1

    def record(self, seconds: float, batch_size: int) -> dict[str, float]:
        """Means of the window that ends after so many seconds of the run."""
        return {
            "loss": self._mean(self.loss),
            "gradient_norm": self._mean(self.gradient_norm),
            "gradient_norm_max": self.gradient_norm_max,
            "images_per_second": self.count * batch_size / max(seconds - self.since, 1e-9),
            "seconds": round(seconds, 3),
        }

    def _mean(self, total: float) -> float:
        return total / self.count if self.count else math.nan


def environment(device: torch.device, ranks: int, data: str) -> dict[str, Any]:
    """What a reader of the run wants to know of where it ran, and the fingerprint of what it learnt from."""
    return {
        "command": shlex.join([_program(sys.argv[0]), *sys.argv[1:]]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "ranks": ranks,
        "data": data,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _program(path: str) -> str:
    """What a person would type: `python -m scalelong.cli.main` puts its file's path there."""
    return "scalelong" if Path(path).parts[-3:] == ("scalelong", "cli", "main.py") else Path(path).name
