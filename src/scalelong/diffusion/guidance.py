"""Classifier-free guidance (Ho and Salimans 2022): away from what the network says without a condition.

Shapes: B samples; a condition's tensors are (B, ...), those of the null condition (1, ...).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scalelong.diffusion.objective import Network


def guided(net: Network, null: Mapping[str, Tensor], scale: float) -> Network:
    """null + scale * (conditional - null) in one doubled batch; at scale 1 it is `net` itself."""
    if scale == 1:
        return net

    def call(x: Tensor, time: Tensor, **condition: Tensor) -> Tensor:
        both = {name: torch.cat([value, _like(null[name], value)]) for name, value in condition.items()}
        output = net(torch.cat([x, x]), torch.cat([time, time]), **both)
        with_condition, without = output.float().chunk(2)
        return without + scale * (with_condition - without)

    return call


def _like(null: Tensor, value: Tensor) -> Tensor:
    return null.to(value).expand(value.shape)


@dataclass(frozen=True)
class Guidance:
    """How strongly, and at which noise levels: sigma / alpha, which for EDM is its sigma (Kynkaanniemi et al. 2024)."""

    scale: float
    null: Mapping[str, Any]  # the null condition of one sample
    interval: tuple[float, float] = (0.0, math.inf)  # outside it the condition acts alone

    def __post_init__(self) -> None:
        low, high = self.interval
        if not (math.isfinite(self.scale) and self.scale >= 0):
            raise ValueError(f"guidance.scale: must be a number of at least 0, got {self.scale}; 1 is no guidance")
        if not 0 <= low < high:
            raise ValueError(f"guidance.interval: must be 0 <= low < high, got ({low}, {high})")

    def network(self, net: Network, level: float) -> Network:
        """The network to use at this noise level."""
        low, high = self.interval
        return guided(net, self.null, self.scale) if low <= level <= high else net
