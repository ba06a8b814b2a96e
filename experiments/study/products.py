"""Triton kernels: matrix products of a transformer block with what surrounds them done on the tile, before it is stored.

A tile spans whole rows where a LayerNorm follows or precedes, so its width D is at most 256. Operands come through tensor
descriptors, which fill with zeros behind the last row. Sums over rows (gradients of biases and norms) are stored once per
tile of rows, gradients of weights once per part of the rows; `_gather` adds them up, always in the same order.

Shapes: M rows (B images x T tokens), D width, K inner size. Products are in the weights' type, sums in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from fast_uvit import _normal

EPS = tl.constexpr(1e-5)  # of the norms


@triton.jit
def _matmul(
    a, b, row, column, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, T: tl.constexpr  # noqa: N803
):  # fmt: skip
    """Tile of a b, or of a b^T with T."""
    total = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, BK):
        right = b.load([column, k]).T if T else b.load([k, column])
        total = tl.dot(a.load([row, k]), right, total)
    return total


@triton.jit
def _place(row, column, M, N, BM: tl.constexpr, BN: tl.constexpr):  # noqa: N803
    """Rows, columns, offsets and mask of a tile in an (M, N) tensor."""
    rows, columns = row + tl.arange(0, BM), column + tl.arange(0, BN)
    offsets = rows[:, None] * N + columns[None, :]
    return rows, columns, offsets, (rows < M)[:, None] & (columns < N)[None, :]


@triton.jit
def _normalised(y, gain, bias, D: tl.constexpr):  # noqa: N803
    """LayerNorm of whole rows, with mean and 1 / deviation of each."""
    mean = tl.sum(y, 1) / D
    y = y - mean[:, None]
    scale = tl.rsqrt(tl.sum(y * y, 1) / D + EPS)
    return y * scale[:, None] * gain[None, :] + bias[None, :], mean, scale


@triton.jit
def _norm(x, gain, bias, n, stats, M, D: tl.constexpr, BM: tl.constexpr):  # noqa: N803
    rows, columns, offsets, inside = _place(tl.program_id(0) * BM, 0, M, D, BM, D)
    y = tl.load(x + offsets, inside, other=0.0).to(tl.float32)
    y, mean, scale = _normalised(y, tl.load(gain + columns), tl.load(bias + columns), D)
    tl.store(n + offsets, y.to(n.dtype.element_ty), inside)
    tl.store(stats + rows, mean, rows < M)
    tl.store(stats + M + rows, scale, rows < M)


@triton.jit
def _linear(
    a, w, out, M, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, T: tl.constexpr  # noqa: N803
):  # fmt: skip
    """out = a w^T with T, else a w."""
    column, row = tl.program_id(0) * BN, tl.program_id(1) * BM
    total = _matmul(a, w, row, column, K, BM, BN, BK, T)
    _, _, offsets, inside = _place(row, column, M, N, BM, BN)
    tl.store(out + offsets, total.to(out.dtype.element_ty), inside)


@triton.jit
def _linear_gelu(
    a, w, bias, pre, out, M, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr  # noqa: N803
):  # fmt: skip
    """pre = a w^T + bias, out = GELU(pre)."""
    column, row = tl.program_id(0) * BN, tl.program_id(1) * BM
    total = _matmul(a, w, row, column, K, BM, BN, BK, True)
    _, columns, offsets, inside = _place(row, column, M, N, BM, BN)
    low = (total + tl.load(bias + columns).to(tl.float32)[None, :]).to(pre.dtype.element_ty)
    tl.store(pre + offsets, low, inside)
    _, below = _normal(low.to(tl.float32))
    tl.store(out + offsets, (low.to(tl.float32) * below).to(out.dtype.element_ty), inside)


@triton.jit
def _linear_gelu_backward(
    g, w, pre, dpre, out, sums, M, N, first, width,  # noqa: N803
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """dpre = (g w) GELU'(pre), out = GELU(pre), and the sums of dpre over rows."""
    column, row = tl.program_id(0) * BN, tl.program_id(1) * BM
    total = _matmul(g, w, row, column, K, BM, BN, BK, False)
    _, columns, offsets, inside = _place(row, column, M, N, BM, BN)
    x = tl.load(pre + offsets, inside, other=0.0).to(tl.float32)
    density, below = _normal(x)
    tl.store(out + offsets, (x * below).to(out.dtype.element_ty), inside)
    total = total * (below + x * density)
    tl.store(dpre + offsets, total.to(dpre.dtype.element_ty), inside)
    tl.store(sums + tl.program_id(1) * width + first + columns, tl.sum(total, 0))


