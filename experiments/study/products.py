"""Triton kernels: matrix products of a transformer block with what surrounds them done on the tile, before it is stored.

A tile spans whole rows where a LayerNorm follows or precedes, so its width D is at most 256. Operands come through tensor
descriptors, which fill with zeros behind the last row. Sums over rows (gradients of biases and norms) are stored once per
tile of rows, gradients of weights once per part of the rows; `_gather` adds them up, always in the same order.

Shapes: M rows (B images x T tokens), D width, K inner size. Products are in the weights' type, sums in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from scalelong.backbones.mlp_kernel import gelu

EPS = tl.constexpr(1e-5)  # of the norms
INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # Triton's interpreter has no inline assembly


@triton.jit
def begin():
    """First line of every kernel: it may be started before the kernel in front of it has ended, and waits for it here."""
    if not INTERPRETED:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _matmul(
    a, b, row, column, total, K: tl.constexpr, BK: tl.constexpr, T: tl.constexpr, FIRST: tl.constexpr = 0  # noqa: N803
):  # fmt: skip
    """total + a b, or a b^T with T, at rows from `row` and columns from `column`; b starts at FIRST of the inner index."""
    for k in tl.range(0, K, BK):
        right = b.load([column, FIRST + k]).T if T else b.load([FIRST + k, column])
        total = tl.dot(a.load([row, k]), right, total)
    return total


@triton.jit
def _place(row, column, M, N, BM: tl.constexpr, BN: tl.constexpr):  # noqa: N803
    """Rows, columns, offsets and mask of a tile in an (M, N) tensor; BN divides N."""
    rows, columns = row + tl.arange(0, BM), column + tl.arange(0, BN)
    return rows, columns, rows[:, None] * N + columns[None, :], (rows < M)[:, None]


@triton.jit
def _store_norm(y, gain, shift, n, stats, rows, columns, offsets, M, D: tl.constexpr):  # noqa: N803
    """n = LayerNorm of whole rows y; stats = mean and 1 / deviation of each."""
    mean = tl.sum(y, 1) / D
    y = y - mean[:, None]
    scale = tl.rsqrt(tl.sum(y * y, 1) / D + EPS)
    y = y * scale[:, None] * tl.load(gain + columns)[None, :] + tl.load(shift + columns)[None, :]
    tl.store(n + offsets, y.to(n.dtype.element_ty), (rows < M)[:, None])
    tl.store(stats + rows, mean, rows < M)
    tl.store(stats + M + rows, scale, rows < M)


@triton.jit
def _norm(x, gain, shift, n, stats, M, D: tl.constexpr, BM: tl.constexpr):  # noqa: N803
    begin()
    rows, columns, offsets, inside = _place(tl.program_id(0) * BM, 0, M, D, BM, D)
    y = tl.load(x + offsets, inside, other=0.0).to(tl.float32)
    _store_norm(y, gain, shift, n, stats, rows, columns, offsets, M, D)


@triton.jit
def _linear(
    a, w, out, M, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, T: tl.constexpr  # noqa: N803
):  # fmt: skip
    """out = a w^T with T, else a w."""
    begin()
    column, row = tl.program_id(0) * BN, tl.program_id(1) * BM
    total = _matmul(a, w, row, column, tl.zeros((BM, BN), tl.float32), K, BK, T)
    _, _, offsets, inside = _place(row, column, M, N, BM, BN)
    tl.store(out + offsets, total.to(out.dtype.element_ty), inside)


@triton.jit
def _linear_gelu(
    a, w, bias, out, slope, M, N,  # noqa: N803
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SLOPE: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """out = GELU(a w^T + bias), with SLOPE slope = its derivative there."""
    begin()
    column, row = tl.program_id(0) * BN, tl.program_id(1) * BM
    total = _matmul(a, w, row, column, tl.zeros((BM, BN), tl.float32), K, BK, True)
    _, columns, offsets, inside = _place(row, column, M, N, BM, BN)
    value, derivative = gelu(total + tl.load(bias + columns).to(tl.float32)[None, :])
    tl.store(out + offsets, value.to(out.dtype.element_ty), inside)
    if SLOPE:
        tl.store(slope + offsets, derivative.to(slope.dtype.element_ty), inside)


@triton.jit
def _gelu_backward(
    g, w, slope, out, sums, M, N, first, width,  # noqa: N803
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """out = (g w) slope, and its sums over rows."""
    begin()
    column, row = tl.program_id(0) * BN, tl.program_id(1) * BM
    _, columns, offsets, inside = _place(row, column, M, N, BM, BN)
    slopes = tl.load(slope + offsets, inside, other=0.0)  # before the product, which hides the wait
    total = _matmul(g, w, row, column, tl.zeros((BM, BN), tl.float32), K, BK, False) * slopes.to(tl.float32)
    tl.store(out + offsets, total.to(out.dtype.element_ty), inside)
    tl.store(sums + tl.program_id(1) * width + first + columns, tl.sum(total, 0))


@triton.jit
def _linear_add(
    a, w, bias, x, out, gain, shift, n, stats, M, N,  # noqa: N803
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """out = x + a w^T + bias; with NORM, for tiles of whole rows, also n = LayerNorm(out)."""
    begin()
    column, row = tl.program_id(0) * BN, tl.program_id(1) * BM
    rows, columns, offsets, inside = _place(row, column, M, N, BM, BN)
    around = tl.load(x + offsets, inside, other=0.0)  # before the product, which hides the wait
    y = _matmul(a, w, row, column, tl.zeros((BM, BN), tl.float32), K, BK, True) + around.to(tl.float32)
    low = (y + tl.load(bias + columns).to(tl.float32)[None, :]).to(out.dtype.element_ty)
    tl.store(out + offsets, low, inside)
    if NORM:
        _store_norm(low.to(tl.float32), gain, shift, n, stats, rows, columns, offsets, M, BN)


@triton.jit
def _join(
    x, s, w, bias, out, gain, shift, n, stats, M,  # noqa: N803
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """out = [x, s] w^T + bias; with NORM, for tiles of whole rows, also n = LayerNorm(out)."""
    begin()
    column, row = tl.program_id(0) * BN, tl.program_id(1) * BM
    y = _matmul(x, w, row, column, tl.zeros((BM, BN), tl.float32), D, BK, True)
    y = _matmul(s, w, row, column, y, D, BK, True, D)
    rows, columns, offsets, inside = _place(row, column, M, D, BM, BN)
    low = (y + tl.load(bias + columns).to(tl.float32)[None, :]).to(out.dtype.element_ty)
    tl.store(out + offsets, low, inside)
    if NORM:
        _store_norm(low.to(tl.float32), gain, shift, n, stats, rows, columns, offsets, M, D)


@triton.jit
def _join_backward(
    g, w, g_, skip, coefficients, dx, dskip, dcoefficients, sums, factor, M, first, width,  # noqa: N803
    D: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """dx and dskip of a join that scales the skip by a number, or with GATED by one number per row; sums of g over rows."""
    begin()
    row, half = tl.program_id(0) * BM, tl.program_id(1)
    total = _matmul(g, w, row, half * D, tl.zeros((BM, D), tl.float32), D, BK, False)
    rows, columns, offsets, inside = _place(row, 0, M, D, BM, D)
    if half == 0:
        tl.store(dx + offsets, total.to(dx.dtype.element_ty), inside)
        up = tl.load(g_ + offsets, inside, other=0.0).to(tl.float32)
        tl.store(sums + tl.program_id(0) * width + first + columns, tl.sum(up, 0))
    else:
        if GATED:
            s = tl.load(skip + offsets, inside, other=0.0).to(tl.float32)
            tl.store(dcoefficients + rows, tl.sum(total * s, 1), rows < M)
            total = total * tl.load(coefficients + rows, rows < M, other=0.0).to(tl.float32)[:, None]
        else:
            total = total * factor
        tl.store(dskip + offsets, total.to(dskip.dtype.element_ty), inside)


@triton.jit
def _scale(s, coefficients, out, factor, M, D: tl.constexpr, BM: tl.constexpr, GATED: tl.constexpr):  # noqa: N803
    """out = s times a number, or with GATED times one number per row."""
    begin()
    rows, _, offsets, inside = _place(tl.program_id(0) * BM, 0, M, D, BM, D)
    value = tl.load(s + offsets, inside, other=0.0).to(tl.float32)
    if GATED:
        value = value * tl.load(coefficients + rows, rows < M, other=0.0).to(tl.float32)[:, None]
    else:
        value = value * factor
    tl.store(out + offsets, value.to(out.dtype.element_ty), inside)


@triton.jit
def _norm_backward(
    g, x, stats, gain, shift, up, dx, low, n, sums, M, first, width,  # noqa: N803
    D: tl.constexpr, BM: tl.constexpr, GROUPS: tl.constexpr, BIASES: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """The gradient dx at x of LayerNorm, where g is that of its output, plus that of the path around it, `up`.

    Also n = LayerNorm(x) again, sums over rows of the gradients of gain and shift; with BIASES those of dx and up, and dx in
    low precision. Each program takes GROUPS * BM rows.
    """
    begin()
    of_gain, of_shift = tl.zeros((BM, D), tl.float32), tl.zeros((BM, D), tl.float32)
    of_dx, of_up = tl.zeros((BM, D), tl.float32), tl.zeros((BM, D), tl.float32)
    columns = tl.arange(0, D)
    gains, shifts = tl.load(gain + columns)[None, :], tl.load(shift + columns)[None, :]
    for group in tl.static_range(GROUPS):
        rows, _, offsets, inside = _place((tl.program_id(0) * GROUPS + group) * BM, 0, M, D, BM, D)
        total = tl.load(g + offsets, inside, other=0.0).to(tl.float32)
        x_hat = tl.load(x + offsets, inside, other=0.0).to(tl.float32)
        around = tl.load(up + offsets, inside, other=0.0).to(tl.float32)
        scale = tl.load(stats + M + rows, rows < M, other=0.0)[:, None]
        x_hat = (x_hat - tl.load(stats + rows, rows < M, other=0.0)[:, None]) * scale
        tl.store(n + offsets, (x_hat * gains + shifts).to(n.dtype.element_ty), inside)
        of_gain += total * x_hat
        of_shift += total
        total = total * gains
        along, middle = tl.sum(total * x_hat, 1) / D, tl.sum(total, 1) / D
        total = (total - middle[:, None] - x_hat * along[:, None]) * scale + around
        tl.store(dx + offsets, total.to(dx.dtype.element_ty), inside)
        if BIASES:
            tl.store(low + offsets, total.to(low.dtype.element_ty), inside)
            of_dx += total
            of_up += around
    base = sums + tl.program_id(0) * width + columns
    tl.store(base + first, tl.sum(of_gain, 0))
    tl.store(base + first + D, tl.sum(of_shift, 0))
    if BIASES:
        tl.store(base, tl.sum(of_dx, 0))
        tl.store(base + 5 * D, tl.sum(of_up, 0))


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
    dqkv, n1, dmiddle, mixed, dpre, n2, dy, hidden, g, x, skip, parts, size,
    STEPS: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """All weights of a block, that of the join last: TILES of (BN, D), each over STEPS * BK of the rows."""
    begin()
    strips: tl.constexpr = D // BN
    tile, part = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    start, out = part * STEPS * BK, parts + part.to(tl.int64) * size
    # one after the other, not elif: branches inside branches would each get their own shared memory
    if tile < 3 * strips:
        _part(dqkv, n1, out, tile * BN, 0, start, D, STEPS, BN, D, BK)
    if (tile >= 3 * strips) & (tile < 4 * strips):
        _part(dmiddle, mixed, out + 3 * D * D, (tile - 3 * strips) * BN, 0, start, D, STEPS, BN, D, BK)
    if (tile >= 4 * strips) & (tile < 8 * strips):
        _part(dpre, n2, out + 4 * D * D, (tile - 4 * strips) * BN, 0, start, D, STEPS, BN, D, BK)
    if (tile >= 8 * strips) & (tile < 12 * strips):
        rest = tile - 8 * strips
        _part(dy, hidden, out + 8 * D * D, rest // 4 * BN, rest % 4 * D, start, 4 * D, STEPS, BN, D, BK)
    if (tile >= 12 * strips) & (tile < 13 * strips):
        _part(g, x, out + 12 * D * D, (tile - 12 * strips) * BN, 0, start, 2 * D, STEPS, BN, D, BK)
    if tile >= 13 * strips:
        _part(g, skip, out + 12 * D * D + D, (tile - 13 * strips) * BN, 0, start, 2 * D, STEPS, BN, D, BK)


@triton.jit
def _gather(
    parts, sums, flat, norms, size, width, join, HIDDEN: tl.constexpr, WIDE: tl.constexpr, JOIN: tl.constexpr,  # noqa: N803
    MOST: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Add up the parts of the weights and the sums over rows, in the order of a block's flat parameters.

    HIDDEN, WIDE, JOIN: tiles of rows in the sums of fc1's bias, of all others, of the join's bias; MOST of them. join: where
    the block's own parameters start.
    """
    begin()
    program, chunks = tl.program_id(0), tl.where(join > 0, width, 10 * D) // BC
    if program >= chunks:
        start = (program - chunks) * BLOCK
        index = start + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for part in tl.static_range(PARTS):
            total += tl.load(parts + part * size + index)
        shift = join + tl.where(start >= 4 * D * D, D, 0) + tl.where(start >= 8 * D * D, 4 * D, 0)
        shift = tl.where(start >= 12 * D * D, -12 * D * D, shift)
        tl.store(flat + index + shift, total.to(flat.dtype.element_ty))
    else:
        start = program * BC
        column, columns = start // D, start + tl.arange(0, BC)
        tiles = tl.where(column == 10, JOIN, tl.where((column >= 1) & (column < 5), HIDDEN, WIDE))
        column_sum = tl.zeros((BC,), tl.float32)
        for first in tl.static_range(0, MOST, BT):
            rows = first + tl.arange(0, BT)
            block = rows[:, None] * width + columns[None, :]
            column_sum += tl.sum(tl.load(sums + block, (rows < tiles)[:, None], other=0.0), 0)
        if (column < 6) | (column == 10):
            place = tl.where(column == 0, 4 * D * D, tl.where(column == 5, 12 * D * D, 8 * D * D))
            place = tl.where(column == 10, join - 11 * D, join + place)
            tl.store(flat + place + columns, column_sum.to(flat.dtype.element_ty))
        else:
            tl.store(norms + columns - 6 * D, column_sum)
