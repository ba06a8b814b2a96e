"""Triton kernels that compute GELU and its derivative inside the matrix products of an MLP.

    forward    pre = x w1^T + b1, act = GELU(pre), slope = GELU'(pre)
    backward   dpre = (dy w2) slope, and its sums over rows

Separate kernels write and read each of these once more.

Shapes: M rows (images x tokens), D width, H hidden channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # Triton's interpreter has no inline assembly
GROUP = tl.constexpr(8)  # tiles of rows that share the columns they read


@dataclass(frozen=True)
class Tiling:
    """Tile sizes of a product, and how it is launched."""

    rows: int = 128
    columns: int = 128
    inner: int = 64
    warps: int = 8
    stages: int = 3
    registers: int = (
        128  # at most, per thread: two programs then share a multiprocessor, and one computes GELU meanwhile
    )

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


FORWARD, BACKWARD = Tiling(), Tiling()


@triton.jit
def _exp2(x):
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def _inverse(x):
    if INTERPRETED:
        return 1 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def gelu(x):
    """GELU and its derivative, with the normal distribution function from Abramowitz and Stegun 7.1.26: error below 2e-7."""
    t = _inverse(1.0 + 0.23164190 * tl.abs(x))
    series = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    tail = _exp2(x * x * -0.7213475204444817)  # exp(-x^2 / 2)
    below = tl.where(x < 0, series * tail, 1 - series * tail)
    return x * below, below + x * tail * 0.3989422804014327


@triton.jit
def _place(M, H, BM: tl.constexpr, BN: tl.constexpr):
    """First row and column of this program's tile; neighbours share what they read."""
    program, across = tl.program_id(0), H // BN
    group = program // (GROUP * across)
    high = tl.minimum(tl.cdiv(M, BM) - group * GROUP, GROUP)
    inside = program % (GROUP * across)
    return (group * GROUP + inside % high) * BM, inside // high * BN


@triton.jit
def _halves(total, BM: tl.constexpr, BN: tl.constexpr):
    """The left and the right columns: stored one after the other they need fewer registers."""
    return tl.split(tl.permute(tl.reshape(total, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def _offsets(row, column, M, H, BM: tl.constexpr, BN: tl.constexpr):
    """Columns, offsets and mask of a tile in an (M, H) tensor; BN divides H."""
    rows, columns = row + tl.arange(0, BM), column + tl.arange(0, BN)
    return columns, rows[:, None].to(tl.int64) * H + columns[None, :], (rows < M)[:, None]


@triton.jit
def _store_gelu(pre, bias, act, slope, row, column, M, H, BM: tl.constexpr, BN: tl.constexpr):
    columns, offsets, mask = _offsets(row, column, M, H, BM, BN)
    value, derivative = gelu(pre + tl.load(bias + columns).to(tl.float32)[None, :])
    tl.store(act + offsets, value.to(act.dtype.element_ty), mask)
    tl.store(slope + offsets, derivative.to(slope.dtype.element_ty), mask)


@triton.jit
def _linear_gelu(
    x, w1, bias, act, slope, M, H, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    row, column = _place(M, H, BM, BN)
    pre = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, D, BK):
        pre = tl.dot(x.load([row, k]), w1.load([column, k]).T, pre)
    left, right = _halves(pre, BM, BN)
    _store_gelu(left, bias, act, slope, row, column, M, H, BM, BN // 2)
    _store_gelu(right, bias, act, slope, row, column + BN // 2, M, H, BM, BN // 2)


@triton.jit
def _store_gradient(dact, slope, dpre, sums, row, column, M, H, BM: tl.constexpr, BN: tl.constexpr):
    columns, offsets, mask = _offsets(row, column, M, H, BM, BN)
    gradient = dact * tl.load(slope + offsets, mask, other=0.0).to(tl.float32)
    tl.store(dpre + offsets, gradient.to(dpre.dtype.element_ty), mask)
    tl.store(sums + row // BM * H + columns, tl.sum(gradient, 0))


@triton.jit
def _gelu_backward(
    dy, w2, slope, dpre, sums, M, H, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    row, column = _place(M, H, BM, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, D, BK):
        total = tl.dot(dy.load([row, k]), w2.load([k, column]), total)
    left, right = _halves(total, BM, BN)
    _store_gradient(left, slope, dpre, sums, row, column, M, H, BM, BN // 2)
    _store_gradient(right, slope, dpre, sums, row, column + BN // 2, M, H, BM, BN // 2)


def linear_gelu(x: Tensor, w1: Tensor, bias: Tensor, tiling: Tiling = FORWARD) -> tuple[Tensor, Tensor]:
    """act and slope, both (M, H); x is (M, D), w1 (H, D)."""
    (rows, width), hidden, t = x.shape, w1.shape[0], tiling
    act, slope = x.new_empty(rows, hidden), x.new_empty(rows, hidden)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _linear_gelu[_grid(rows, hidden, t)](
            _tiles(x, t.rows, t.inner), _tiles(w1, t.columns, t.inner), bias, act, slope, rows, hidden,
            width, t.rows, t.columns, t.inner, **t.options,
        )  # fmt: skip
    return act, slope


def gelu_backward(dy: Tensor, w2: Tensor, slope: Tensor, tiling: Tiling = BACKWARD) -> tuple[Tensor, Tensor]:
    """dpre (M, H), and its sums over each tile of rows, (tiles, H) in float32; dy is (M, D), w2 (D, H)."""
    (rows, hidden), t = slope.shape, tiling
    dpre, sums = torch.empty_like(slope), torch.empty(triton.cdiv(rows, t.rows), hidden, device=slope.device)
    with torch.cuda.device_of(slope):
        _gelu_backward[_grid(rows, hidden, t)](
            _tiles(dy, t.rows, t.inner), _tiles(w2, t.inner, t.columns), slope, dpre, sums, rows, hidden,
            dy.shape[1], t.rows, t.columns, t.inner, **t.options,
        )  # fmt: skip
    return dpre, sums


def _grid(rows: int, hidden: int, tiling: Tiling) -> tuple[int]:
    return (triton.cdiv(rows, tiling.rows) * (hidden // tiling.columns),)


def _tiles(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])
