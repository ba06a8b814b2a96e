"""Counter-based random numbers: a function of (seed, stream, index).

All randomness of a run (data order, flips, t, noise) is counter-based, so it does not depend on batch size, ranks, workers
or resuming. The generator is SplitMix64's finalizer over a hashed key.

Shapes: B samples, each with its own index.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_keys: dict[tuple[int, str], int] = {}  # by seed and stream
_counters: dict[tuple[int, torch.device], Tensor] = {}  # by size and device


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's >> keeps the sign of an int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _key(seed: int, stream: str) -> int:
    """Hash of seed and stream, computed once on the CPU to avoid a device sync."""
    if (seed, stream) not in _keys:
        start = torch.tensor([seed, zlib.crc32(stream.encode())], dtype=torch.int64, device="cpu")
        _keys[seed, stream] = int(_mix(_mix(start[0] * _GOLDEN) + start[1]))
    return _keys[seed, stream]


def _counter(size: int, device: torch.device) -> Tensor:
    """1 to `size` times the constant of SplitMix64, kept: torch.compile would compute it from indices of 32 bits."""
    if (size, device) in _counters:
        return _counters[size, device]
    counter = torch.arange(1, size + 1, device=device) * _GOLDEN
    if type(counter) is Tensor:  # not one of a tracer
        _counters[size, device] = counter
    return counter


def random_bits(seed: int, stream: str, index: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """64 random bits per element, (B, *shape) int64; `index` is (B,) int64, the rest of the key is common."""
    key = _mix(_key(seed, stream) + _mix(index.to(torch.int64) * _GOLDEN + 1))
    bits = _mix(key[:, None] + _counter(math.prod(shape), index.device))
    return bits.view(index.shape[0], *shape)


def uniform(seed: int, stream: str, index: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """U[0, 1) as (B, *shape) float64."""
    return _shift_right(random_bits(seed, stream, index, shape), 11).double() * 2.0**-53


def normal(seed: int, stream: str, index: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """N(0, 1) as (B, *shape) float32, by Box and Muller from the two halves of each 64 bits."""
    bits = random_bits(seed, stream, index, shape)
    radius = ((_shift_right(bits, 32)).float() + 0.5) * 2.0**-32
    angle = (bits & 0xFFFFFFFF).float() * (2.0 * math.pi * 2.0**-32)
    return torch.sqrt(-2.0 * torch.log(radius)) * torch.cos(angle)
