"""The small networks of LS: from pooled skips (B, N) to coefficients (B, N).

N is the gated size, tokens or channels, of a skip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "elu": nn.ELU, "mish": nn.Mish}


def bottleneck(inputs: int, hidden: int, outputs: int, activation: str) -> nn.Sequential:
    """zeta(x) = W1 act(W2 x) with biases (Eq. 11; Eq. 12 and 13 have the same form)."""
    return nn.Sequential(nn.Linear(inputs, hidden), ACTIVATIONS[activation](), nn.Linear(hidden, outputs))


def shift_to(bias: Tensor, start: float | None) -> None:
    """Move the last bias before a sigmoid so that the gate starts around `start`; None leaves it as initialised."""
    if start is not None:
        with torch.no_grad():
            bias += math.log(start / (1 - start))


class SqueezeExcite(nn.Module):
    """module="se": sigmoid(zeta(p)), Eq. 10 and 11. Skips of d different sizes share one zeta of size N_min, each size
    with its own encoder to N_min and decoder back (Eq. 12 and 13)."""

    def __init__(self, sizes: Sequence[int], reduction: int, activation: str, start: float | None = None) -> None:
        super().__init__()
        smallest, distinct = min(sizes), sorted(set(sizes))
        self.zeta = bottleneck(smallest, max(1, smallest // reduction), smallest, activation)
        self.encoders, self.decoders = nn.ModuleDict(), nn.ModuleDict()
        for size in distinct if len(distinct) > 1 else []:
            hidden = size // max(1, size // 4)  # N_i / r_i with r_i = floor(N_i / 4)
            self.encoders[str(size)] = bottleneck(size, hidden, smallest, activation)
            self.decoders[str(size)] = bottleneck(smallest, hidden, size, activation)
        for last in self.decoders.values() if self.decoders else [self.zeta]:
            shift_to(last[-1].bias, start)

    def forward(self, pooled: Tensor) -> Tensor:
        if not self.encoders:
            return torch.sigmoid(self.zeta(pooled))
        size = str(int(pooled.shape[1]))  # torch.jit.trace has tensors there
        return torch.sigmoid(self.decoders[size](self.zeta(self.encoders[size](pooled))))


class InstanceEnhance(nn.Module):
    """module="ie": sigmoid(w * p + b), a scale and a shift for each pooled value; starts at 1/2 like "se" does."""

    def __init__(self, size: int, start: float | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(size))
        self.shift = nn.Parameter(torch.zeros(size))
        shift_to(self.shift, start)

    def forward(self, pooled: Tensor) -> Tensor:
        return torch.sigmoid(self.scale * pooled + self.shift)


class LearnableKappa(nn.Module):
    """module="learnable": a plain number per skip, starting at 1 or `start`, that looks at nothing."""

    def __init__(self, start: float | None = None) -> None:
        super().__init__()
        self.kappa = nn.Parameter(torch.full((), 1.0 if start is None else start))

    def forward(self, pooled: Tensor) -> Tensor:
        return self.kappa.expand_as(pooled)
