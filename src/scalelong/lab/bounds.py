"""The bounds of Theorem 3.4, exact Jacobians along a segment, and a network that violates the printed bound.

||UNet(x') - UNet(x)|| <= ||x' - x|| * bound. From Eq. 3, Lip(f_(i-1)) <= ||b_i|| ||a_i|| (kappa_i + Lip(f_i)), so

    product form    sum_i kappa_i P_i + P_N L_0,     P_i = prod_{j <= i} ||b_j|| ||a_j||
    largest factor  sum_i kappa_i M^i + M^N L_0,     M = max_i ||b_i|| ||a_i||

Both are valid. The paper has M_0 = max_i ||b_i o a_i|| for M (Eq. 7), but ||b_i J a_i|| <= ||b_i a_i|| ||J|| is false, since
matrices do not commute (Eq. 61 moves a_1 past f_1). With ReLU the network is linear on finitely many pieces of the segment
from x to x'; all of them are found, so a bound on the Jacobian of every piece bounds the change of the output.

Shapes: N skips, K pieces, m width; block Jacobians are (K, m, m). Norms are l2 operator norms (Lipschitz constants).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor, nn

from scalelong.lab.matrix_unet import MatrixUNet, matrices

_spectral_norm = partial(torch.linalg.matrix_norm, ord=2)  # of each matrix of a batch


def product_bound(coefficients: Sequence[float], factors: Sequence[float], middle: float) -> float:
    """sum_i kappa_i P_i + P_N L_0, P_i = prod_{j <= i} factor_j, factor_j = ||b_j|| ||a_j|| (Eq. 65 with true factors)."""
    products: list[float] = list(accumulate(factors, mul))
    return sum(kappa * product for kappa, product in zip(coefficients, products, strict=True)) + products[-1] * middle


def power_bound(coefficients: Sequence[float], factor: float, middle: float) -> float:
    """sum_i kappa_i M^i + M^N L_0: Eq. 7 with c_0 = M^N L_0; valid for M = max ||b_i|| ||a_i||, not for max ||b_i o a_i||."""
    return product_bound(coefficients, [factor] * len(coefficients), middle)


@torch.no_grad()
def block_norms(model: MatrixUNet) -> tuple[list[float], float]:
    """(||b_i|| ||a_i|| for each i, L_0 of the middle block), from above: products of the matrices' spectral norms."""

    def norm(block: nn.Module) -> float:
        return float(_spectral_norm(torch.stack(matrices(block))).prod())

    return [norm(b) * norm(a) for a, b in zip(model.a, model.b, strict=True)], norm(model.middle)


@torch.no_grad()
def composed_norms(model: MatrixUNet) -> list[float]:
    """||b_i o a_i|| of the printed theorem, exact; for blocks of one matrix only, where it is a spectral norm."""
    pairs = [(*matrices(a), *matrices(b)) for a, b in zip(model.a, model.b, strict=True)]
    norms: list[float] = _spectral_norm(torch.stack([b @ a for a, b in pairs])).tolist()
    return norms


@torch.no_grad()
def counterexample(stretch: float, m0: float = 1.0, num_skips: int = 1, layers: int = 1) -> MatrixUNet:
    """A network of width 2 with ||b_i o a_i|| = m0 for every i and L_0 = 1 that violates Eq. 7 if stretch^2 is large.

    a_1 = r diag(s, 1/s), b_1 = r diag(1/s, s), r^2 = m0, so b_1 a_1 = m0 I; all other blocks are r I, the middle block swaps
    the axes. The path through it stretches twice: the first axis by s in a_1 and, having become the second, by s in b_1.
    """
    model = MatrixUNet(2, layers, num_skips).double()
    for weight in model.parameters():
        weight.copy_(torch.eye(2))
    for block in (*model.a, *model.b):
        matrices(block)[-1].mul_(math.sqrt(m0))
    matrices(model.a[0])[-1].mul_(torch.tensor([[stretch], [1 / stretch]], dtype=torch.float64))
    matrices(model.b[0])[-1].mul_(torch.tensor([[1 / stretch], [stretch]], dtype=torch.float64))
    matrices(model.middle)[-1].copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    return model


def _relu_inputs(model: MatrixUNet, x: Tensor, coefficients: Sequence[float]) -> list[tuple[nn.Module, Tensor]]:
    """(block, input of one of its ReLUs) in the order of execution."""
    found: list[tuple[nn.Module, Tensor]] = []
    handles = [
        layer.register_forward_pre_hook(lambda _layer, inputs, block=block: found.append((block, inputs[0])))
        for block in model.blocks
        for layer in block.children()
        if isinstance(layer, nn.ReLU)
    ]
    try:
        model(x, coefficients)
    finally:
        for handle in handles:
            handle.remove()
    return found


