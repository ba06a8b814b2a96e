"""The UNet of the theory (Eq. 3, blocks of Eq. 17): the module, and random weights and inputs.

    f_i(x) = b_{i+1}( kappa_{i+1} a_{i+1} x + f_{i+1}(a_{i+1} x) ),  f_N the middle block,  UNet = f_0

A block is W_l relu(... relu(W_1 x)), m x m matrices without biases. With N(0, 2/m) everywhere, as the theorems assume, each
ReLU layer keeps E||x||^2, but the last matrix, which no ReLU follows, doubles it. `gain` is that factor: 2 for the paper's
blocks, 1 if the last matrix is N(0, 1/m).

Shapes: B inputs, m width, N skips. Skip i runs from a_i to b_i; i = 1 is the outermost, at index 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from scalelong.diffusion import VPSDE, draw_time_and_noise
from scalelong.errors import require
from scalelong.random import uniform
from scalelong.scaling.constant import CONSTANT_METHODS

GAINS = {"unit": 1.0, "paper": 2.0}
METHODS = ("none", "universal", "cs", "cs_reversed")


class Join(nn.Module):
    """The end of a long skip: inner + coefficient * skip."""

    def forward(self, inner: Tensor, skip: Tensor, coefficient: float | Tensor = 1.0) -> Tensor:
        return inner + coefficient * skip


def stacked_block(width: int, layers: int) -> nn.Sequential:
    """W_l relu(W_{l-1} ... relu(W_1 x)), no biases, weights from N(0, 2 / m)."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        linear = nn.Linear(width, width, bias=False)
        nn.init.normal_(linear.weight, std=math.sqrt(2 / width))
        parts += [nn.ReLU(), linear]
    return nn.Sequential(*parts[1:])


class MatrixUNet(nn.Module):
    """Eq. 3: `a` and `b` hold a_1 .. a_N and b_1 .. b_N, `middle` is f_N; `scalelong.apply` scales the inputs of `joins`.

    >>> model = MatrixUNet(width=8, layers=2, num_skips=3)
    >>> model(torch.zeros(4, 8), coefficients=[1.0, 0.7, 0.49]).shape
    torch.Size([4, 8])
    """

    def __init__(self, width: int, layers: int, num_skips: int) -> None:
        super().__init__()
        for key, value in {"width": width, "layers": layers, "num_skips": num_skips}.items():
            require(type(value) is int and value >= 1, f"matrix_unet.{key}", "a whole number of at least 1", value)
        self.width = width
        self.num_skips = num_skips
        self.a = nn.ModuleList(stacked_block(width, layers) for _ in range(num_skips))
        self.b = nn.ModuleList(stacked_block(width, layers) for _ in range(num_skips))
        self.middle = stacked_block(width, layers)
        self.joins = nn.ModuleList(Join() for _ in range(num_skips))

    def forward(self, x: Tensor, coefficients: Sequence[float | Tensor] | None = None) -> Tensor:
        """UNet(x) = h_0 for x of (B, m)."""
        return self.hidden(x, coefficients)[0]

    def hidden(self, x: Tensor, coefficients: Sequence[float | Tensor] | None = None) -> list[Tensor]:
        """h_0 .. h_N, h_i the output of f_i; `coefficients` (kappa_1 .. kappa_N) replace those of `scalelong.apply`."""
        if x.shape[-1] != self.width:
            raise ValueError(f"matrix_unet.width: this network takes vectors of {self.width}, got {x.shape[-1]}")
        if coefficients is not None and len(coefficients) != (n := self.num_skips):
            raise ValueError(f"matrix_unet.coefficients: {len(coefficients)} given, the network has {n} skips")
        skips: list[Tensor] = []
        for encode in self.a:
            x = encode(x)
            skips.append(x)
        outputs = [self.middle(x)]
        for index in reversed(range(self.num_skips)):
            if coefficients is None:
                joined = self.joins[index](outputs[-1], skips[index])
            else:
                joined = outputs[-1] + coefficients[index] * skips[index]
            outputs.append(self.b[index](joined))
        return outputs[::-1]

    @property
    def blocks(self) -> list[nn.Module]:
        """a_1 .. a_N, b_1 .. b_N, f_N."""
        return [*self.a, *self.b, self.middle]

    @torch.no_grad()
    def sample_weights_(self, generator: torch.Generator, gain: float = GAINS["paper"]) -> Self:
        """New weights in place: N(0, 2/m), and N(0, gain/m) for the last matrix of each block."""
        for block in self.blocks:
            *inner, last = matrices(block)
            for weight in inner:
                weight.normal_(std=math.sqrt(2 / self.width), generator=generator)
            last.normal_(std=math.sqrt(gain / self.width), generator=generator)
        return self


def coefficients_of(method: str, num_skips: int, kappa: float = 0.7) -> list[float]:
    """kappa_1 .. kappa_N of one of METHODS."""
    return CONSTANT_METHODS[method](num_skips, kappa) if method != "none" else [1.0] * num_skips


def noisy_inputs(count: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """(x_t, eps), (B, m) each: x_0 ~ U[-1, 1], t and eps of the VP-SDE (Eq. 1)."""
    index = torch.arange(count)
    x0 = uniform(seed, "theory-x0", index, (width,)).float() * 2 - 1
    t, noise = draw_time_and_noise(VPSDE(), seed, index, (width,))
    x_t, _, _ = VPSDE().diffuse(x0, noise, t)
    return x_t, noise


def matrices(block: nn.Module) -> list[Tensor]:
    """W_1 .. W_l of a block."""
    return [layer.weight for layer in block.children() if isinstance(layer, nn.Linear)]
