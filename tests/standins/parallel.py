"""Several Us in one network, and what a U may do besides: use its input as a skip, recompute, share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def conv(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


class Join(nn.Module):
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv = conv(channels, 4)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return F.silu(self.conv(torch.cat([x, skip], dim=1)))


class OtherJoin(Join):
    """The decoder blocks of a branch may be of another class."""


class Branch(nn.Module):
    """A U of `depth` skips, run by its owner part by part or as a whole."""

    def __init__(self, depth: int = 3, join: type[Join] = Join) -> None:
        super().__init__()
        self.first, self.mid, self.out = conv(3, 4), conv(4, 4), conv(4, 3)
        self.down, self.up = (
            nn.ModuleList(conv(4, 4) for _ in range(depth)),
            nn.ModuleList(join() for _ in range(depth)),
        )

    def encode(self, x: Tensor) -> list[Tensor]:
        kept = [self.first(x)]
        for layer in self.down:
            kept.append(F.silu(layer(kept[-1])))
        return kept[1:]

    def decode(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        for block, skip in zip(self.up, reversed(kept), strict=True):
            x = block(x, skip)
        return self.out(x)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.encode(x)
        return self.decode(self.mid(kept[-1]), kept)


class Branches(nn.Module):
    """Two Us that run at the same time, layer by layer, and meet in the middle, as a time and a frequency branch do."""

    def __init__(self, join: type[Join] = Join) -> None:
        super().__init__()
        self.time, self.freq = Branch(), Branch(join=join)

    def forward(self, x: Tensor) -> Tensor:
        a, b, kept = self.time.first(x), self.freq.first(x.flip(-1)), []
        for left, right in zip(self.time.down, self.freq.down, strict=True):
            a, b = F.silu(left(a)), F.silu(right(b))
            kept.append((a, b))
        a, b = self.time.mid(a + b), self.freq.mid(a - b)
        for left, right in zip(self.time.up, self.freq.up, strict=True):
            one, other = kept.pop()
            a, b = left(a, one), right(b, other)
        return torch.cat([self.time.out(a), self.freq.out(b)], dim=1)


class SideBySide(nn.Module):
    """Two Us of different depth, one after the other on the same input; with `shared`, one U twice."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.time = Branch(3)
        self.freq = self.time if shared else Branch(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.time(x) + self.freq(x.flip(-1))


class TwinDecoders(nn.Module):
    """One encoder, two decoders: every skip is joined twice, once in each U."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.twin = Branch(), Branch()

    def forward(self, x: Tensor) -> Tensor:
        kept = self.net.encode(x)
        x, y = self.net.mid(kept[-1]), self.twin.mid(kept[-1])
        for one, other, skip in zip(self.net.up, self.twin.up, reversed(kept), strict=True):
            x, y = one(x, skip), other(y, skip)
        return torch.cat([self.net.out(x), self.twin.out(y)], dim=1)


class InputSkip(nn.Module):
    """The input itself is the outermost skip."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.last = Branch(2), Join(3 + 4)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.net.encode(x)
        y = self.net.mid(kept[-1])
        for block, skip in zip((*self.net.up, self.last), (*reversed(kept), x), strict=True):
            y = block(y, skip)
        return self.net.out(y)


class JoinedTwice(Branch):
    """The outermost skip is joined by two blocks, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.last = Join()

    def forward(self, x: Tensor) -> Tensor:
        kept = self.encode(x)
        y = self.mid(kept[-1])
        for block, skip in zip((*self.up, self.last), (*reversed(kept), kept[0]), strict=True):
            y = block(y, skip)
        return self.out(y)


class JoinedTwiceAtOnce(Branch):
    """[x, skip, skip] in one concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(conv(12, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        kept = self.encode(x)
        x = self.mid(kept[-1])
        for layer in self.up:
            skip = kept.pop()
            x = layer(torch.cat([x, skip, skip], dim=1))
        return self.out(x)


class Checkpointed(Branch):
    """Recomputes its decoder's activations in every backward pass, whatever its settings."""

    def decode(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        for block, skip in zip(self.up, reversed(kept), strict=True):
            x = checkpoint(block, x, skip, use_reentrant=False)
        return self.out(x)


class SharingCopies(nn.Module):
    """A deep copy of it has the same weights, not copies of them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Branch()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def __deepcopy__(self, memo: Any) -> SharingCopies:
        copied = SharingCopies()
        copied.net = self.net
        return copied