@torch.no_grad()
def linear_pieces(model: MatrixUNet, start: Tensor, end: Tensor, coefficients: Sequence[float]) -> Tensor:
    """(K + 1,) places from 0 to 1 between which the network is linear on start + place * (end - start).

    In each piece the first layer with a change of sign is affine, so its zeros are exact; they split the piece.
    """
    places = torch.tensor([0.0, 1.0], dtype=torch.float64)
    settled = torch.zeros(1, dtype=torch.bool)
    while not settled.all():
        points = torch.lerp(start, end, places[:, None])
        new: list[Tensor] = []
        open_pieces = ~settled
        for _, value in _relu_inputs(model, points, coefficients):
            left, right = value[:-1], value[1:]
            floor = 1e-12 * value.abs().max()  # a value this near zero is the zero that made the split
            crossing = (left * right < 0) & (left.abs() > floor) & (right.abs() > floor) & open_pieces[:, None]
            piece, unit = crossing.nonzero(as_tuple=True)
            share = left[piece, unit] / (left[piece, unit] - right[piece, unit])
            new.append(places[piece] + share * (places[piece + 1] - places[piece]))
            open_pieces &= ~crossing.any(1)
        unchanged = set(places[:-1][open_pieces | settled].tolist())
        places = torch.unique(torch.cat([places, *new]))
        settled = torch.tensor([place in unchanged for place in places[:-1].tolist()])
    return places


@dataclass(frozen=True)
class Jacobians:
    """Block Jacobians on each piece of a segment, (K, m, m); index 0 is the outermost block."""

    lengths: Tensor  # (K,), summing to 1
    a: list[Tensor]
    b: list[Tensor]
    middle: Tensor

    @torch.no_grad()
    def network(self, coefficients: Sequence[float]) -> Tensor:
        """J of f_(i-1) = B_i (kappa_i + J of f_i) A_i, down to f_0."""
        identity = torch.eye(self.middle.shape[-1], dtype=self.middle.dtype)
        result = self.middle
        for a, b, kappa in zip(reversed(self.a), reversed(self.b), reversed(coefficients), strict=True):
            result = b @ (kappa * identity + result) @ a
        return result


@torch.no_grad()
def segment_jacobians(model: MatrixUNet, start: Tensor, end: Tensor, coefficients: Sequence[float]) -> Jacobians:
    """The Jacobian of every block on every linear piece from start to end."""
    places = linear_pieces(model, start, end, coefficients)
    middles = (places[1:] + places[:-1]) / 2
    inputs = _relu_inputs(model, torch.lerp(start, end, middles[:, None]), coefficients)

    def jacobian(block: nn.Module) -> Tensor:
        """W_l D_(l-1) ... D_1 W_1 with the D of each piece."""
        first, *rest = matrices(block)
        result = first.expand(len(middles), -1, -1)
        for weight, value in zip(rest, (value for owner, value in inputs if owner is block), strict=True):
            result = weight @ ((value > 0).to(weight.dtype)[:, :, None] * result)
        return result

    a, b = ([jacobian(block) for block in side] for side in (model.a, model.b))
    return Jacobians(places.diff(), a, b, jacobian(model.middle))


def power_iteration(function: Callable[[Tensor], Tensor], x: Tensor, iterations: int = 100) -> tuple[float, Tensor]:
    """(||J||_2, its input direction) of the Jacobian at x, by products with J and its transpose only.

    It approaches the norm from below: a measure of how large a change can be, never the constant of an upper bound.
    """
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype).to(x.device)
    x = x.detach().requires_grad_()
    y = function(x)
    u = torch.zeros_like(y, requires_grad=True)
    (pulled,) = torch.autograd.grad(y, x, u, create_graph=True)  # J^T u, linear in u: its own transpose gives J v
    norm = 0.0
    for _ in range(iterations):
        direction = direction / direction.norm()
        (pushed,) = torch.autograd.grad(pulled, u, direction, retain_graph=True)
        norm = float(pushed.norm())
        if norm == 0:
            return 0.0, direction
        (direction,) = torch.autograd.grad(y, x, pushed, retain_graph=True)
    return norm, direction / direction.norm()


@torch.no_grad()
def local_bound(jacobians: Jacobians, coefficients: Sequence[float]) -> float:
    """The product form with the spectral norms of the blocks' Jacobians on each linear piece, weighted by its length."""
    factors = [_spectral_norm(a) * _spectral_norm(b) for a, b in zip(jacobians.a, jacobians.b, strict=True)]
    products = torch.stack(factors).cumprod(0)  # (N, K)
    kappas = torch.tensor(coefficients, dtype=products.dtype)[:, None]
    pieces = (kappas * products).sum(0) + products[-1] * _spectral_norm(jacobians.middle)
    return float((pieces * jacobians.lengths).sum())


@torch.no_grad()
def path_bound(jacobians: Jacobians, coefficients: Sequence[float]) -> float:
    """sum_i kappa_i ||B_1 .. B_i A_i .. A_1|| + the middle's: only the triangle inequality between paths is left."""
    total = torch.zeros_like(jacobians.lengths)
    left = right = torch.eye(jacobians.middle.shape[-1], dtype=jacobians.middle.dtype)
    for a, b, kappa in zip(jacobians.a, jacobians.b, coefficients, strict=True):
        left, right = left @ b, a @ right
        total = total + kappa * _spectral_norm(left @ right)
    total = total + _spectral_norm(left @ jacobians.middle @ right)
    return float((total * jacobians.lengths).sum())
