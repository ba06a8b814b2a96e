"""The bounds of Theorem 3.4, and a network that breaks the printed one.

||UNet(x') - UNet(x)|| <= ||x' - x|| * bound. From Eq. 3, Lip(f_(i-1)) <= ||b_i|| ||a_i|| (kappa_i + Lip(f_i)), so

    product form    sum_i kappa_i P_i + P_N L_0,     P_i = prod_{j <= i} ||b_j|| ||a_j||
    largest factor  sum_i kappa_i M^i + M^N L_0,     M = max_i ||b_i|| ||a_i||

Both are valid. The paper has M_0 = max_i ||b_i o a_i|| for M (Eq. 7). But f_i stands between b_i and a_i: what crosses is
b_i J a_i, and ||b_i J a_i|| <= ||b_i a_i|| ||J|| is false, since matrices do not commute (Eq. 61 moves a_1 past f_1).

Legend: N skips, norms are l2 operator norms (Lipschitz constants).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scalelong.lab.matrix_unet import MatrixUNet
from scalelong.lab.networks import matrices
from scalelong.lab.segment import Jacobians


def skip_part(coefficients: Sequence[float], factors: Sequence[float]) -> float:
    """sum_i kappa_i prod_{j <= i} factor_j, without the middle block's term."""
    total, product = 0.0, 1.0
    for kappa, factor in zip(coefficients, factors, strict=True):
        product *= factor
        total += kappa * product
    return total


def product_bound(coefficients: Sequence[float], factors: Sequence[float], middle: float) -> float:
    """sum_i kappa_i P_i + P_N L_0, P_i = prod_{j <= i} factor_j, factor_j = ||b_j|| ||a_j|| (Eq. 65 with true factors)."""
    return skip_part(coefficients, factors) + math.prod(factors) * middle


def power_bound(coefficients: Sequence[float], factor: float, middle: float) -> float:
    """sum_i kappa_i M^i + M^N L_0: Eq. 7 with c_0 = M^N L_0; valid for M = max ||b_i|| ||a_i||, not for max ||b_i o a_i||."""
    return product_bound(coefficients, [factor] * len(coefficients), middle)


@dataclass(frozen=True)
class Norms:
    """||a_i||, ||b_i|| (index 0 the outermost) and L_0 of the middle block."""

    a: list[float]
    b: list[float]
    middle: float

    @property
    def factors(self) -> list[float]:
        """||b_i|| ||a_i||."""
        return [b * a for a, b in zip(self.a, self.b, strict=True)]


@torch.no_grad()
def layer_norms(model: MatrixUNet) -> Norms:
    """Upper bounds on the Lipschitz constants: products of the matrices' spectral norms (ReLU is 1-Lipschitz)."""

    def norm(block: nn.Module) -> float:
        return float(torch.linalg.matrix_norm(torch.stack(matrices(block)), ord=2).prod())

    return Norms([norm(block) for block in model.a], [norm(block) for block in model.b], norm(model.middle))


@torch.no_grad()
def composed_norms(model: MatrixUNet) -> list[float]:
    """||b_i o a_i|| of the printed theorem, exact; for blocks of one matrix only, where it is a spectral norm."""
    pairs = []
    for a, b in zip(model.a, model.b, strict=True):
        (weight_a,), (weight_b,) = matrices(a), matrices(b)
        pairs.append(weight_b @ weight_a)
    found: list[float] = torch.linalg.matrix_norm(torch.stack(pairs), ord=2).tolist()
    return found


@torch.no_grad()
def local_bound(jacobians: Jacobians, coefficients: Sequence[float]) -> float:
    """The product form with the block Jacobians' own norms on each linear piece, weighted by the pieces' lengths.

    Valid for this segment: the output changes by the integral of J (x' - x). Norms by singular values: power iteration would
    come from below.
    """
    norm_a = torch.stack([_spectral(j, jacobians.lengths) for j in jacobians.a])
    norm_b = torch.stack([_spectral(j, jacobians.lengths) for j in jacobians.b])
    products = (norm_a * norm_b).cumprod(0)  # (N, K)
    kappas = torch.tensor(coefficients, dtype=products.dtype)[:, None]
    pieces = (kappas * products).sum(0) + products[-1] * _spectral(jacobians.middle, jacobians.lengths)
    return float((pieces * jacobians.lengths).sum())


@torch.no_grad()
def path_bound(jacobians: Jacobians, coefficients: Sequence[float]) -> float:
    """sum_i kappa_i ||B_1 .. B_i A_i .. A_1|| + the middle's: only the triangle inequality between paths is left."""
    total = torch.zeros_like(jacobians.lengths)
    left = right = torch.eye(jacobians.middle.shape[-1], dtype=jacobians.middle.dtype)
    for a, b, kappa in zip(jacobians.a, jacobians.b, coefficients, strict=True):
        left, right = left @ b, a @ right
        total = total + kappa * _spectral(left @ right, jacobians.lengths)
    total = total + _spectral(left @ jacobians.middle @ right, jacobians.lengths)
    return float((total * jacobians.lengths).sum())


def _spectral(jacobians: Tensor, like: Tensor) -> Tensor:
    """(K,) spectral norms."""
    norm: Tensor = torch.linalg.matrix_norm(jacobians, ord=2)
    return norm.expand_as(like)


@torch.no_grad()
def counterexample(stretch: float, m0: float = 1.0, num_skips: int = 1, layers: int = 1) -> MatrixUNet:
    """A network of width 2 with ||b_i o a_i|| = m0 for every i and L_0 = 1 that breaks Eq. 7 as soon as stretch^2 is large.

    a_1 = r diag(s, 1/s), b_1 = r diag(1/s, s), r^2 = m0, so b_1 a_1 = m0 I; all other blocks are r I, the middle block swaps
    the axes. The path through it stretches twice: the first axis by s in a_1 and, having become the second, by s in b_1.
    """
    model = MatrixUNet(2, layers, num_skips).double()
    for block in (*model.a, *model.b, model.middle):
        for weight in matrices(block):
            weight.copy_(torch.eye(2))
    for block in (*model.a, *model.b):
        matrices(block)[-1].mul_(math.sqrt(m0))
    matrices(model.a[0])[-1].mul_(torch.tensor([[stretch], [1 / stretch]], dtype=torch.float64))
    matrices(model.b[0])[-1].mul_(torch.tensor([[1 / stretch], [stretch]], dtype=torch.float64))
    matrices(model.middle)[-1].copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    return model
