"""Triton kernels for attention over slightly more tokens than a multiple of 64, such as 256 patches and the time.

Libraries process tokens in tiles of 128, so 257 cost as much as 384. Here tiles have 64, and the loop over them treats the
remaining tokens as vectors. Sums have a fixed order, so training is reproducible. Times: benchmarks/fused_kernels.py.

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
    """How a kernel is launched; benchmarks/fused_kernels.py times others."""

    warps: int = 4
    stages: int = 3
    registers: int | None = None  # at most, per thread; fewer let more programs share a multiprocessor

    @property
    def options(self) -> dict[str, int | None]:
        return {"num_warps": self.warps, "maxnreg": self.registers}


FORWARD, QUERIES, KEYS = Tiling(), Tiling(registers=168), Tiling(registers=168)


@triton.jit
def _locate(tokens, HEADS: tl.constexpr, D: tl.constexpr, N: tl.constexpr):
    """First token of this program's tile, and where its image and head start in qkv, out and stats."""
    program, tiles = tl.program_id(0), tl.cdiv(tokens, N)
    head, image = program // tiles % HEADS, (program // tiles // HEADS).to(tl.int64)
    start = image * tokens * HEADS * D + head * D
    return program % tiles * N, start + 2 * image * tokens * HEADS * D, start, (image * HEADS + head) * tokens


@triton.jit
def _tile(base, first, stride, D: tl.constexpr, N: tl.constexpr):
    """Rows first to first + N - 1, all of which exist."""
    rows = first + tl.arange(0, N)
    return tl.load(base + rows[:, None] * stride + tl.arange(0, D)[None, :])


@triton.jit
def _last_tile(base, first, tokens, stride, D: tl.constexpr, N: tl.constexpr):
    """The same, with zeros behind the last token."""
    rows = first + tl.arange(0, N)
    return tl.load(base + rows[:, None] * stride + tl.arange(0, D)[None, :], (rows < tokens)[:, None], other=0.0)


@triton.jit
def _row(base, row, stride, D: tl.constexpr):
    return tl.load(base + row * stride + tl.arange(0, D)).to(tl.float32)


@triton.jit
def _store(base, first, tokens, stride, values, D: tl.constexpr, N: tl.constexpr):
    rows = first + tl.arange(0, N)
    offsets = rows[:, None] * stride + tl.arange(0, D)[None, :]
    tl.store(base + offsets, values.to(base.dtype.element_ty), (rows < tokens)[:, None])


@triton.jit
def _forward(
    qkv, out, stats, tokens, scale,
    HEADS: tl.constexpr, D: tl.constexpr, TILES: tl.constexpr, REST: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of queries over TILES tiles of keys, then REST single keys."""
    first, at, at_out, at_stats = _locate(tokens, HEADS, D, N)
    width: tl.constexpr = HEADS * D
    keys, values = qkv + at + width, qkv + at + 2 * width
    query = _last_tile(qkv + at, first, tokens, 3 * width, D, N)
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
    _store(out + at_out, first, tokens, width, mixed / total[:, None], D, N)
    rows = first + tl.arange(0, N)
    tl.store(stats + at_stats + rows, top + tl.log2(total), rows < tokens)


@triton.jit
def _query_gradients(
    qkv, out, grad, stats, deltas, dqkv, tokens, scale, slope,
    HEADS: tl.constexpr, D: tl.constexpr, TILES: tl.constexpr, REST: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile of queries; and delta, the sum of out times its gradient, which `_key_gradients` needs."""
    first, at, at_out, at_stats = _locate(tokens, HEADS, D, N)
    width: tl.constexpr = HEADS * D
    keys, values = qkv + at + width, qkv + at + 2 * width
    rows = first + tl.arange(0, N)
    query = _last_tile(qkv + at, first, tokens, 3 * width, D, N)
    g = _last_tile(grad + at_out, first, tokens, width, D, N)
    stat = tl.load(stats + at_stats + rows, rows < tokens, other=0.0)
    delta = tl.sum(_last_tile(out + at_out, first, tokens, width, D, N).to(tl.float32) * g.to(tl.float32), 1)
    tl.store(deltas + at_stats + rows, delta, rows < tokens)
    total = tl.zeros([N, D], tl.float32)
    for i in tl.range(0, TILES, num_stages=STAGES):
        key = _tile(keys, i * N, 3 * width, D, N)
        weight = tl.exp2(tl.dot(query, tl.trans(key)) * scale - stat[:, None])
        ds = weight * (tl.dot(g, tl.trans(_tile(values, i * N, 3 * width, D, N))) - delta[:, None])
        total = tl.dot(ds.to(query.dtype), key, total)
    for i in tl.static_range(REST):
        key1 = _row(keys, TILES * N + i, 3 * width, D)
        weight1 = tl.exp2(tl.sum(query.to(tl.float32) * key1[None, :], 1) * scale - stat)
        dweight1 = tl.sum(g.to(tl.float32) * _row(values, TILES * N + i, 3 * width, D)[None, :], 1)
        total += (weight1 * (dweight1 - delta))[:, None] * key1[None, :]
    _store(dqkv + at, first, tokens, 3 * width, total * slope, D, N)


@triton.jit
def _key_gradients(
    qkv, grad, stats, deltas, dqkv, tokens, scale, slope,
    HEADS: tl.constexpr, D: tl.constexpr, TILES: tl.constexpr, REST: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of one tile of keys and values."""
    first, at, at_out, at_stats = _locate(tokens, HEADS, D, N)
    width: tl.constexpr = HEADS * D
    grad += at_out
    stats += at_stats
    deltas += at_stats
    key = _last_tile(qkv + at + width, first, tokens, 3 * width, D, N)
    value = _last_tile(qkv + at + 2 * width, first, tokens, 3 * width, D, N)
    dkey = tl.zeros([N, D], tl.float32)
    dvalue = tl.zeros([N, D], tl.float32)
    for i in tl.range(0, TILES, num_stages=STAGES):
        rows = i * N + tl.arange(0, N)
        query = _tile(qkv + at, i * N, 3 * width, D, N)
        g = _tile(grad, i * N, width, D, N)
        weight = tl.exp2(tl.dot(key, tl.trans(query)) * scale - tl.load(stats + rows)[None, :])
        dvalue = tl.dot(weight.to(g.dtype), g, dvalue)
        ds = weight * (tl.dot(value, tl.trans(g)) - tl.load(deltas + rows)[None, :])
        dkey = tl.dot(ds.to(query.dtype), query, dkey)
    for i in tl.static_range(REST):
        query1 = _row(qkv + at, TILES * N + i, 3 * width, D)
        g1 = _row(grad, TILES * N + i, width, D)
        weight1 = tl.exp2(tl.sum(key.to(tl.float32) * query1[None, :], 1) * scale - tl.load(stats + TILES * N + i))
        dvalue += weight1[:, None] * g1[None, :]
        dweight1 = tl.sum(value.to(tl.float32) * g1[None, :], 1)
        dkey += (weight1 * (dweight1 - tl.load(deltas + TILES * N + i)))[:, None] * query1[None, :]
    _store(dqkv + at + width, first, tokens, 3 * width, dkey * slope, D, N)
    _store(dqkv + at + 2 * width, first, tokens, 3 * width, dvalue, D, N)


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
    """One program per image, head and tile; then the constants of the kernels."""
    images, tokens, channels = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3 // heads
    return (images * heads * triton.cdiv(tokens, TILE),), (heads, channels, tokens // TILE, tokens % TILE, TILE)
