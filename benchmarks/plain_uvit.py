"""U-ViT without this library, the peer of the benchmarks: skips are concatenated, then projected, as in its public code.

`method` scales the skips as a user would by hand: none, cs (kappa 0.7) or ls. `float_attention` converts queries, keys and
values to float32 before attention, as the public code does; under autocast they are converted back.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, skip: bool, float_attention: bool) -> None:
        super().__init__()
        self.heads, self.float_attention = heads, float_attention
        self.skip_linear = nn.Linear(2 * dim, dim) if skip else None
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        if self.skip_linear is not None:
            x = self.skip_linear(torch.cat([x, skip], dim=-1))
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.float() if self.float_attention else qkv
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class PlainUViT(nn.Module):
    def __init__(
        self, shape: tuple[int, int, int], patch: int, dim: int, depth: int, heads: int, method: str,
        float_attention: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        channels, size, _ = shape
        self.patch, self.dim, self.method, self.side = patch, dim, method, size // patch
        self.embed = nn.Conv2d(channels, dim, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + self.side**2, dim))
        self.in_blocks = nn.ModuleList(Block(dim, heads, False, float_attention) for _ in range(depth // 2))
        self.mid_block = Block(dim, heads, False, float_attention)
        self.out_blocks = nn.ModuleList(Block(dim, heads, True, float_attention) for _ in range(depth // 2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, channels * patch**2)
        self.final = nn.Conv2d(channels, channels, 3, padding=1)
        tokens = 1 + self.side**2
        hidden = max(1, tokens // 16)
        self.gate = nn.Sequential(nn.Linear(tokens, hidden), nn.ReLU(), nn.Linear(hidden, tokens), nn.Sigmoid())
        if method != "ls":
            del self.gate
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        half = self.dim // 2
        angles = time[:, None] * torch.exp(-math.log(1e4) * torch.arange(half, device=x.device) / half)
        token = torch.cat([angles.cos(), angles.sin()], dim=-1)[:, None]
        x = torch.cat([token, self.embed(x).flatten(2).transpose(1, 2)], dim=1) + self.positions
        skips = []
        for block in self.in_blocks:
            x = block(x)
            skips.append(x)
        x = self.mid_block(x)
        for block in self.out_blocks:
            x = block(x, self.scaled(skips.pop(), len(skips)))
        x = self.head(self.norm(x))[:, 1:].unflatten(1, (self.side, self.side))
        x = x.unflatten(-1, (self.patch, self.patch, -1)).permute(0, 5, 1, 3, 2, 4)
        return self.final(x.flatten(4, 5).flatten(2, 3))

    def scaled(self, skip: Tensor, index: int) -> Tensor:
        """Skip number `index`, counted from 0, the outermost."""
        if self.method == "cs":
            return skip * 0.7**index
        if self.method == "ls":
            return skip * self.gate(skip.mean(dim=-1))[:, :, None]
        return skip


def noisy(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(x_t, time of the network, noise) of the VP-SDE at random times."""
    t = torch.rand(len(images), device=images.device)
    log_alpha = -0.25 * 19.9 * t.square() - 0.05 * t
    alpha, sigma = log_alpha.exp(), (-torch.expm1(2 * log_alpha)).sqrt()
    noise = torch.randn_like(images)
    return alpha[:, None, None, None] * images + sigma[:, None, None, None] * noise, 999.0 * t, noise
