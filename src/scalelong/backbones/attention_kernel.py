"""Triton kernels for attention over slightly more tokens than a multiple of 64, such as 256 patches and the time.

Libraries process tokens in tiles of 128, so 257 cost as much as 384. Here the last one or two are vectors beside tiles of 64.
Sums have a fixed order (no atomics), so training is reproducible. Measured by benchmarks/kernels.py.

Shapes: B images, T tokens, H heads of D channels; qkv is (B, T, 3 H D) as the linear layer writes it. Exponentials are powers
of 2: `scale` is log2(e) / sqrt(D), and `stats` (B, H, T) holds log2 of the sum of exponentials of each query.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64


@dataclass(frozen=True)
class Tiling:
    """How a kernel is launched; benchmarks/kernels.py times others."""

    warps: int = 4
    stages: int = 3
    registers: int | None = None  # at most, per thread; fewer let more programs share a multiprocessor

    @property
    def options(self) -> dict[str, int | None]:
        return {"num_warps": self.warps, "maxnreg": self.registers}


FORWARD, QUERIES, KEYS = Tiling(), Tiling(registers=168), Tiling(registers=168)


@triton.jit
def _locate(tokens, HEADS: tl.constexpr, D: tl.constexpr, TILES: tl.constexpr):
    """The tile of this program (TILES: the remaining tokens), and where its image and head start in qkv, out and stats."""
    program = tl.program_id(0)
    tile = program % (TILES + 1)
    head = program // (TILES + 1) % HEADS
    image = (program // (TILES + 1) // HEADS).to(tl.int64)
    start = image * tokens * HEADS * D
    return tile, start * 3 + head * D, start + head * D, (image * HEADS + head) * tokens


@triton.jit
def _tile(base, first, stride, D: tl.constexpr, N: tl.constexpr):
    """Rows first to first + N - 1."""
    rows = first + tl.arange(0, N)
    return tl.load(base + rows[:, None] * stride + tl.arange(0, D)[None, :])


@triton.jit
def _row(base, row, stride, D: tl.constexpr):
    return tl.load(base + row * stride + tl.arange(0, D)).to(tl.float32)


@triton.jit
def _store_tile(base, first, stride, values, D: tl.constexpr, N: tl.constexpr):
    rows = first + tl.arange(0, N)
    tl.store(base + rows[:, None] * stride + tl.arange(0, D)[None, :], values.to(base.dtype.element_ty))


@triton.jit
def _store_row(base, row, stride, values, D: tl.constexpr):
    tl.store(base + row * stride + tl.arange(0, D), values.to(base.dtype.element_ty))


@triton.jit
def _forward(
    qkv, out, stats, tokens, scale,
    HEADS: tl.constexpr, D: tl.constexpr, TILES: tl.constexpr, REST: tl.constexpr, N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of queries over all keys, or the remaining queries one by one."""
    tile, at, at_out, at_stats = _locate(tokens, HEADS, D, TILES)
    width: tl.constexpr = HEADS * D
    queries, keys, values = qkv + at, qkv + at + width, qkv + at + 2 * width
    out += at_out
    stats += at_stats
    if tile < TILES:
        query = _tile(queries, tile * N, 3 * width, D, N)
        top = tl.full([N], float("-inf"), tl.float32)
        total = tl.zeros([N], tl.float32)
        mixed = tl.zeros([N, D], tl.float32)
        for i in tl.range(0, TILES, num_stages=STAGES):
            score = tl.dot(query, tl.trans(_tile(keys, i * N, 3 * width, D, N))) * scale
            larger = tl.maximum(top, tl.max(score, 1))
            weight = tl.exp2(score - larger[:, None])
            old = tl.exp2(top - larger)
            total = total * old + tl.sum(weight, 1)
            mixed = tl.dot(weight.to(query.dtype), _tile(values, i * N, 3 * width, D, N), mixed * old[:, None])
            top = larger
        for i in tl.static_range(REST):
            score1 = tl.sum(query.to(tl.float32) * _row(keys, TILES * N + i, 3 * width, D)[None, :], 1) * scale
            larger = tl.maximum(top, score1)
            weight1 = tl.exp2(score1 - larger)
            old = tl.exp2(top - larger)
            total = total * old + weight1
            mixed = mixed * old[:, None] + weight1[:, None] * _row(values, TILES * N + i, 3 * width, D)[None, :]
            top = larger
        _store_tile(out, tile * N, width, mixed / total[:, None], D, N)
        tl.store(stats + tile * N + tl.arange(0, N), top + tl.log2(total))
    else:
        for j in tl.static_range(REST):
            query1 = _row(queries, TILES * N + j, 3 * width, D)
            top1 = float("-inf")
            total1 = 0.0
            mixed1 = tl.zeros([D], tl.float32)
            for i in tl.range(0, TILES):
                score2 = tl.sum(_tile(keys, i * N, 3 * width, D, N).to(tl.float32) * query1[None, :], 1) * scale
                larger1 = tl.maximum(top1, tl.max(score2, 0))
                weight2 = tl.exp2(score2 - larger1)
                old1 = tl.exp2(top1 - larger1)
                total1 = total1 * old1 + tl.sum(weight2, 0)
                value = _tile(values, i * N, 3 * width, D, N).to(tl.float32)
                mixed1 = mixed1 * old1 + tl.sum(weight2[:, None] * value, 0)
                top1 = larger1
            for i in tl.static_range(REST):
                score3 = tl.sum(query1 * _row(keys, TILES * N + i, 3 * width, D), 0) * scale
                larger1 = tl.maximum(top1, score3)
                weight3 = tl.exp2(score3 - larger1)
                old1 = tl.exp2(top1 - larger1)
                total1 = total1 * old1 + weight3
                mixed1 = mixed1 * old1 + weight3 * _row(values, TILES * N + i, 3 * width, D)
                top1 = larger1
            _store_row(out, TILES * N + j, width, mixed1 / total1, D)
            tl.store(stats + TILES * N + j, top1 + tl.log2(total1))


