"""Transformers with long skips."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.standins.common import Embed


class Merge(nn.Module):
    """lerp(skip, x, learned): an hourglass transformer's token split."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj, self.fac = nn.Linear(width, width), nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = self.proj(x).repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
        return torch.lerp(skip, x, self.fac.to(x.dtype))


class TokenBlock(nn.Module):
    """Attention-free stand-in of a transformer block: two residuals on (..., width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class HDiTStyle(nn.Module):
    """An hourglass of transformer blocks on (B, H, W, C), levels joined by lerp."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(3, 8)
        self.down = nn.ModuleList(TokenBlock(8) for _ in range(2))
        self.merge = nn.ModuleList(nn.Linear(32, 8) for _ in range(2))
        self.mid = TokenBlock(8)
        self.split = nn.ModuleList(Merge(8) for _ in range(2))
        self.up = nn.ModuleList(TokenBlock(8) for _ in range(2))
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.patch(x.movedim(1, -1)), []
        for block, merge in zip(self.down, self.merge, strict=True):
            x = block(x)
            kept.append(x)
            b, h, w, c = x.shape
            x = merge(x.reshape(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h // 2, w // 2, 4 * c))
        x = self.mid(x)
        for block, split in zip(self.up, self.split, strict=True):
            x = block(split(x, kept.pop()))
        return self.out(x).movedim(-1, 1)


class TokenUViT(nn.Module):
    """Tokens (B, T, C); the block concatenates and projects in its own forward."""

    class Block(TokenBlock):
        def __init__(self, width: int, skip: bool = False) -> None:
            super().__init__(width)
            self.skip_linear = nn.Linear(2 * width, width) if skip else None

        def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
            if self.skip_linear is not None:
                x = self.skip_linear(torch.cat([x, skip], dim=-1))
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Conv2d(3, 16, 2, stride=2), nn.Parameter(torch.zeros(1, 17, 16))
        self.time = Embed()
        self.inside = nn.ModuleList(self.Block(16) for _ in range(3))
        self.mid = self.Block(16)
        self.outside = nn.ModuleList(self.Block(16, skip=True) for _ in range(3))
        self.head = nn.Linear(16, 12)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        x, kept = torch.cat([self.time(time)[:, None], tokens], dim=1) + self.position, []
        for block in self.inside:
            x = block(x)
            kept.append(x)
        x = self.mid(x)
        for block in self.outside:
            x = block(x, kept.pop())
        return self.head(x[:, 1:])


class SkipEncoder(nn.Module):
    """torch's own transformer layers, the tokens turned by `.mT`; without gradients they run as one fused function."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=batch_first) for _ in range(5)]
        self.embed, self.layers, self.head = nn.Linear(3, 16), nn.ModuleList(layers), nn.Linear(16, 3)
        self.joins = nn.ModuleList(nn.Linear(32, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        tokens, kept = self._turned(self.embed(x.flatten(2).mT)), []
        for layer in self.layers[:2]:
            tokens = layer(tokens)
            kept.append(tokens)
        tokens = self.layers[2](tokens)
        for layer, join in zip(self.layers[3:], self.joins, strict=True):
            tokens = layer(join(torch.cat([tokens, kept.pop()], dim=-1)))
        return self.head(self._turned(tokens)).mT.unflatten(-1, x.shape[2:])

    def _turned(self, tokens: Tensor) -> Tensor:
        return tokens if self.batch_first else tokens.transpose(0, 1)
