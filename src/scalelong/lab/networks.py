"""Random networks of Eq. 3, their inputs and coefficients, and the exact mean of ||h_i||^2 over the weights.

A block is W_l relu(... relu(W_1 x)). With N(0, 2/m) everywhere, as the theorems assume, each ReLU layer keeps E||x||^2 but
the last matrix, which no ReLU follows, doubles it. `gain` is that factor: 2 for the paper's blocks, 1 when the last
matrix is N(0, 1/m).

Shapes: B inputs, m width, N skips, S sets of coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from scalelong.diffusion import VPSDE, draw_time_and_noise
from scalelong.lab.matrix_unet import MatrixUNet
from scalelong.random import uniform
from scalelong.scaling.constant import constant_coefficients, reversed_coefficients, universal_coefficients

PAPER_GAIN, UNIT_GAIN = 2.0, 1.0
METHODS = ("none", "universal", "cs", "cs_reversed")


def coefficients_of(method: str, num_skips: int, kappa: float = 0.7) -> list[float]:
    """kappa_1 .. kappa_N of one of METHODS."""
    if method == "none":
        return universal_coefficients(num_skips, 1.0)
    rules = {"universal": universal_coefficients, "cs": constant_coefficients, "cs_reversed": reversed_coefficients}
    return rules[method](num_skips, kappa)


def coefficient_sets(num_skips: int, seed: int, random_sets: int = 12) -> Tensor:
    """(S, N) float64: every method at several kappas, then sets drawn from U[0, 1]^N."""
    named = [coefficients_of("none", num_skips)]
    for kappa in (0.3, 0.5, 0.7, 0.9):
        named += [coefficients_of(method, num_skips, kappa) for method in METHODS[1:]]
    drawn = uniform(seed, "coefficients", torch.arange(random_sets), (num_skips,))
    return torch.cat([torch.tensor(named, dtype=torch.float64), drawn])


def noisy_inputs(count: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """(x_t, eps), (B, m) each: x_0 ~ U[-1, 1], t and eps of the VP-SDE (Eq. 1)."""
    index = torch.arange(count)
    x0 = uniform(seed, "theory-x0", index, (width,)).float() * 2 - 1
    t, noise = draw_time_and_noise(VPSDE(), seed, index, (width,))
    alpha, sigma = VPSDE().marginal(t)
    return alpha[:, None] * x0 + sigma[:, None] * noise, noise


def blocks(model: MatrixUNet) -> Iterator[nn.Sequential]:
    """a_1 .. a_N, b_1 .. b_N, f_N."""
    for block in (*model.a, *model.b, model.middle):
        assert isinstance(block, nn.Sequential)
        yield block


def matrices(block: nn.Module) -> list[Tensor]:
    """W_1 .. W_l of a block."""
    return [layer.weight for layer in block.children() if isinstance(layer, nn.Linear)]


@torch.no_grad()
def draw_weights_(model: MatrixUNet, generator: torch.Generator, gain: float = PAPER_GAIN) -> MatrixUNet:
    """New weights in place: N(0, 2/m), and N(0, gain/m) for the last matrix of each block."""
    for block in blocks(model):
        *inner, last = matrices(block)
        for weight in inner:
            weight.normal_(std=math.sqrt(2 / model.width), generator=generator)
        last.normal_(std=math.sqrt(gain / model.width), generator=generator)
    return model


@torch.no_grad()
def change_gain_(model: MatrixUNet, before: float, after: float) -> MatrixUNet:
    """The same draw at another gain: the last matrix of each block is multiplied by sqrt(after / before)."""
    for block in blocks(model):
        matrices(block)[-1].mul_(math.sqrt(after / before))
    return model


@torch.no_grad()
def hidden_squared(model: MatrixUNet, x: Tensor, sets: Tensor) -> Tensor:
    """||h_i||^2 for every set of coefficients, (N + 1, S, B) float64; the encoder runs once for all sets."""
    sets = sets.to(x.dtype)
    skips: list[Tensor] = []
    for encode in model.a:
        x = encode(x)
        skips.append(x)
    hidden = model.middle(x).expand(len(sets), *x.shape)
    squared = [hidden.double().square().sum(-1)]
    for index in reversed(range(model.num_skips)):
        hidden = model.b[index](hidden + sets[:, index, None, None] * skips[index])
        squared.append(hidden.double().square().sum(-1))
    return torch.stack(squared[::-1])


def mean_hidden_squared(coefficients: Sequence[float], i: int, gain: float) -> float:
    """E||h_i||^2 / ||x||^2 over the weights, exact at every width m:

        u_i = sum_{j > i} kappa_j^2 g^(2j - i) + g^(2N + 1 - i)

    The last matrix of the inner summand is independent of the skip and has mean zero, so squares add without a cross term:
    u_(i-1) = g (kappa_i^2 g^i + u_i), u_N = g^(N+1). At g = 1 this is Eq. 50 with c_1 = 1 and c_2 = ||x||^2.
    """
    n = len(coefficients)
    skips = sum(coefficients[j - 1] ** 2 * gain ** (2 * j - i) for j in range(i + 1, n + 1))
    return float(skips + gain ** (2 * n + 1 - i))


def feedforward_spread(width: int, layers: int, num_blocks: int) -> float:
    """Relative standard deviation of ||h||^2 after blocks in a row (all kappa = 0), exact.

    Each ReLU layer multiplies E||h||^4 / (E||h||^2)^2 by 1 + 5/m, each last matrix by 1 + 2/m.
    """
    per_block = (1 + 5 / width) ** (layers - 1) * (1 + 2 / width)
    return float(math.sqrt(per_block**num_blocks - 1))