@triton.jit
def _query_gradients(
    qkv, out, grad, stats, deltas, dqkv, tokens, scale, slope,
    HEADS: tl.constexpr, D: tl.constexpr, TILES: tl.constexpr, REST: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile of queries, or of the remaining ones; and delta, the sum of out times its gradient."""
    tile, at, at_out, at_stats = _locate(tokens, HEADS, D, TILES)
    width: tl.constexpr = HEADS * D
    queries, keys, values = qkv + at, qkv + at + width, qkv + at + 2 * width
    dqkv += at
    out += at_out
    grad += at_out
    stats += at_stats
    deltas += at_stats
    if tile < TILES:
        rows = tile * N + tl.arange(0, N)
        query = _tile(queries, tile * N, 3 * width, D, N)
        g = _tile(grad, tile * N, width, D, N)
        stat = tl.load(stats + rows)
        delta = tl.sum(_tile(out, tile * N, width, D, N).to(tl.float32) * g.to(tl.float32), 1)
        tl.store(deltas + rows, delta)
        total = tl.zeros([N, D], tl.float32)
        for i in tl.range(0, TILES, num_stages=STAGES):
            key = _tile(keys, i * N, 3 * width, D, N)
            weight = tl.exp2(tl.dot(query, tl.trans(key)) * scale - stat[:, None])
            ds = weight * (tl.dot(g, tl.trans(_tile(values, i * N, 3 * width, D, N))) - delta[:, None])
            total = tl.dot(ds.to(query.dtype), key, total)
        for i in tl.static_range(REST):
            key1 = _row(keys, TILES * N + i, 3 * width, D)
            weight1 = tl.exp2(tl.sum(query.to(tl.float32) * key1[None, :], 1) * scale - stat)
            dp1 = tl.sum(g.to(tl.float32) * _row(values, TILES * N + i, 3 * width, D)[None, :], 1)
            total += (weight1 * (dp1 - delta))[:, None] * key1[None, :]
        _store_tile(dqkv, tile * N, 3 * width, total * slope, D, N)
    else:
        for j in tl.static_range(REST):
            query1 = _row(queries, TILES * N + j, 3 * width, D)
            g1 = _row(grad, TILES * N + j, width, D)
            stat1 = tl.load(stats + TILES * N + j)
            delta1 = tl.sum(_row(out, TILES * N + j, width, D) * g1, 0)
            tl.store(deltas + TILES * N + j, delta1)
            total1 = tl.zeros([D], tl.float32)
            for i in tl.range(0, TILES):
                key2 = _tile(keys, i * N, 3 * width, D, N).to(tl.float32)
                value2 = _tile(values, i * N, 3 * width, D, N).to(tl.float32)
                weight2 = tl.exp2(tl.sum(key2 * query1[None, :], 1) * scale - stat1)
                ds2 = weight2 * (tl.sum(value2 * g1[None, :], 1) - delta1)
                total1 += tl.sum(ds2[:, None] * key2, 0)
            for i in tl.static_range(REST):
                key3 = _row(keys, TILES * N + i, 3 * width, D)
                weight3 = tl.exp2(tl.sum(query1 * key3, 0) * scale - stat1)
                total1 += weight3 * (tl.sum(g1 * _row(values, TILES * N + i, 3 * width, D), 0) - delta1) * key3
            _store_row(dqkv, TILES * N + j, 3 * width, total1 * slope, D)


@triton.jit
def _key_gradients(
    qkv, grad, stats, deltas, dqkv, tokens, scale, slope,
    HEADS: tl.constexpr, D: tl.constexpr, TILES: tl.constexpr, REST: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of one tile of keys and values, or of the remaining ones."""
    tile, at, at_out, at_stats = _locate(tokens, HEADS, D, TILES)
    width: tl.constexpr = HEADS * D
    queries, keys, values = qkv + at, qkv + at + width, qkv + at + 2 * width
    dqkv += at
    grad += at_out
    stats += at_stats
    deltas += at_stats
    if tile < TILES:
        key = _tile(keys, tile * N, 3 * width, D, N)
        value = _tile(values, tile * N, 3 * width, D, N)
        dkey = tl.zeros([N, D], tl.float32)
        dvalue = tl.zeros([N, D], tl.float32)
        for i in tl.range(0, TILES, num_stages=STAGES):
            rows = i * N + tl.arange(0, N)
            query = _tile(queries, i * N, 3 * width, D, N)
            g = _tile(grad, i * N, width, D, N)
            weight = tl.exp2(tl.dot(key, tl.trans(query)) * scale - tl.load(stats + rows)[None, :])
            dvalue = tl.dot(weight.to(g.dtype), g, dvalue)
            ds = weight * (tl.dot(value, tl.trans(g)) - tl.load(deltas + rows)[None, :])
            dkey = tl.dot(ds.to(query.dtype), query, dkey)
        for i in tl.static_range(REST):
            query1 = _row(queries, TILES * N + i, 3 * width, D)
            g1 = _row(grad, TILES * N + i, width, D)
            weight1 = tl.exp2(tl.sum(key.to(tl.float32) * query1[None, :], 1) * scale - tl.load(stats + TILES * N + i))
            dvalue += weight1[:, None] * g1[None, :]
            dp1 = tl.sum(value.to(tl.float32) * g1[None, :], 1)
            dkey += (weight1 * (dp1 - tl.load(deltas + TILES * N + i)))[:, None] * query1[None, :]
        _store_tile(dqkv + width, tile * N, 3 * width, dkey * slope, D, N)
        _store_tile(dqkv + 2 * width, tile * N, 3 * width, dvalue, D, N)
    else:
        for j in tl.static_range(REST):
            key1 = _row(keys, TILES * N + j, 3 * width, D)
            value1 = _row(values, TILES * N + j, 3 * width, D)
            dkey1 = tl.zeros([D], tl.float32)
            dvalue1 = tl.zeros([D], tl.float32)
            for i in tl.range(0, TILES):
                rows = i * N + tl.arange(0, N)
                query2 = _tile(queries, i * N, 3 * width, D, N).to(tl.float32)
                g2 = _tile(grad, i * N, width, D, N).to(tl.float32)
                weight2 = tl.exp2(tl.sum(query2 * key1[None, :], 1) * scale - tl.load(stats + rows))
                dvalue1 += tl.sum(weight2[:, None] * g2, 0)
                ds2 = weight2 * (tl.sum(g2 * value1[None, :], 1) - tl.load(deltas + rows))
                dkey1 += tl.sum(ds2[:, None] * query2, 0)
            for i in tl.static_range(REST):
                query3 = _row(queries, TILES * N + i, 3 * width, D)
                g3 = _row(grad, TILES * N + i, width, D)
                weight3 = tl.exp2(tl.sum(query3 * key1, 0) * scale - tl.load(stats + TILES * N + i))
                dvalue1 += weight3 * g3
                dkey1 += weight3 * (tl.sum(g3 * value1, 0) - tl.load(deltas + TILES * N + i)) * query3
            _store_row(dqkv + width, TILES * N + j, 3 * width, dkey1 * slope, D)
            _store_row(dqkv + 2 * width, TILES * N + j, 3 * width, dvalue1, D)


def attend(qkv: Tensor, heads: int, tiling: Tiling = FORWARD) -> tuple[Tensor, Tensor]:
    """softmax(query key / sqrt(D)) value of each head: (B, T, 3 H D) -> (B, T, H D), and the stats for the backward pass."""
    images, tokens, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    out = torch.empty(images, tokens, width, dtype=qkv.dtype, device=qkv.device)
    stats = torch.empty(images, heads, tokens, dtype=torch.float32, device=qkv.device)
    grid, sizes = _grid(qkv, heads)
    scale = math.log2(math.e) / math.sqrt(width // heads)
    with torch.cuda.device_of(qkv):  # Triton launches on the current device
        _forward[grid](qkv, out, stats, tokens, scale, *sizes, tiling.stages, **tiling.options)
    return out, stats


def attend_backward(
    qkv: Tensor, out: Tensor, stats: Tensor, grad: Tensor, heads: int, queries: Tiling = QUERIES, keys: Tiling = KEYS
) -> Tensor:
    """The gradient of qkv, given that of out."""
    tokens, width = qkv.shape[1], qkv.shape[2] // 3
    dqkv, deltas = torch.empty_like(qkv), torch.empty_like(stats)
    grid, sizes = _grid(qkv, heads)
    slope = 1 / math.sqrt(width // heads)
    scale = math.log2(math.e) * slope
    with torch.cuda.device_of(qkv):
        _query_gradients[grid](
            qkv, out, grad, stats, deltas, dqkv, tokens, scale, slope, *sizes, queries.stages, **queries.options
        )
        _key_gradients[grid](qkv, grad, stats, deltas, dqkv, tokens, scale, slope, *sizes, keys.stages, **keys.options)
    return dqkv


def _grid(qkv: Tensor, heads: int) -> tuple[tuple[int], tuple[int, ...]]:
    """One program per image, head and tile, and one for the remaining tokens; then the constants of the kernels."""
    images, tokens, channels = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3 // heads
    tiles, rest = divmod(tokens, TILE)
    return (images * heads * (tiles + 1),), (heads, channels, tiles, rest, TILE)
