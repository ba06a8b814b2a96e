"""The averaged weights that samples are drawn with."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class Ema:
    """An exponential moving average of a model's parameters with a decay that is warmed up.

    torch's AveragedModel counts updates on the device and reads the count back at each one; here the count is a plain
    number, so that no step waits for the device.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    def decay_at(self, step: int) -> float:
        """min(decay, (1 + s) / (10 + s)): a fixed 0.9999 remembers the initial weights for tens of thousands of steps."""
        return min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """After optimizer step `step`, counted from 1."""
        mean: list[Tensor] = list(self.model.parameters())
        new: list[Tensor] = list(model.parameters())
        torch._foreach_lerp_(mean, new, 1 - self.decay_at(step))
        for averaged, buffer in zip(self.model.buffers(), model.buffers(), strict=True):
            averaged.copy_(buffer)