@triton.jit
def _linear_add(
    a, w, bias, x, out, gain, shift, n, stats, M,  # noqa: N803
    K: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """out = x + a w^T + bias; with NORM also n = LayerNorm(out)."""
    row = tl.program_id(0) * BM
    y = _matmul(a, w, row, 0, K, BM, D, BK, True)
    rows, columns, offsets, inside = _place(row, 0, M, D, BM, D)
    y += tl.load(bias + columns).to(tl.float32)[None, :] + tl.load(x + offsets, inside, other=0.0).to(tl.float32)
    tl.store(out + offsets, y.to(out.dtype.element_ty), inside)
    if NORM:
        y, mean, scale = _normalised(y, tl.load(gain + columns), tl.load(shift + columns), D)
        tl.store(n + offsets, y.to(n.dtype.element_ty), inside)
        tl.store(stats + rows, mean, rows < M)
        tl.store(stats + M + rows, scale, rows < M)


@triton.jit
def _norm_backward(
    g, w, x, stats, gain, shift, up, dx, low, n, sums, M, first, width,  # noqa: N803
    K: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BIASES: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """The gradient dx at x of LayerNorm and the product behind it, plus that of the path around them, `up`.

    Also n = LayerNorm(x) again, sums over rows of the gradients of gain and shift; with BIASES those of dx and up, and dx in
    low precision.
    """
    row = tl.program_id(0) * BM
    total = _matmul(g, w, row, 0, K, BM, D, BK, False)
    rows, columns, offsets, inside = _place(row, 0, M, D, BM, D)
    mean = tl.load(stats + rows, rows < M, other=0.0)
    scale = tl.load(stats + M + rows, rows < M, other=0.0)
    gains, shifts = tl.load(gain + columns), tl.load(shift + columns)
    x_hat = (tl.load(x + offsets, inside, other=0.0).to(tl.float32) - mean[:, None]) * scale[:, None]
    tl.store(n + offsets, (x_hat * gains[None, :] + shifts[None, :]).to(n.dtype.element_ty), inside)
    base = sums + tl.program_id(0) * width + columns
    tl.store(base + first, tl.sum(total * x_hat, 0))
    tl.store(base + first + D, tl.sum(total, 0))
    total = total * gains[None, :]
    along = tl.sum(total * x_hat, 1) / D
    middle = tl.sum(total, 1) / D
    total = (total - middle[:, None] - x_hat * along[:, None]) * scale[:, None]
    around = tl.load(up + offsets, inside, other=0.0).to(tl.float32)
    total += around
    tl.store(dx + offsets, total.to(dx.dtype.element_ty), inside)
    if BIASES:
        tl.store(low + offsets, total.to(low.dtype.element_ty), inside)
        tl.store(base, tl.sum(total, 0))
        tl.store(base + 5 * D, tl.sum(around, 0))


@triton.jit
def _part(
    g, a, out, row, column, start, N, STEPS: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr  # noqa: N803
):  # fmt: skip
    """Tile of g^T a over STEPS * BK rows, stored in a matrix of N columns."""
    total = tl.zeros((BN, BC), tl.float32)
    for step in tl.range(STEPS):
        k = start + step * BK
        total = tl.dot(g.load([k, row]).T, a.load([k, column]), total)
    rows, columns = row + tl.arange(0, BN), column + tl.arange(0, BC)
    tl.store(out + rows[:, None] * N + columns[None, :], total)


@triton.jit
def _weight_gradients(
    dqkv, n1, dx1, mixed, dpre, n2, dy, hidden, parts,
    STEPS: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """All four weights of a block: tiles of (BN, D), each over STEPS * BK of the rows."""
    strips: tl.constexpr = D // BN
    tile, part = tl.program_id(0) % (12 * strips), tl.program_id(0) // (12 * strips)
    start = part * STEPS * BK
    out = parts + part.to(tl.int64) * (12 * D * D)
    if tile < 3 * strips:
        _part(dqkv, n1, out, tile * BN, 0, start, D, STEPS, BN, D, BK)
    elif tile < 4 * strips:
        _part(dx1, mixed, out + 3 * D * D, (tile - 3 * strips) * BN, 0, start, D, STEPS, BN, D, BK)
    elif tile < 8 * strips:
        _part(dpre, n2, out + 4 * D * D, (tile - 4 * strips) * BN, 0, start, D, STEPS, BN, D, BK)
    else:
        rest = tile - 8 * strips
        _part(dy, hidden, out + 8 * D * D, rest // 4 * BN, rest % 4 * D, start, 4 * D, STEPS, BN, D, BK)


@triton.jit
def _gather(
    parts, sums, flat, norms, TILES: tl.constexpr, SPLIT: tl.constexpr,  # noqa: N803
    D: tl.constexpr, BLOCK: tl.constexpr, BT: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Add up the parts of the weights and the sums over rows, in the order of a block's flat parameters."""
    program = tl.program_id(0)
    chunks: tl.constexpr = 12 * D * D // BLOCK
    if program < chunks:
        index = program * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for part in tl.static_range(SPLIT):
            total += tl.load(parts + part * (12 * D * D) + index)
        shift = tl.where(program * BLOCK >= 4 * D * D, D, 0) + tl.where(program * BLOCK >= 8 * D * D, 4 * D, 0)
        tl.store(flat + index + shift, total.to(flat.dtype.element_ty))
    else:
        column, columns = program - chunks, tl.arange(0, D)
        total = tl.zeros((D,), tl.float32)
        for first in tl.range(0, TILES, BT):
            rows = first + tl.arange(0, BT)
            block = rows[:, None] * (10 * D) + column * D + columns[None, :]
            total += tl.sum(tl.load(sums + block, (rows < TILES)[:, None], other=0.0), 0)
        if column < 6:
            place = tl.where(column == 0, 4 * D * D, tl.where(column == 5, 12 * D * D + 5 * D, 8 * D * D + column * D))
            tl.store(flat + place + columns, total.to(flat.dtype.element_ty))
        else:
            tl.store(norms + (column - 6) * D + columns, total)
