"""Exact Jacobians of a matrix UNet along the segment from x to x'.

With ReLU the network is linear on finitely many pieces of a segment. All pieces are found, so that a bound on the Jacobian
in each of them is a bound on the change of the output; sampling points could miss a piece.

Shapes: K pieces, m width, N skips; block Jacobians are (K, m, m).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scalelong.lab.matrix_unet import MatrixUNet
from scalelong.lab.networks import matrices


def _run(block: nn.Module, x: Tensor, before_relu: list[Tensor]) -> Tensor:
    for layer in block.children():
        if isinstance(layer, nn.ReLU):
            before_relu.append(x)
        x = layer(x)
    return x


def _trace(model: MatrixUNet, x: Tensor, coefficients: Sequence[float]) -> list[list[Tensor]]:
    """What enters each ReLU, by block, in the order of execution: a_1 .. a_N, f_N, b_N .. b_1."""
    traced: list[list[Tensor]] = []

    def through(block: nn.Module, value: Tensor) -> Tensor:
        traced.append([])
        return _run(block, value, traced[-1])

    skips: list[Tensor] = []
    for encode in model.a:
        x = through(encode, x)
        skips.append(x)
    x = through(model.middle, x)
    for index in reversed(range(model.num_skips)):
        x = through(model.b[index], x + coefficients[index] * skips[index])
    return traced


@torch.no_grad()
def linear_pieces(model: MatrixUNet, start: Tensor, end: Tensor, coefficients: Sequence[float]) -> Tensor:
    """(K + 1,) places from 0 to 1 between which the network is linear on start + place * (end - start).

    In each piece the first layer with a change of sign is affine, so its zeros are exact; they split the piece, and so on.
    """
    places = torch.tensor([0.0, 1.0], dtype=torch.float64)
    settled = torch.zeros(1, dtype=torch.bool)
    while not settled.all():
        points = torch.lerp(start, end, places[:, None])
        new: list[Tensor] = []
        open_pieces = ~settled
        for value in (layer for block in _trace(model, points, coefficients) for layer in block):
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
    n = model.num_skips
    traced = _trace(model, torch.lerp(start, end, middles[:, None]), coefficients)
    a = [_block_jacobian(block, values) for block, values in zip(model.a, traced[:n], strict=True)]
    b = [_block_jacobian(block, values) for block, values in zip(reversed(model.b), traced[n + 1 :], strict=True)]
    return Jacobians(places.diff(), a, b[::-1], _block_jacobian(model.middle, traced[n]).expand_as(a[0]))


def _block_jacobian(block: nn.Module, before_relu: list[Tensor]) -> Tensor:
    """W_l D_(l-1) ... D_1 W_1 with the D of each piece."""
    first, *rest = matrices(block)
    if not rest:
        return first[None]
    jacobian = first.expand(len(before_relu[0]), -1, -1)
    for weight, value in zip(rest, before_relu, strict=True):
        jacobian = weight @ ((value > 0).to(weight.dtype)[:, :, None] * jacobian)
    return jacobian


def power_iteration(
    function: Callable[[Tensor], Tensor], x: Tensor, iterations: int = 100, seed: int = 0
) -> tuple[float, Tensor]:
    """(||J||_2, its input direction) of the Jacobian at x, by products with J and its transpose only.

    It comes from below: good for how large a change can be, never as the constant of an upper bound.
    """
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype).to(x.device)
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
