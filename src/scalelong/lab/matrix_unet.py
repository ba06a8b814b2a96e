"""The UNet of the theory: Eq. 3 with the blocks of Eq. 17, stacked m x m matrices with ReLU between them.

    f_i(x) = b_{i+1}( kappa_{i+1} a_{i+1} x + f_{i+1}(a_{i+1} x) ),  f_N the middle block,  UNet = f_0

Shapes: B batch, m width. Skip i runs from a_i to b_i; i = 1 is the outermost, stored at index 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn


class Join(nn.Module):
    """Where a long skip ends: inner + coefficient * skip."""

    def forward(self, inner: Tensor, skip: Tensor, coefficient: float | Tensor = 1.0) -> Tensor:
        return inner + coefficient * skip


def stacked_block(width: int, layers: int) -> nn.Sequential:
    """W_l relu(W_{l-1} ... relu(W_1 x)), no biases, weights from N(0, 2 / m)."""
    block = nn.Sequential()
    for layer in range(layers):
        if layer:
            block.append(nn.ReLU())
        linear = nn.Linear(width, width, bias=False)
        nn.init.normal_(linear.weight, std=math.sqrt(2 / width))
        block.append(linear)
    return block


class MatrixUNet(nn.Module):
    """Eq. 3: `a` and `b` hold a_1..a_N and b_1..b_N, `middle` is f_N, `joins` are where `scalelong.apply` takes hold."""

    def __init__(self, width: int, layers: int, num_skips: int) -> None:
        super().__init__()
        for key, value in (("width", width), ("layers", layers), ("num_skips", num_skips)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"matrix_unet.{key}: must be a whole number of at least 1, got {value!r}")
        self.width = width
        self.num_skips = num_skips
        self.a = nn.ModuleList(stacked_block(width, layers) for _ in range(num_skips))
        self.b = nn.ModuleList(stacked_block(width, layers) for _ in range(num_skips))
        self.middle = stacked_block(width, layers)
        self.joins = nn.ModuleList(Join() for _ in range(num_skips))

    def forward(self, x: Tensor, coefficients: Sequence[float] | None = None) -> Tensor:
        """UNet(x) = h_0 for x of (B, m)."""
        return self.hidden(x, coefficients)[0]

    def hidden(self, x: Tensor, coefficients: Sequence[float] | None = None) -> list[Tensor]:
        """h_0 .. h_N, h_i the output of f_i. kappa_1 .. kappa_N given here replace what `scalelong.apply` attached."""
        self._check(x, coefficients)
        skips: list[Tensor] = []
        for encode in self.a:
            x = encode(x)
            skips.append(x)
        outputs: list[Tensor] = [self.middle(x)]
        for index in reversed(range(self.num_skips)):
            if coefficients is None:
                joined = self.joins[index](outputs[-1], skips[index])
            else:
                joined = outputs[-1] + coefficients[index] * skips[index]
            outputs.append(self.b[index](joined))
        return outputs[::-1]

    def composed(self, index: int) -> nn.Module:
        """The map b_i . a_i of Theorem 3.4, i = index from 1 to N, on the model's own weights."""
        if not 1 <= index <= self.num_skips:
            raise ValueError(
                f"matrix_unet.index: must be from 1 to {self.num_skips}, got {index!r}; 1 is the outermost"
            )
        return nn.Sequential(self.a[index - 1], self.b[index - 1])

    def _check(self, x: Tensor, coefficients: Sequence[float] | None) -> None:
        if x.shape[-1] != self.width:
            raise ValueError(f"matrix_unet.width: this network takes vectors of {self.width}, got {x.shape[-1]}")
        if coefficients is not None and len(coefficients) != self.num_skips:
            raise ValueError(
                f"matrix_unet.coefficients: {len(coefficients)} given, the network has {self.num_skips} skips; "
                "give one for each, outermost first"
            )
