"""Small stand-ins for networks that no package index has, written after their published structure, and for what can go wrong.

Each has an input and the number of its long skips, counted by hand; `None` where it must be refused although it has some.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class StandIn:
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    num_skips: int | None
    refusal: str = ""  # what the error says, where there is nothing to scale or it cannot be taken hold of


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def image() -> tuple[Tensor]:
    return (randn(2, 3, 8, 8),)


def image_and_time() -> tuple[Tensor, Tensor]:
    return randn(2, 3, 8, 8), torch.tensor([3.0, 500.0])


class Persistent(nn.Module):
    """Copied by pickling, as NVlabs' `persistence` does: a copy is made from its whole state, which cannot refer to it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (type(self), self.__dict__)


def rebuild(cls: type[nn.Module], state: dict[str, Any]) -> nn.Module:
    module = cls.__new__(cls)
    module.__dict__.update(state)
    return module


class ResBlock(nn.Module):
    """norm, act, conv, time, norm, act, zero conv, plus a shortcut."""

    def __init__(self, inputs: int, outputs: int, time: int = 16, up: bool = False, down: bool = False) -> None:
        super().__init__()
        self.in_channels, self.up, self.down = inputs, up, down
        self.norm1, self.norm2 = nn.GroupNorm(4, inputs), nn.GroupNorm(4, outputs)
        self.conv1, self.conv2 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        nn.init.zeros_(self.conv2.weight)
        nn.init.zeros_(self.conv2.bias)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        if self.up:
            x = F.interpolate(x, scale_factor=2.0)
        if self.down:
            x = F.avg_pool2d(x, 2)
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(emb)[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        return self.shortcut(x) + h


class SelfAttention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(4, channels), nn.Conv1d(channels, 3 * channels, 1)
        self.out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(2)
        q, k, v = self.qkv(self.norm(flat)).transpose(1, 2).chunk(3, dim=2)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return (flat + self.out(h)).reshape(x.shape)


class Embed(nn.Module):
    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, size), nn.SiLU(), nn.Linear(size, size))

    def forward(self, time: Tensor) -> Tensor:
        return self.layers(torch.cat([time[:, None].cos(), time[:, None].sin()], dim=1))


# ------------------------------------------------------------------------------------------------------ UNets with cat


class TimeSequential(nn.Sequential):
    """Hands the time to the layers that take it."""

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        for layer in self:
            x = layer(x, emb) if isinstance(layer, ResBlock) else layer(x)
        return x
